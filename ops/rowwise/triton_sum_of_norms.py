"""The sum of two norms on the GPU: its Triton kernel, and the launch. ``sum_of_norms.py`` says what it computes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.rowwise.triton_kernels import PLACES, cast, inverse_root, sum_of_places, weighted
from compiled_llm.ops.rowwise.triton_rowwise import aligned_rows

_PIECE = 1024  # elements that are stored at a time


@triton.jit
def _inverse_rms(x, eps, SIZE: tl.constexpr):
    """As ``norm_kernel`` has it."""
    squares = tl.zeros([PLACES], tl.float32)
    for start in tl.static_range(0, SIZE, PLACES):
        i = start + tl.arange(0, PLACES)
        y = tl.load(x + i, mask=i < SIZE, other=0.0).to(tl.float32)
        squares += y * y
    return inverse_root(sum_of_places(squares[None, :]), eps, SIZE)


@triton.jit
def _normed(x, scale, weight, i, SIZE: tl.constexpr):
    y = tl.load(x + i, mask=i < SIZE, other=0.0)
    weights = tl.load(weight + i, mask=i < SIZE, other=0.0)
    return weighted(y.to(tl.float32) * scale, weights, y.dtype).to(tl.float32)


@triton.jit
def sum_of_norms_kernel(
    x, x_norm, y, y_norm, out, x_stride, y_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program a row."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    y += row * y_stride
    x_scale, y_scale = _inverse_rms(x, eps, SIZE), _inverse_rms(y, eps, SIZE)
    for start in tl.static_range(0, SIZE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total = _normed(x, x_scale, x_norm, i, SIZE) + _normed(y, y_scale, y_norm, i, SIZE)
        tl.store(out + row * SIZE + i, cast(total, out.dtype.element_ty), mask=i < SIZE)


def sum_of_norms(x: Tensor, x_norm: Tensor, y: Tensor, y_norm: Tensor, eps: float) -> Tensor:
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never synchronises.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device.
    """
    x, x_stride = aligned_rows(x, "sum_of_norms", "x")
    y, y_stride = aligned_rows(y, "sum_of_norms", "y", (x.dtype,))
    rows, size = x.shape
    wanted = {"y": (y, (rows, size)), "x_norm": (x_norm, (size,)), "y_norm": (y_norm, (size,))}
    for name, (tensor, shape) in wanted.items():
        fits = tensor.shape == shape and tensor.device == x.device and tensor.stride(-1) == 1
        if not fits or tensor.dtype not in (x.dtype, torch.float32):
            raise ValueError(
                f"sum_of_norms: {name} must be {list(shape)} of {x.dtype}, or of a norm of torch.float32, on "
                f"{x.device}, got {list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            )
    out = x.new_empty(rows, size)
    if out.numel():
        block = min(_PIECE, triton.next_power_of_2(size))
        with torch.cuda.device_of(x):
            sum_of_norms_kernel[(rows,)](
                x, x_norm, y, y_norm, out, x_stride, y_stride, eps, SIZE=size, BLOCK=block,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return out
