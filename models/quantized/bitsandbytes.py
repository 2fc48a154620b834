"""``quant_method`` "bitsandbytes": NF4 (Dettmers et al., 2023, arXiv:2305.14314), as transformers saves it.

    W[n, k] = NF4_VALUES[code[n, k]] * absmax[n, k // 64]

Two codes lie in a byte, the higher four bits first. With double quantisation ``absmax`` has bytes of its own: codes of
``nested_quant_map``, times ``nested_absmax`` of 256 of them, plus an offset. That offset stands in ``quant_state``,
which is JSON.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models.quantized import fields
from compiled_llm.models.quantized.scheme import Scheme, StoredPart, checked_scales, unpack_nibbles
from compiled_llm.ops.linear.quantized_weight import NF4_VALUES, QuantizedRows, WeightFormat

_GROUP, _NESTED = 64, 256
_FORM = WeightFormat("nf4", _GROUP)
_STATE = "weight.quant_state.bitsandbytes__nf4"
_BYTES = (torch.uint8,)
_FLOAT32 = (torch.float32,)
_MOST_JSON = 4096  # bytes; bitsandbytes writes 200 at most


@dataclasses.dataclass(frozen=True)
class Nf4:
    """``nested``: whether ``absmax`` is quantised too."""

    nested: bool
    form: WeightFormat = _FORM
    activations: str = "model"
    static_activations: bool = False
    ordered: bool = False
    in_pieces: str | None = None

    def stored(self, out_features: int, in_features: int) -> dict[str, StoredPart]:
        if in_features % _GROUP:
            raise ValueError(f"in_features must be a multiple of {_GROUP} where weights are nf4, found {in_features}")
        count = out_features * in_features // _GROUP
        found = {
            "weight": StoredPart(((out_features * in_features // 2, 1),), _BYTES),
            "weight.absmax": StoredPart(((count,),), _BYTES if self.nested else _FLOAT32),
            "weight.quant_map": StoredPart(((len(NF4_VALUES),),), _FLOAT32),
            _STATE: StoredPart(((-1,),), _BYTES),
        }
        if self.nested:
            found["weight.nested_absmax"] = StoredPart(((-(-count // _NESTED),),), _FLOAT32)
            found["weight.nested_quant_map"] = StoredPart(((256,),), _FLOAT32)
        return found

    def kept(self, dtypes: Mapping[str, torch.dtype], model: torch.dtype) -> WeightFormat:
        return self.form

    def order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        return None

    def decode(self, tensors: Mapping[str, Tensor], first: int, count: int) -> QuantizedRows:
        state = _state(tensors[_STATE])
        out_features, in_features = state["shape"]
        is_whole = out_features * in_features == 2 * tensors["weight"].numel() and in_features % _GROUP == 0
        if not is_whole or first + count > out_features:
            raise ValueError(f"{_STATE} must have the shape of the layer, given {out_features} x {in_features}")
        if (tensors["weight.quant_map"] - torch.tensor(NF4_VALUES)).abs().max() > 1e-5:
            raise ValueError("weight.quant_map must have the 16 values of NF4, found others")
        codes = unpack_nibbles(tensors["weight"].view(out_features, -1)[first : first + count])
        codes = codes.view(count, -1, 2).flip(-1).flatten(1)  # the higher four bits are the first of two
        groups = in_features // _GROUP
        place = slice(first * groups, (first + count) * groups)
        absmax = self._absmax(tensors, place, state) if self.nested else tensors["weight.absmax"][place]
        return QuantizedRows(codes.view(torch.int8), checked_scales(absmax, "weight.absmax").view(count, groups))

    def _absmax(self, tensors: Mapping[str, Tensor], place: slice, state: Mapping[str, Any]) -> Tensor:
        offset = state.get("nested_offset")
        if type(offset) is not float or not math.isfinite(offset) or state.get("nested_blocksize") != _NESTED:
            raise ValueError(
                f"{_STATE} must have nested_blocksize {_NESTED} and nested_offset, a number, given "
                f"{state.get('nested_blocksize')!r:.100} and {offset!r:.100}"
            )
        values = tensors["weight.nested_quant_map"][tensors["weight.absmax"][place].long()]
        of_blocks = tensors["weight.nested_absmax"][torch.arange(place.start, place.stop) // _NESTED]
        return values * of_blocks + offset


def _state(held: Tensor) -> dict[str, Any]:
    """What ``quant_state`` says. ``ValueError`` where it is no JSON, or says another layout than ``Nf4``."""
    if len(held) > _MOST_JSON:
        raise ValueError(f"{_STATE} must have {_MOST_JSON} bytes at most, found {len(held)}")
    try:
        state = json.loads(bytes(held.tolist()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_STATE} must be JSON: {error}") from error
    given = (state.get("quant_type"), state.get("blocksize")) if isinstance(state, dict) else state
    if given != ("nf4", _GROUP):
        raise ValueError(f"{_STATE} must have quant_type 'nf4' and blocksize {_GROUP}, given {given!r:.100}")
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"{_STATE} must have a shape of two numbers, given {shape!r:.100}")
    return state


def read_bitsandbytes(config: Mapping[str, Any]) -> tuple[Scheme, tuple[str, ...]]:
    """The scheme, and patterns of modules that are not quantised."""
    allowed = {"quant_method", "load_in_4bit", "_load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant",
               "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "llm_int8_skip_modules", "llm_int8_threshold",
               "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"}  # fmt: skip
    fields.known(config, allowed, "quant_method 'bitsandbytes'")
    fields.choice(config, "load_in_4bit", [True])
    fields.choice(config, "bnb_4bit_quant_type", ["nf4"])
    fields.choice(config, "bnb_4bit_quant_storage", ["uint8", None])
    nested = fields.choice(config, "bnb_4bit_use_double_quant", [False, True], False)
    return Nf4(nested), fields.names(config, "llm_int8_skip_modules")
