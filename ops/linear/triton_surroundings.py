"""What surrounds a linear layer in a model, inside its launch on the GPU: the norm before it, and what follows it.

For kernels whose tiles are ``W x.T``: outputs are their rows. Every step rounds where the ops on their own round, and
the sum of a norm's squares has the order of theirs (``rowwise/triton_kernels.py``), so the bits are those of the single
ops. A program computes the norms of its rows by itself: they are small, and in the cache after the first one.

With an activation, a tile has the gates of some outputs and then the ups of the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear.triton_int8_scaling import load_columns
from compiled_llm.ops.rowwise import reference
from compiled_llm.ops.rowwise.triton_kernels import (
    PLACES,
    activated,
    cast,
    inverse_root,
    rounded,
    sum_of_places,
    weighted,
)
from compiled_llm.ops.rowwise.triton_rowwise import aligned_rows

_DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes
AHEAD = tl.constexpr(5)  # blocks of rows that are loaded at a time, before the main loop


@triton.jit
def inverse_rms_of_rows(x_rows, inside_rows, eps, IN: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of the rows that ``x_rows`` ``[BLOCK_M]`` points to; squares are added up as ``sum_of_places`` says."""
    inner = tl.arange(0, PLACES)[None, :]
    squares = tl.zeros([BLOCK_M, PLACES], tl.float32)
    for k in tl.range(0, IN, PLACES, num_stages=AHEAD):
        inside = inside_rows[:, None] & (inner < IN - k)
        y = tl.load(x_rows[:, None] + k + inner, mask=inside, other=0.0).to(tl.float32)
        squares += y * y
    return inverse_root(sum_of_places(squares), eps, IN)


@triton.jit
def normed(x, inverse, norm, places, IN: tl.constexpr):
    """``x`` ``[M, K]``, elements ``places`` of rows, after their norm; ``x`` itself where ``norm`` is None."""
    if norm is None:
        return x
    else:
        weights = tl.load(norm + places, mask=places < IN, other=0.0)[None, :]
        return weighted(x.to(tl.float32) * inverse[:, None], weights, x.dtype)


@triton.jit
def columns_of(tile, OUT: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows of the weight that a tile has, ``[BLOCK_N]``. ``OUT``: outputs of the layer with its activation."""
    place = tl.arange(0, BLOCK_N)
    if ACTIVATION == "":
        return tile * BLOCK_N + place
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        return tile * HALF + place % HALF + place // HALF * OUT


@triton.jit
def store_outputs(
    acc, bias, residual, out, tile, columns, rows, inside_rows, residual_stride,
    OUT: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sums ``acc`` ``[BLOCK_N, BLOCK_M]``: bias, activation, residual, and to ``out`` ``[T, OUT]``."""
    dtype: tl.constexpr = out.dtype.element_ty
    if bias is not None:
        inside = columns < (OUT if ACTIVATION == "" else 2 * OUT)
        acc += load_columns(bias, columns, inside)[:, None]
    if ACTIVATION == "":
        outputs = columns
        y = tl.trans(rounded(acc, dtype))
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        outputs = tile * HALF + tl.arange(0, HALF)
        gate, up = tl.split(tl.permute(tl.reshape(rounded(acc, dtype), [2, HALF, BLOCK_M]), (2, 1, 0)))
        y = rounded(rounded(activated(gate, ACTIVATION), dtype) * up, dtype)
    inside = inside_rows[:, None] & (outputs < OUT)[None, :]
    if residual is not None:
        places = residual + rows[:, None] * residual_stride + outputs[None, :]
        y += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + rows[:, None] * OUT + outputs[None, :], cast(y, dtype), mask=inside)


def outputs_of(
    name: str, x: Tensor, wide: int, norm: Tensor | None, activation: str, residual: Tensor | None
) -> tuple[Tensor, Tensor | None, int]:
    """The tensor for the result; the residual, aligned, and the distance of its rows.

    Args:
        name: of the op. x: ``[T, K]``. wide: rows of the weight, twice the outputs where there is an activation.

    Raises:
        ValueError: a norm or residual of another shape, dtype, layout or device; an unknown activation; surroundings
            of a product in float32, where they are ops of their own.
    """
    if activation and activation not in reference.ACTIVATIONS:
        raise ValueError(f"{name}: activation must be {' or '.join(reference.ACTIVATIONS)}, got {activation}")
    if activation and wide % 2:
        raise ValueError(f"{name}: with an activation N must be even, got {wide}")
    if x.dtype not in _DTYPES and (norm is not None or activation or residual is not None):
        raise ValueError(f"{name}: with norm, activation or residual x must be bfloat16 or float16, got {x.dtype}")
    if norm is not None:
        fits = norm.shape == x.shape[1:] and norm.is_contiguous() and norm.data_ptr() % _ALIGNMENT == 0
        if not fits or norm.dtype not in (x.dtype, torch.float32) or norm.device != x.device:
            raise ValueError(
                f"{name}: norm must be a contiguous [{x.shape[1]}] of {x.dtype} or torch.float32 on {x.device}, "
                f"aligned to {_ALIGNMENT} bytes; got {list(norm.shape)} of {norm.dtype} on {norm.device}"
            )
    out = x.new_empty(x.shape[0], wide // (2 if activation else 1))
    if residual is None:
        return out, None, out.shape[1]
    if (residual.shape, residual.dtype, residual.device) != (out.shape, x.dtype, x.device):
        raise ValueError(
            f"{name}: residual must be like the result, {list(out.shape)} of {x.dtype} on {x.device}, got "
            f"{list(residual.shape)} of {residual.dtype} on {residual.device}"
        )
    return out, *aligned_rows(residual, name, "residual", _DTYPES)
