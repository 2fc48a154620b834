"""The kernels of norms of whole rows in Triton; ``triton_rowwise.py`` launches them."""

import triton
import triton.language as tl

from compiled_llm.ops.rowwise.triton_kernels import (
    PLACES,
    cast,
    inverse_rms,
    inverse_root,
    load_row,
    load_sum,
    sum_of_places,
    weighted,
)
from compiled_llm.ops.triton_programmatic import wait_for_launches_before


@triton.jit
def norm_kernel(
    x, delta, weight, total, out, x_stride, delta_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr = False,
):  # fmt: skip
    """A program a row. ``sum_of_places`` says in which order squares are added up.

    Nothing is written before the last square is read: else a block's loads would wait for the one before.
    """
    if PROGRAMMATIC:
        wait_for_launches_before()
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    if delta is not None:
        delta += row * delta_stride
    squares = tl.zeros([PLACES], tl.float32)
    for start in tl.static_range(0, SIZE, PLACES):
        i = start + tl.arange(0, PLACES)
        y = load_sum(x, delta, i, i < SIZE)
        squares += y * y
    scale = inverse_root(sum_of_places(squares[None, :]), eps, SIZE)
    for start in tl.static_range(0, SIZE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        y = load_sum(x, delta, i, i < SIZE)
        if delta is not None:
            tl.store(total + row * SIZE + i, cast(y, total.dtype.element_ty), mask=i < SIZE)
        weights = tl.load(weight + i, mask=i < SIZE, other=0.0)
        tl.store(out + row * SIZE + i, weighted(y * scale, weights, out.dtype.element_ty), mask=i < SIZE)


@triton.jit
def layer_norm_kernel(
    x, delta, weight, bias, total, out, x_stride, delta_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr = False,
):  # fmt: skip
    """A program a row. Squares are added up by place in the block, block after block, and then all places."""
    if PROGRAMMATIC:
        wait_for_launches_before()
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    if delta is not None:
        delta += row * delta_stride
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        y = load_sum(x, delta, i, i < SIZE)
        sums += y
        if delta is not None:
            tl.store(total + row * SIZE + i, cast(y, total.dtype.element_ty), mask=i < SIZE)
    ones = tl.full([1], 1.0, tl.float32)
    mean = tl.div_rn(tl.sum(sums, 0), ones * SIZE)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        if SIZE > BLOCK:  # else registers still hold the row
            y = load_sum(x, delta, i, i < SIZE)
        centred = tl.where(i < SIZE, y - mean, 0.0)
        squares += centred * centred
    scale = inverse_rms(squares, eps, SIZE)
    for start in tl.static_range(0, SIZE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        if SIZE > BLOCK:
            y = load_sum(x, delta, i, i < SIZE)
        normed = (y - mean) * scale * load_row(weight, i, i < SIZE) + load_row(bias, i, i < SIZE)
        tl.store(out + row * SIZE + i, cast(normed, out.dtype.element_ty), mask=i < SIZE)
