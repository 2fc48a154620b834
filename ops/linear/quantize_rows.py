"""Rows quantised straight into a packed weight on the CPU, as a model is loaded.

One pass finds the scales, another the codes. Both are those of ``quantize`` of ``quantized_weight.py``, to the bit;
that is plain torch, and goes through memory for every step.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.kernel_build import quantize_rows_library
from compiled_llm.ops.linear.packed_linear import pack_words
from compiled_llm.ops.linear.quantized_weight import (
    QuantizedWeight,
    WeightFormat,
    pack_quantized_rows,
    quantize,
    scales_of,
)


def quantize_into(weight: QuantizedWeight, start: int, rows: Tensor, form: WeightFormat) -> None:
    """Quantise ``rows`` ``[n, K]``, in any dtype, and write them into ``weight`` from row ``start`` on.

    Several threads may do so at once, each with rows of its own.
    """
    functions = _functions()
    if not functions or form.element not in ("int8", "int4") or form.zeros:
        pack_quantized_rows(weight, start, quantize(rows, form), form)
        return
    rows = (rows if rows.dtype in functions else rows.float()).contiguous()
    count, in_features = rows.shape
    assert weight.codes.shape[1] == -(-in_features * form.bits // 32), "rows of other inputs"
    assert 0 <= start <= start + count <= weight.codes.shape[0] * weight.codes.shape[2], "rows beyond the last tile"
    assert weight.codes.is_contiguous()
    find_largest, round_to_codes = functions[rows.dtype]
    group = form.group_size or in_features
    largest = torch.empty(count, form.num_groups(in_features))
    find_largest(rows.data_ptr(), count, in_features, group, largest.data_ptr())
    scales = scales_of(largest, form)
    round_to_codes(
        rows.data_ptr(), count, in_features, group, form.bits, scales.data_ptr(), start, weight.codes.data_ptr()
    )
    pack_words(weight.scales, start, scales.to(weight.scales.dtype))


@functools.cache
def _functions() -> dict[torch.dtype, tuple[Any, Any]]:
    """Dtype of rows -> the C++ functions that find their largest values and round them; none without a compiler."""
    library = native.open_library(quantize_rows_library())
    if library is None:
        return {}
    size, address = ctypes.c_int64, ctypes.c_void_p
    functions = {
        torch.float32: (library.largest_float32, library.quantize_float32),
        torch.bfloat16: (library.largest_bfloat16, library.quantize_bfloat16),
    }
    for find_largest, round_to_codes in functions.values():
        find_largest.argtypes, find_largest.restype = (address, size, size, size, address), None
        round_to_codes.argtypes = address, size, size, size, size, address, size, address
        round_to_codes.restype = None
    return functions
