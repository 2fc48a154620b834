"""Which kind of linear layer the engine's arguments for quantised weights ask for."""

import dataclasses
import json

import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.linears.compressed import Compressed
from compiled_llm.models.linears.kept_twice import KeptTwice
from compiled_llm.models.linears.kinds import IN_CACHES, linear_kind
from compiled_llm.models.linears.names import Names
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.linears.published import Published
from compiled_llm.models.linears.quantized import Scheme
from compiled_llm.models.linears.quantizing import SCHEMES, Quantizing, check_skip
from compiled_llm.models.quantized.described import described
from compiled_llm.models.quantized.plan import read_quantization
from compiled_llm.models.registry import family_of
from compiled_llm.ops import native
from compiled_llm.ops.linear.compressed_linear import GROUP
from compiled_llm.system.resources import granted_cores

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


def plain_kind(
    config: EngineConfig,
    model_config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    num_bytes_between: int = 0,
) -> LinearKind:
    """The kind for what is not quantised.

    Args:
        num_bytes_between: of weights of other models that are read from one pass of this one to the next.

    Raises:
        ValueError: ``compress_weights`` or ``keep_weights_twice`` is True where there are no kernels for it.
    """
    if config.keep_weights_twice:
        if KeptTwice.serves(device, dtype):
            return KeptTwice
        raise ValueError(
            "keep_weights_twice must be False but for a model in bfloat16 on a CPU with AMX, where a C++ compiler "
            f"built the kernels, given True for {str(dtype)[6:]} on {device}: leave it out"
        )
    compress = config.compress_weights
    if compress is not False and Compressed.serves(device, dtype):
        # A thread takes 64 outputs at a time, of which some layers have hidden_size: with less, some would have none.
        is_shared = model_config.hidden_size >= GROUP * (config.num_threads or granted_cores())
        # With tile registers steps of more than 16 tokens are faster with packed weights.
        is_shared = is_shared and native.best_isa() != "amx"
        if compress or (is_shared and bytes_of_layers(model_config, dtype) + num_bytes_between > IN_CACHES):
            return Compressed
    elif compress:
        raise ValueError(
            "compress_weights must be None or False but for a model in bfloat16 on a CPU with AVX512-BF16, where a C++ "
            f"compiler built the kernels, given True for {str(dtype)[6:]} on {device}: leave it out"
        )
    return linear_kind(device, dtype, config.exact)


def bytes_of_layers(model_config: ModelConfig, dtype: torch.dtype) -> int:
    """Of all linear layers in ``dtype``, without tables of which a step reads single rows."""
    names = Names()
    family_of(model_config).describe(model_config, dtype, names)
    return sum(p.out_features * p.in_features for p in names.parts if p.role != "embedding") * dtype.itemsize


def linears_of(
    config: EngineConfig,
    model_config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    num_bytes_between: int = 0,
) -> LinearKind:
    """The kind for a model: as its checkpoint keeps the weights, and as the engine's arguments say.

    ``num_bytes_between``: as in ``plain_kind``.

    Raises:
        ValueError: as ``plain_kind``; ``quantization_skip`` names no layer that the checkpoint has in plain form, or it
            has none that ``quantization`` could round, or none whose activations ``quantization_activations`` could.
    """
    linears = quantizing(config, plain_kind(config, model_config, device, dtype, num_bytes_between), dtype)
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
    if config.keep_weights_twice and (isinstance(linears, Quantizing) or model_config.published):
        raise ValueError(
            "keep_weights_twice must be False where weights are quantised (quantization, or the checkpoint), given "
            "True: leave it out"
        )
    linears = published(model_config, linears)
    asked = config.quantization_activations
    is_file = isinstance(linears, Published) and linears.plan.method == "gguf"
    if asked == "int8" or (asked == "auto" and is_file and device.type == "cpu" and dtype != torch.float32):
        linears = _with_int8_activations(linears, model_config, dtype, must=asked == "int8")
    elif asked == "model" and not isinstance(linears, Published):
        raise ValueError(
            "quantization_activations must be 'auto' for a checkpoint that is not quantised, given 'model'"
        )
    return linears


def _with_int8_activations(linears: LinearKind, config: ModelConfig, dtype: torch.dtype, must: bool) -> LinearKind:
    """``must``: ``ValueError`` where no layer could have them."""
    names = Names()
    family_of(config).describe(config, dtype, names)
    if isinstance(linears, Published):
        rounded = dataclasses.replace(linears, plan=linears.plan.with_int8_activations())
        if any(rounded.scheme(part) != linears.scheme(part) for part in names.parts):
            return rounded
    if must:
        raise ValueError(
            "quantization_activations='int8' rounds activations that a checkpoint leaves as they are, of layers in "
            "int4 or int8 with groups, but this one has none such: leave it out, or round plain weights by "
            "quantization='int4_w4a8' or 'int8_w8a8'"
        )
    return linears


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
