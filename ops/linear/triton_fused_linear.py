"""The linear layer with norm, activation and residual on the GPU: its Triton kernel, and the launch.

``fused_linear.py`` says what it computes. A program has some rows and outputs, with an activation the gates and ups of
the same outputs. It computes the norms of its rows by itself: they are small, and in the cache after the first one.

Why a row's bits do not depend on how many rows there are, up to 32: a program has 16 rows and adds up the
inputs, ``BLOCK_K`` at a time, from the first to the last by ``mma.sync``, and the squares of a row by place in the
block and then all places. How many outputs it has follows from the layer alone.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear.triton_linear import multiply_add
from compiled_llm.ops.rowwise import reference
from compiled_llm.ops.rowwise.triton_kernels import activated, cast, inverse_rms, rounded, weighted
from compiled_llm.ops.rowwise.triton_rowwise import aligned_rows

_DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes


class FusedTile(NamedTuple):
    """What a program computes at a time: ``n`` outputs of ``m`` rows from ``k`` inputs."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# (plain, gated): the latter has twice as many columns of weights. At most 99 KB of shared memory, and two or three
# programs an SM: estimated from bytes in flight, not measured.
FEW_OUTPUTS = (FusedTile(16, 16, 256, 4, 4), FusedTile(16, 16, 256, 4, 3))
MANY_OUTPUTS = (FusedTile(16, 32, 128, 4, 6), FusedTile(16, 32, 128, 4, 4))
_MANY = 8192  # outputs from which tiles of 32 are enough for every SM to have some
# Gated products of more rows: weights are read once or twice, so by tiles for ``wgmma`` where there is such.
MORE_ROWS = (FusedTile(64, 64, 64, 4, 3), FusedTile(128, 64, 64, 4, 3))


def tile_for(rows: int, outputs: int, gated: bool) -> FusedTile:
    """The tile of a layer of so many outputs."""
    if gated and rows > 2 * FEW_OUTPUTS[1].m:  # which would read the weights more than twice
        return next((tile for tile in MORE_ROWS if rows <= tile.m), MORE_ROWS[-1])
    return (MANY_OUTPUTS if outputs > _MANY else FEW_OUTPUTS)[gated]


@triton.jit
def _inverse_rms_of_rows(x_rows, inside_rows, eps, IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Of the rows at ``x_rows`` ``[BLOCK_M, 1]``."""
    inner = tl.arange(0, BLOCK_K)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for k in range(0, IN, BLOCK_K):
        inside = inside_rows & (inner < IN - k)[None, :]
        y = tl.load(x_rows + k + inner[None, :], mask=inside, other=0.0).to(tl.float32)
        squares += y * y
    return inverse_rms(squares, eps, IN)[:, None]


@triton.jit
def _with_bias(acc, bias, columns, inside, dtype: tl.constexpr):
    """The sums of ``columns`` and their biases, as float32 that has been rounded to ``dtype``."""
    if bias is not None:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    return rounded(acc, dtype)


@triton.jit(do_not_specialize=["num_rows"])
def fused_linear_kernel(
    x, weight, bias, norm, residual, out, num_rows, x_stride, residual_stride, eps,
    OUT: tl.constexpr, IN: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program a tile of outputs. Those with the same outputs of other rows follow each other, and share weights."""
    dtype: tl.constexpr = x.dtype.element_ty
    num_m = tl.cdiv(num_rows, BLOCK_M)
    rows = (tl.program_id(0) % num_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    columns = (tl.program_id(0) // num_m * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    inside_rows, inside_columns = rows < num_rows, columns < OUT
    x_rows = x + rows * x_stride
    if norm is not None:
        scale = _inverse_rms_of_rows(x_rows, inside_rows, eps, IN, BLOCK_M, BLOCK_K)
    x_tile = x_rows + inner[None, :]
    w_tile = weight + columns[:, None] * IN + inner[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, IN, BLOCK_K):
        inside = inner < IN - k
        inside_weight = inside_columns[:, None] & inside[None, :]
        a = tl.load(x_tile + k, mask=inside_rows & inside[None, :], other=0.0)
        if norm is not None:
            weights = tl.load(norm + k + inner, mask=inside, other=0.0)[None, :]
            a = weighted(a.to(tl.float32) * scale, weights, dtype)
        b = tl.load(w_tile + k, mask=inside_weight, other=0.0)
        acc = multiply_add(a, tl.trans(b), acc)
        if ACTIVATION != "":
            b = tl.load(w_tile + OUT * IN + k, mask=inside_weight, other=0.0)
            up = multiply_add(a, tl.trans(b), up)
    y = _with_bias(acc, bias, columns, inside_columns, dtype)
    if ACTIVATION != "":
        y = rounded(activated(y, ACTIVATION), dtype)
        y = rounded(y * _with_bias(up, bias, OUT + columns, inside_columns, dtype), dtype)
    inside = inside_rows & inside_columns[None, :]
    if residual is not None:
        places = residual + rows * residual_stride + columns[None, :]
        y += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + rows * OUT + columns[None, :], cast(y, dtype), mask=inside)


def fused_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, activation: str,
    residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never synchronises.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; an unknown activation.
    """
    x, x_stride = aligned_rows(x, "fused_linear", "x", _DTYPES)
    _check(x, weight, bias, norm, activation)
    (rows, in_features), out_features = x.shape, weight.shape[0] // (2 if activation else 1)
    out, residual_stride = x.new_empty(rows, out_features), out_features
    if residual is not None:
        if (residual.shape, residual.dtype, residual.device) != (out.shape, x.dtype, x.device):
            raise ValueError(
                f"fused_linear: residual must be like the result, {list(out.shape)} of {x.dtype} on {x.device}, got "
                f"{list(residual.shape)} of {residual.dtype} on {residual.device}"
            )
        residual, residual_stride = aligned_rows(residual, "fused_linear", "residual", _DTYPES)
    if not out.numel():
        return out
    tile = tile_for(rows, out_features, bool(activation))
    with torch.cuda.device_of(x):
        fused_linear_kernel[(triton.cdiv(rows, tile.m) * triton.cdiv(out_features, tile.n),)](
            x, weight, bias, norm, residual, out, rows, x_stride, residual_stride, eps,
            OUT=out_features, IN=in_features, ACTIVATION=activation,
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, activation: str) -> None:
    size = x.shape[1]
    if activation and activation not in reference.ACTIVATIONS:
        raise ValueError(f"fused_linear: activation must be {' or '.join(reference.ACTIVATIONS)}, got {activation}")
    if weight.dim() != 2 or weight.shape[1] != size or not weight.is_contiguous() or size == 0:
        raise ValueError(f"fused_linear: weight must be a contiguous [N, {size}], got {list(weight.shape)}")
    if activation and weight.shape[0] % 2:
        raise ValueError(f"fused_linear: with an activation N must be even, got {weight.shape[0]}")
    known: dict[str, tuple[Tensor | None, torch.Size, tuple[torch.dtype, ...]]] = {
        "weight": (weight, weight.shape, (x.dtype,)),
        "bias": (bias, weight.shape[:1], (x.dtype,)),
        "norm": (norm, x.shape[1:], (x.dtype, torch.float32)),
    }
    for name, (tensor, shape, dtypes) in known.items():
        if tensor is None:
            continue
        fits = tensor.shape == shape and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0
        if not fits or tensor.dtype not in dtypes or tensor.device != x.device:
            raise ValueError(
                f"fused_linear: {name} must be a contiguous {list(shape)} of {' or '.join(map(str, dtypes))} on "
                f"{x.device}, aligned to {_ALIGNMENT} bytes; got {list(tensor.shape)} of {tensor.dtype} on "
                f"{tensor.device}"
            )
