"""The blocks of GGUF files decoded in C++, as a model is loaded: a tenth of the time that plain torch takes.

What they are, and the same in torch, is in ``models/quantized/ggml.py``.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.kernel_build import decode_blocks_library
from compiled_llm.ops.linear.quantized_weight import QuantizedRows, WeightFormat


def decode_blocks(kind: str, size: int, blocks: Tensor, form: WeightFormat, most: float) -> QuantizedRows | None:
    """Rows of blocks of ``size`` elements, ``[n, B, bytes of a block]`` uint8, in ``form``; None without a compiler.

    Raises:
        ValueError: a scale or a least value is above ``most``, or no number.
    """
    library = _library()
    if library is None:
        return None
    blocks = blocks.contiguous()
    count, per_row, _ = blocks.shape
    groups = count, per_row * size // form.group_size
    codes = torch.empty(count, per_row * size, dtype=torch.int8)
    scales, zeros = torch.empty(groups), torch.empty(groups) if form.zeros else None
    decode = getattr(library, f"decode_{kind}")
    decode.argtypes = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, *[ctypes.c_void_p] * 3
    decode.restype = ctypes.c_bool
    of_zeros = None if zeros is None else zeros.data_ptr()
    if not decode(blocks.data_ptr(), count * per_row, most, codes.data_ptr(), scales.data_ptr(), of_zeros):
        raise ValueError(
            f"scales and least values must be numbers up to {most:g}, as they are not: the file is damaged"
        )
    return QuantizedRows(codes, scales, zeros)


@functools.cache
def _library() -> Any:
    return native.open_library(decode_blocks_library())
