"""``quant_method`` "mxfp4": experts that lie in one tensor, as gpt-oss has them; all other layers are plain."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models.quantized import fields
from compiled_llm.models.quantized.scheme import (
    Scheme,
    StoredPart,
    check_whole_groups,
    power_of_two_scales,
    unpack_nibbles,
)
from compiled_llm.ops.linear.quantized_weight import QuantizedRows, WeightFormat

_GROUP = 32  # elements with one scale
_FORM = WeightFormat("fp4", _GROUP, scale_dtype="bfloat16")  # in which all powers of two that e8m0 has are exact
_REGEX = set("\\^$+?{}[]()|")  # what a pattern may not have: it is matched as transformers does without these


@dataclasses.dataclass(frozen=True)
class StackedMxfp4:
    """Two values of four bits in a byte, and for each 32 values of a row the exponent of a power of two.

    OCP Microscaling Formats (MX) v1.0, 2023: elements are e2m1, scales e8m0. The lower four bits of a byte are the
    first of its two values. The tensors are those of all experts, see ``models.reader.Stack``.
    """

    form: WeightFormat = _FORM
    activations: str = "model"
    static_activations: bool = False
    ordered: bool = False
    in_pieces: str | None = "blocks"

    def stored(self, out_features: int, in_features: int) -> dict[str, StoredPart]:
        check_whole_groups(in_features, _GROUP)
        groups = out_features, in_features // _GROUP
        return {
            "blocks": StoredPart(((*groups, _GROUP // 2),), (torch.uint8,)),
            "scales": StoredPart((groups,), (torch.uint8,)),
        }

    def kept(self, dtypes: Mapping[str, torch.dtype], model: torch.dtype) -> WeightFormat:
        return self.form

    def order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        return None

    def decode(self, tensors: Mapping[str, Tensor], first: int, count: int) -> QuantizedRows:
        scales = power_of_two_scales(tensors["scales"][first : first + count], "scales")
        return QuantizedRows(unpack_nibbles(tensors["blocks"].flatten(1)).view(torch.int8), scales)


def read_mxfp4(config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    """Name of a linear layer -> its scheme; None: it is plain.

    ``dequantize`` is what transformers is to do at a load; here it changes nothing.
    """
    fields.known(config, {"quant_method", "modules_to_not_convert", "dequantize"}, "quant_method 'mxfp4'")
    patterns = fields.names(config, "modules_to_not_convert")
    for pattern in patterns:
        if _REGEX & set(pattern):
            raise ValueError(
                "config.json: modules_to_not_convert of quantization_config must have names of modules, in which * "
                f"stands for anything, given {pattern!r:.200}"
            )

    @functools.cache
    def of_experts(module: str) -> Scheme | None:
        return None if fields.is_named(module, patterns) else StackedMxfp4()

    def of(module: str) -> Scheme | None:
        layer, experts, _ = module.partition(".experts.")
        return of_experts(f"{layer}.experts") if experts else None

    return of
