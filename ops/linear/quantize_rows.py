"""Rows quantised straight into a packed weight on the CPU, as a model is loaded.

One pass finds the scales, another the codes. Both are those of ``quantize_searched`` of ``searched_scales.py``, to the
bit; that is plain torch, and goes through memory for every step.
"""

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.kernel_build import quantize_rows_library
from compiled_llm.ops.linear.packed_linear import pack_words
from compiled_llm.ops.linear.quantized_weight import QuantizedWeight, WeightFormat, pack_quantized_rows, scales_of
from compiled_llm.ops.linear.searched_scales import STEPS, has_fitted_zeros, quantize_searched, scale_candidates

_KINDS = {"int8": 0, "int4": 0, "fp4": 1, "fp8": 2}  # as the C++ functions know them


def quantize_into(weight: QuantizedWeight, start: int, rows: Tensor, form: WeightFormat) -> None:
    """Quantise ``rows`` ``[n, K]``, in any dtype, and write them into ``weight`` from row ``start`` on.

    Several threads may do so at once, each with rows of its own.
    """
    functions, fitted = _functions(), has_fitted_zeros(form)
    kept = form.scale_dtype, form.zero_dtype if form.zeros else "bfloat16"
    if not functions or form.element not in _KINDS or (form.zeros and not (fitted and kept == ("bfloat16",) * 2)):
        pack_quantized_rows(weight, start, quantize_searched(rows, form), form)
        return
    rows = (rows if rows.dtype in functions else rows.float()).contiguous()
    count, in_features = rows.shape
    assert weight.codes.shape[1] == -(-in_features * form.bits // 32), "rows of other inputs"
    assert 0 <= start <= start + count <= weight.codes.shape[0] * weight.codes.shape[2], "rows beyond the last tile"
    assert weight.codes.is_contiguous()
    of, kind = functions[rows.dtype], _KINDS[form.element]
    matrix = rows.data_ptr(), count, in_features, form.group_size or in_features
    zeros = torch.empty(count, form.num_groups(in_features)) if fitted else None
    scales = torch.empty(count, form.num_groups(in_features))
    if zeros is not None:
        steps = torch.tensor(STEPS)
        of.fit(*matrix, steps.data_ptr(), len(steps), scales.data_ptr(), zeros.data_ptr())
    else:
        of.find_largest(*matrix, scales.data_ptr())
        scales = scales_of(scales, form)
    if kind:
        candidates = torch.stack(scale_candidates(scales, form), 2)
        of.choose(*matrix, kind, candidates.data_ptr(), candidates.shape[2], scales.data_ptr())
    address = None if zeros is None else zeros.data_ptr()
    of.round_to_codes(*matrix, kind, form.bits, scales.data_ptr(), address, start, weight.codes.data_ptr())
    pack_words(weight.scales, start, scales.to(weight.scales.dtype))
    if weight.zeros is not None:
        assert zeros is not None
        pack_words(weight.zeros, start, zeros.to(weight.zeros.dtype))


class _Functions(NamedTuple):
    """The C++ functions for rows of a dtype."""

    find_largest: Any
    choose: Any
    fit: Any
    round_to_codes: Any


@functools.cache
def _functions() -> dict[torch.dtype, _Functions]:
    """Dtype of rows -> the C++ functions; none without a compiler."""
    library = native.open_library(quantize_rows_library())
    if library is None:
        return {}
    size, address = ctypes.c_int64, ctypes.c_void_p
    matrix = address, size, size, size
    arguments = {
        "largest": (*matrix, address),
        "choose": (*matrix, size, address, size, address),
        "fit": (*matrix, address, size, address, address),
        "quantize": (*matrix, size, size, address, address, size, address),
    }
    found = {}
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        functions = [getattr(library, f"{function}_{name}") for function in arguments]
        for function, types in zip(functions, arguments.values(), strict=True):
            function.argtypes, function.restype = types, None
        found[dtype] = _Functions(*functions)
    return found
