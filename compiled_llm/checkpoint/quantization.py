"""Which kind of linear layer the engine's arguments for quantised weights ask for."""

import json

import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.linears.kinds import linear_kind
from compiled_llm.models.linears.names import Names
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.linears.published import Published
from compiled_llm.models.linears.quantized import Scheme
from compiled_llm.models.linears.quantizing import SCHEMES, Quantizing, check_skip
from compiled_llm.models.quantized.described import described
from compiled_llm.models.quantized.plan import read_quantization
from compiled_llm.models.registry import family_of

# Of layers in 4 bits and fp8, unless asked for.
_HEADS = {"int4": "int8", "mxfp4": "int8", "int4_w4a8": "int8_w8a8", "fp8": "int8"}


def quantizing(config: EngineConfig, plain: LinearKind, dtype: torch.dtype) -> LinearKind:
    """``plain``, or what the engine's arguments make of it: layers that are quantised as they are loaded."""
    if config.quantization is None:
        return plain
    layers = _scheme(config.quantization, config.quantization_group_size)
    head = config.quantization_head
    if head == "auto":
        head = _HEADS.get(config.quantization, config.quantization)
    size = config.quantization_group_size
    embedding = _scheme(config.quantization_embedding, size)
    return Quantizing(plain, dtype, layers, _scheme(head, size), embedding, config.quantization_skip)


def linears_of(config: EngineConfig, model_config: ModelConfig, device: torch.device, dtype: torch.dtype) -> LinearKind:
    """The kind for a model: as its checkpoint keeps the weights, and as the engine's arguments say.

    Raises:
        ValueError: ``quantization_skip`` names no layer that the checkpoint has in plain form, or it has none that
            ``quantization`` could round.
    """
    linears = quantizing(config, linear_kind(device, dtype, config.exact), dtype)
    if isinstance(linears, Quantizing) and (config.quantization_skip or model_config.published):
        plain = Names()
        family_of(model_config).describe(model_config, dtype, published(model_config, plain))
        check_skip(config.quantization_skip, plain.parts)
        if model_config.published and not any(map(linears.scheme, plain.parts)):
            raise ValueError(
                f"quantization={config.quantization!r} rounds layers that a checkpoint has in plain form, but this one "
                f"keeps all that it could round quantised ({described(json.loads(model_config.published))}), and they "
                "stay as they are: leave it out"
            )
    return published(model_config, linears)


def published(config: ModelConfig, plain: LinearKind) -> LinearKind:
    """``plain``, or the kind that reads a quantised checkpoint, in which ``plain`` has the layers that are left."""
    plan = read_quantization({"quantization_config": json.loads(config.published)}) if config.published else None
    return plain if plan is None else Published(plain, plan)


def _scheme(name: str, group_size: int | None) -> Scheme | None:
    if name == "none":
        return None
    scheme = SCHEMES[name]
    if group_size is None or scheme.form.element != "int4":
        return scheme
    return scheme._replace(form=scheme.form._replace(group_size=group_size))
