"""What surrounds a linear layer in a model, inside its launch on the GPU: the norm before it, and what follows it.

For kernels whose tiles are ``W x.T``: outputs are their rows. Every step rounds where the ops on their own round, and
the sum of a norm's squares has the order of theirs (``rowwise/triton_kernels.py``), so the bits are those of the single
ops. A program computes the norms of its rows by itself: they are small, and in the cache after the first one.

With a gated activation, a tile has the gates of some outputs and then the ups of the same.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear.surroundings import Surroundings
from compiled_llm.ops.linear.triton_int8_scaling import load_columns
from compiled_llm.ops.rowwise import reference
from compiled_llm.ops.rowwise.triton_kernels import (
    PLACES,
    activated,
    cast,
    clamped_swiglu,
    inverse_root,
    rounded,
    sum_of_places,
    weighted,
)
from compiled_llm.ops.rowwise.triton_rowwise import aligned_rows
from compiled_llm.ops.triton_checks import refuse

_DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes
AHEAD = tl.constexpr(5)  # blocks of rows that are loaded at a time, before the main loop


@triton.jit
def inverse_rms_of_rows(x_rows, inside_rows, eps, IN: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of the rows that ``x_rows`` ``[BLOCK_M]`` points to; squares are added up as ``sum_of_places`` says."""
    STAGES: tl.constexpr = AHEAD if BLOCK_M <= 32 else 1 + (AHEAD - 1) // (BLOCK_M // 32)  # 64 KB on their way
    inner = tl.arange(0, PLACES)[None, :]
    squares = tl.zeros([BLOCK_M, PLACES], tl.float32)
    for k in tl.range(0, IN, PLACES, num_stages=STAGES):
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
def columns_of(tile, OUT: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows of the weight that a tile has, ``[BLOCK_N]``. ``OUT``: outputs of the layer with its activation."""
    place = tl.arange(0, BLOCK_N)
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        return tile * HALF + place % HALF + place // HALF * OUT
    else:
        return tile * BLOCK_N + place


@triton.jit
def gated(gate, up, alpha, limit, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """Of gates and ups that have been rounded to ``dtype``, float32, still to be rounded."""
    if ACTIVATION == "clamped_swiglu":
        return clamped_swiglu(gate, up, alpha, limit)
    else:
        return rounded(activated(gate, ACTIVATION), dtype) * up


@triton.jit
def load_added(added, stride, rows, inside_rows, outputs, OUT: tl.constexpr):
    """``[BLOCK_M, N]`` of what is added to outputs: ``beside`` or ``residual``."""
    inside = inside_rows[:, None] & (outputs < OUT)[None, :]
    return tl.load(added + rows[:, None] * stride + outputs[None, :], mask=inside, other=0.0)


@triton.jit
def store_outputs(
    acc, bias, beside, residual, out, tile, columns, rows, inside_rows, beside_stride, residual_stride,
    OUT: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, MULTIPLIER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, alpha=0.0, limit=0.0, loaded=None, changes=None,
):  # fmt: skip
    """The sums ``acc`` ``[BLOCK_N, BLOCK_M]`` and their biases, what follows, and to ``out`` ``[T, OUT]``.

    ``loaded``: of ``residual``, if it was loaded before. ``changes``: by adapters, ``[BLOCK_N, BLOCK_M]``.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    if bias is not None:
        acc += load_columns(bias, columns, columns < (2 * OUT if GATED else OUT))[:, None]
    if changes is not None:
        acc = rounded(acc, dtype) + changes
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        outputs = tile * HALF + tl.arange(0, HALF)
        gate, up = tl.split(tl.permute(tl.reshape(rounded(acc, dtype), [2, HALF, BLOCK_M]), (2, 1, 0)))
        y = rounded(gated(gate, up, alpha, limit, ACTIVATION, dtype), dtype)
    else:
        outputs = columns
        y = tl.trans(rounded(acc, dtype))
        if ACTIVATION != "":
            y = rounded(activated(y, ACTIVATION), dtype)
    if MULTIPLIER != 1.0:
        y = rounded(y * MULTIPLIER, dtype)
    inside = inside_rows[:, None] & (outputs < OUT)[None, :]
    if beside is not None:
        y = rounded(y + load_added(beside, beside_stride, rows, inside_rows, outputs, OUT).to(tl.float32), dtype)
    if loaded is not None:
        y += loaded.to(tl.float32)
    elif residual is not None:
        y += load_added(residual, residual_stride, rows, inside_rows, outputs, OUT).to(tl.float32)
    tl.store(out + rows[:, None] * OUT + outputs[None, :], cast(y, dtype), mask=inside)


class Outputs(NamedTuple):
    """The tensor for a result ``[T, N]``, and what is added to it: tensors whose rows are so far apart."""

    out: Tensor
    beside: Tensor | None
    residual: Tensor | None
    beside_stride: int
    residual_stride: int


def outputs_of(name: str, x: Tensor, wide: int, around: Surroundings) -> Outputs:
    """What the kernels need of ``around``, checked.

    Args:
        name: of the op. x: ``[T, K]``. wide: rows of the weight, twice the outputs where there is a gated activation.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; an unknown activation; surroundings of a product
            in float32, where they are ops of their own.
    """
    norm, activation = around.norm, around.activation
    if activation and activation not in reference.ACTIVATIONS:
        raise ValueError(f"{name}: activation must be {' or '.join(reference.ACTIVATIONS)}, got {activation}")
    if around.is_gated and wide % 2:
        raise ValueError(f"{name}: with a gated activation N must be even, got {wide}")
    if x.dtype not in _DTYPES and (norm is not None or around.follow):
        raise ValueError(f"{name}: with norm, activation or residual x must be bfloat16 or float16, got {x.dtype}")
    if norm is not None:
        fits = norm.shape == x.shape[1:] and norm.is_contiguous() and norm.data_ptr() % _ALIGNMENT == 0
        if not fits or norm.dtype not in (x.dtype, torch.float32) or norm.device != x.device:
            allowed = f"a contiguous [{x.shape[1]}] of {x.dtype} or torch.float32 on {x.device}"
            refuse(name, "norm", norm, f"{allowed}, aligned to {_ALIGNMENT} bytes")
    out = x.new_empty(x.shape[0], around.outputs(wide))
    beside, beside_stride = _rows_like(out, name, "beside", around.beside)
    residual, residual_stride = _rows_like(out, name, "residual", around.residual)
    return Outputs(out, beside, residual, beside_stride, residual_stride)


def _rows_like(out: Tensor, op: str, name: str, given: Tensor | None) -> tuple[Tensor | None, int]:
    """``given``, aligned, and the distance of its rows."""
    if given is None:
        return None, out.shape[1]
    if (given.shape, given.dtype, given.device) != (out.shape, out.dtype, out.device):
        refuse(op, name, given, f"like the result, {list(out.shape)} of {out.dtype} on {out.device}")
    return aligned_rows(given, op, name, _DTYPES)
