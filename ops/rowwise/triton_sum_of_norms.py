"""Sums of norms on the GPU: their Triton kernel, and the launch. ``sum_of_norms.py`` says what it computes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.rowwise.triton_kernels import PLACES, cast, inverse_root, rounded, sum_of_places, weighted
from compiled_llm.ops.rowwise.triton_rowwise import aligned_rows

_PIECE = 1024  # elements that are stored at a time


@triton.jit
def _inverse_rms(x, norm, eps, SIZE: tl.constexpr):
    """As ``norm_kernel`` has it; 1 without a ``norm``."""
    if norm is None:
        return 1.0
    else:
        squares = tl.zeros([PLACES], tl.float32)
        for start in tl.static_range(0, SIZE, PLACES):
            i = start + tl.arange(0, PLACES)
            y = tl.load(x + i, mask=i < SIZE, other=0.0).to(tl.float32)
            squares += y * y
        return inverse_root(sum_of_places(squares[None, :]), eps, SIZE)


@triton.jit
def _normed(x, norm, inverse, i, SIZE: tl.constexpr):
    y = tl.load(x + i, mask=i < SIZE, other=0.0)
    if norm is None:
        return y.to(tl.float32)
    else:
        weights = tl.load(norm + i, mask=i < SIZE, other=0.0)
        return weighted(y.to(tl.float32) * inverse, weights, y.dtype).to(tl.float32)


@triton.jit
def _sum(x, x_norm, x_inverse, y, y_norm, y_inverse, scale, i, SIZE: tl.constexpr):
    """As float32 that has been rounded to the dtype of ``x``."""
    dtype: tl.constexpr = x.dtype.element_ty
    total = rounded(_normed(x, x_norm, x_inverse, i, SIZE) + _normed(y, y_norm, y_inverse, i, SIZE), dtype)
    if scale is not None:
        total = rounded(total * tl.load(scale), dtype)
    return total


@triton.jit
def sum_of_norms_kernel(
    x, x_norm, y, y_norm, scale, norm, total, out, x_stride, y_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program a row."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    y += row * y_stride
    x_inverse, y_inverse = _inverse_rms(x, x_norm, eps, SIZE), _inverse_rms(y, y_norm, eps, SIZE)
    if norm is not None:
        squares = tl.zeros([PLACES], tl.float32)
        for start in tl.static_range(0, SIZE, PLACES):
            z = _sum(x, x_norm, x_inverse, y, y_norm, y_inverse, scale, start + tl.arange(0, PLACES), SIZE)
            squares += z * z
        inverse = inverse_root(sum_of_places(squares[None, :]), eps, SIZE)
    for start in tl.static_range(0, SIZE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        z = _sum(x, x_norm, x_inverse, y, y_norm, y_inverse, scale, i, SIZE)
        tl.store(total + row * SIZE + i, cast(z, total.dtype.element_ty), mask=i < SIZE)
        if norm is not None:
            weights = tl.load(norm + i, mask=i < SIZE, other=0.0)
            tl.store(out + row * SIZE + i, weighted(z * inverse, weights, out.dtype.element_ty), mask=i < SIZE)


def sum_of_norms(
    x: Tensor, x_norm: Tensor | None, y: Tensor, y_norm: Tensor | None, scale: Tensor | None, norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never synchronises.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device.
    """
    x, x_stride = aligned_rows(x, "sum_of_norms", "x")
    y, y_stride = aligned_rows(y, "sum_of_norms", "y", (x.dtype,))
    rows, size = x.shape
    norms = {"x_norm": x_norm, "y_norm": y_norm, "norm": norm}
    wanted = {"y": (y, (rows, size)), **{name: (tensor, (size,)) for name, tensor in norms.items()}}
    for name, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        fits = tensor.shape == shape and tensor.device == x.device and tensor.stride(-1) == 1
        if not fits or tensor.dtype not in (x.dtype, torch.float32):
            raise ValueError(
                f"sum_of_norms: {name} must be {list(shape)} of {x.dtype}, or of a norm of torch.float32, on "
                f"{x.device}, got {list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            )
    if scale is not None and (scale.shape, scale.dtype, scale.device) != ((1,), torch.float32, x.device):
        raise ValueError(
            f"sum_of_norms: scale must be [1] of torch.float32 on {x.device}, got {list(scale.shape)} of "
            f"{scale.dtype} on {scale.device}"
        )
    total, out = x.new_empty(rows, size), x.new_empty(0 if norm is None else (rows, size))
    if total.numel():
        block = min(_PIECE, triton.next_power_of_2(size))
        with torch.cuda.device_of(x):
            sum_of_norms_kernel[(rows,)](
                x, x_norm, y, y_norm, scale, norm, total, out, x_stride, y_stride, eps, SIZE=size, BLOCK=block,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return total, out
