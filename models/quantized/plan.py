"""``quantization_config`` of a ``config.json`` -> how each linear layer is kept in the checkpoint."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from compiled_llm.models.quantized import fields
from compiled_llm.models.quantized.bitsandbytes import read_bitsandbytes
from compiled_llm.models.quantized.compressed_tensors import read_compressed_tensors
from compiled_llm.models.quantized.fp8 import read_fp8, read_modelopt
from compiled_llm.models.quantized.ggml import read_ggml
from compiled_llm.models.quantized.gptq import read_awq, read_gptq
from compiled_llm.models.quantized.mxfp4 import read_mxfp4
from compiled_llm.models.quantized.scheme import Scheme
from compiled_llm.models.quantized.torchao import read_torchao

# What GPTQ, AWQ, torchao and bitsandbytes leave as it is without saying so: they quantise the layers' own linear
# layers alone.
_NOT_IN_LAYERS = ("lm_head", "embed_out", "embed_tokens", "embed_in", "wte", "wpe")
_ROUTERS = ("gate", "router")


class QuantizationPlan(NamedTuple):
    """What a checkpoint's quantisation is.

    Attributes:
        method: as ``quant_method`` calls it.
        scheme: name of a linear layer, such as ``model.layers.0.mlp.up_proj`` -> how it is kept; None: plainly.
        int8_activations: whether layers round activations that the checkpoint leaves as they are.
    """

    method: str
    scheme: Callable[[str], Scheme | None]
    int8_activations: bool = False

    def with_int8_activations(self) -> "QuantizationPlan":
        """Layers in groups of 4 or 8 bits round the activations that the checkpoint leaves as they are."""

        def rounded(module: str) -> Scheme | None:
            found = self.scheme(module)
            if found is None or found.activations != "model":
                return found
            form = found.form
            fits = form.element in ("int4", "int8") and form.group_size > 0
            return dataclasses.replace(cast(Any, found), activations="int8_groups") if fits else found

        return QuantizationPlan(self.method, rounded, int8_activations=True)


def read_quantization(config: Mapping[str, Any], methods: Sequence[str] = ()) -> QuantizationPlan | None:
    """``quantization_config`` of a parsed ``config.json``; None where there is none.

    Args:
        methods: ``quant_method`` must be one of these; none: any that is known.

    Raises:
        ValueError: it cannot be read; the message names the field.
    """
    given = config.get("quantization_config")
    if given is None:
        return None
    given = fields.table(given, "quant_method")
    method = fields.choice(given, "quant_method", methods or [*_READERS])
    return QuantizationPlan(method, _READERS[method](given))


def _compressed_tensors(given: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    return read_compressed_tensors(given).scheme


def _gptq(given: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    scheme, skipped, only = read_gptq(given)
    within = _within_layers(scheme, skipped)
    return lambda module: within(module) if only is None or _has_any(module, only) else None


def _awq(given: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    # AutoAWQ, which writes them, and vLLM take any part of the name, also one of a word.
    scheme, skipped = read_awq(given)
    within = _within_layers(scheme, skipped)
    plain = [pattern for pattern in skipped if not pattern.startswith("re:")]
    return lambda module: None if _has_any(module, plain) else within(module)


def _has_any(module: str, parts: Sequence[str]) -> bool:
    return any(part in name for name in fields.names_of(module) for part in parts)


def _fp8(given: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    return _within_layers(*read_fp8(given), routers=True)


def _modelopt(given: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    return _within_layers(*read_modelopt(given), routers=True)


def _torchao(given: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    return _within_layers(*read_torchao(given))


def _bitsandbytes(given: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    return _within_layers(*read_bitsandbytes(given))


def _within_layers(
    scheme: Scheme, skipped: tuple[str, ...], *, routers: bool = False
) -> Callable[[str], Scheme | None]:
    """``routers``: whether routers are quantised where they are not among ``skipped``."""
    fields.check_patterns(skipped)
    plain = _NOT_IN_LAYERS if routers else _NOT_IN_LAYERS + _ROUTERS

    def of(module: str) -> Scheme | None:
        return None if module.rpartition(".")[2] in plain or fields.is_within(module, skipped) else scheme

    return of


_READERS: dict[str, Callable[[Mapping[str, Any]], Callable[[str], Scheme | None]]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "gguf": read_ggml,
    "modelopt": _modelopt,
    "torchao": _torchao,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": read_mxfp4,
}
GENERAL = tuple(method for method in _READERS if method != "mxfp4")
"""The methods of all families whose checkpoints have none of their own (``Family.quantizations``)."""
