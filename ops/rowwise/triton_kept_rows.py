"""``keep_rows`` on the GPU: its Triton kernel, and the launch. ``kept_rows.py`` says what it computes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIECE = 2048  # elements of a program


@triton.jit(do_not_specialize=["num_rows"])
def keep_rows_kernel(x, indices, kept, out, num_rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program a piece of a row: of those that are kept, and then of those that are given."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    if row < num_rows:
        tl.store(kept + row * SIZE + i, tl.load(x + row * SIZE + i, mask=inside), mask=inside)
    else:
        row -= num_rows
        source = tl.load(indices + row).to(tl.int64)
        tl.store(out + row * SIZE + i, tl.load(x + source * SIZE + i, mask=inside), mask=inside)


def keep_rows(x: Tensor, indices: Tensor, kept: Tensor) -> Tensor:
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never synchronises.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device.
    """
    rows, size = x.shape
    fits = kept.dtype == x.dtype and kept.device == x.device and kept.is_contiguous() and x.is_contiguous()
    if not fits or kept.dim() != 2 or kept.shape[0] < rows or kept.shape[1] != size:
        raise ValueError(
            f"keep_rows: x must be contiguous, and kept a contiguous [{rows}, {size}] or longer of {x.dtype} on "
            f"{x.device}, got {list(kept.shape)} of {kept.dtype} on {kept.device}"
        )
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64) or not indices.is_contiguous():
        raise ValueError(
            f"keep_rows: indices must be a contiguous [R] of int32 or int64, got {list(indices.shape)} of "
            f"{indices.dtype}"
        )
    out = x.new_empty(len(indices), size)
    block = min(_PIECE, triton.next_power_of_2(max(size, 1)))
    if rows + len(indices) and size:
        with torch.cuda.device_of(x):
            keep_rows_kernel[(rows + len(indices), triton.cdiv(size, block))](
                x,
                indices,
                kept,
                out,
                rows,
                SIZE=size,
                BLOCK=block,
                num_warps=min(8, max(1, block // 256)),
                enable_fp_fusion=False,
            )
    return out
