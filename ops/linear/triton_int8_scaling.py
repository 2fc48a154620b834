"""What follows the integer sums of int8 activations on quantised weights, on the GPU: operations in one defined order.

Kernels that multiply call ``scaled`` and ``finished``. ``scale_sums`` does the same to sums that another product has
left in memory, such as ``torch._int_mm``: integers are exact whoever adds them up, so both give the same bits. No
product and sum here is left for the compiler to fuse, or not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.rowwise.triton_kernels import cast

_BLOCK_M, _BLOCK_N = 16, 128


@triton.jit
def load_columns(tensor, offsets, inside):
    """Scales, zero points or biases of some outputs, float32; None for None."""
    if tensor is None:
        return  # not "return None", which Triton 3.6 cannot compile
    else:
        return tl.load(tensor + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def scaled(sums, acc, scale, zero, of_x, x_scale=None):
    """``acc`` and the integer ``sums`` ``[N, M]`` of a group: ``fma(fma(-zero, of_x, sums), scale, acc)``.

    ``of_x``: the sums of xq, ``[M]`` int32. ``x_scale``: of the group of each row of x, ``[M]``.
    """
    found = sums.to(tl.float32)
    if zero is not None:
        of_x = tl.broadcast_to(of_x.to(tl.float32)[None, :], acc.shape)
        found = tl.fma(tl.broadcast_to(-zero[:, None], acc.shape), of_x, found)
    if x_scale is not None:
        found = found * tl.broadcast_to(x_scale[None, :], acc.shape)
    return tl.fma(found, tl.broadcast_to(scale[:, None], acc.shape), acc)


@triton.jit
def finished(acc, x_scale, bias):
    """``acc`` ``[N, M]`` by the scales of the rows of x, and the bias: ``fma(acc, sx, bias)``."""
    x_scale = tl.broadcast_to(x_scale[None, :], acc.shape)
    if bias is None:
        return acc * x_scale
    else:
        return tl.fma(acc, x_scale, tl.broadcast_to(bias[:, None], acc.shape))


@triton.jit(do_not_specialize=["num_rows"])
def scale_kernel(
    sums, x_scales, x_sums, scales, zeros, bias, out, num_rows,
    OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program a tile."""
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_rows, inside = rows < num_rows, columns < OUT
    both = inside[:, None] & inside_rows[None, :]
    places = rows[None, :] * OUT + columns[:, None]
    found = tl.load(sums + places, mask=both, other=0)
    of_x = None
    if zeros is not None:
        of_x = tl.load(x_sums + rows, mask=inside_rows, other=0)
    acc = scaled(
        found, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), load_columns(scales, columns, inside),
        load_columns(zeros, columns, inside), of_x,
    )  # fmt: skip
    acc = finished(acc, tl.load(x_scales + rows, mask=inside_rows, other=0.0), load_columns(bias, columns, inside))
    tl.store(out + places, cast(acc, out.dtype.element_ty), mask=both)


def scale_sums(
    sums: Tensor, x_scales: Tensor, x_sums: Tensor | None, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    out: Tensor,
) -> None:  # fmt: skip
    """Write the layer's outputs ``[T, N]`` to ``out``, of the integer sums over all inputs.

    Args:
        sums: ``[T, N]`` int32, contiguous: ``code * xq`` added up.
        x_scales, x_sums: of the rows, as ``quantize_rows`` gives them.
        scales, zeros: ``[1, N]``; bias: ``[N]``.
    """
    rows, out_features = sums.shape
    with torch.cuda.device_of(sums):
        scale_kernel[(triton.cdiv(rows, _BLOCK_M), triton.cdiv(out_features, _BLOCK_N))](
            sums, x_scales, x_sums, scales, zeros, bias, out, rows, OUT=out_features, BLOCK_M=_BLOCK_M,
            BLOCK_N=_BLOCK_N, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
