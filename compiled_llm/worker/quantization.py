"""Which kind of linear layer the engine's arguments for quantised weights ask for."""

import torch

from compiled_llm.config import EngineConfig
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.linears.quantized import Scheme
from compiled_llm.models.linears.quantizing import SCHEMES, Quantizing

_HEADS = {"int4": "int8", "mxfp4": "int8", "int4_w4a8": "int8_w8a8"}  # of layers in 4 bits, unless asked for


def quantizing(config: EngineConfig, plain: LinearKind, dtype: torch.dtype) -> LinearKind:
    """``plain``, or what the engine's arguments make of it: layers that are quantised as they are loaded."""
    if config.quantization is None:
        return plain
    layers = _scheme(config.quantization, config.quantization_group_size)
    head = config.quantization_head
    if head == "auto":
        head = _HEADS.get(config.quantization, config.quantization)
    embedding = config.quantization_embedding
    return Quantizing(
        plain,
        dtype,
        layers,
        None if head is None else _scheme(head, config.quantization_group_size),
        None if embedding is None else _scheme(embedding, config.quantization_group_size),
        config.quantization_skip,
    )


def _scheme(name: str, group_size: int | None) -> Scheme:
    scheme = SCHEMES[name]
    if group_size is None or scheme.form.element != "int4":
        return scheme
    return scheme._replace(form=scheme.form._replace(group_size=group_size))
