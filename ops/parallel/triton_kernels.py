"""Sums and joins over ranks on GPUs; ``triton_exchange.py`` says how programs exchange pieces.

A program has a run of elements, in pieces of at most PIECE. An element's sum depends neither on its place nor on the
way that it comes: in the order of ranks, or with TREE that of a binary tree of neighbours; in float32, rounded once.
"""

import triton
import triton.language as tl

from compiled_llm.ops.parallel.triton_exchange import come_to, memory_of, pieces_before, slot_of
from compiled_llm.ops.triton_programmatic import wait_for_launches_before


@triton.jit
def rank_sum_kernel(
    x, out, place, memory, size, run, PIECE: tl.constexpr, SUMS: tl.constexpr, SLOT: tl.constexpr, RANKS: tl.constexpr,
    LANES: tl.constexpr, PARTS: tl.constexpr, TREE: tl.constexpr, TWO_SHOT: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """``x`` ``[PARTS, size]`` of each rank -> ``out`` ``[size]``, the sum over parts and ranks.

    Args:
        x: float32 with PARTS above 1, which are a tree of their own.
        run: elements of a program.
        SUMS: where in a slot the sums of a two-shot piece begin, in bytes.
    """
    if PROGRAMMATIC:
        wait_for_launches_before()
    begin = tl.program_id(0) * run
    end = tl.minimum(begin + run, size)
    count = pieces_before(memory)
    piece = tl.load(count)
    for first in range(begin, end, PIECE):
        piece += 1
        slot = slot_of(piece, SLOT)
        elements = tl.minimum(PIECE, end - first)
        own = memory_of(place, tl.load(place), slot, x.dtype.element_ty)
        for block in range(0, elements, BLOCK):
            at = block + tl.arange(0, BLOCK)
            tl.store(own + at, sum_of_parts(x + first + at, at < elements, size, 0, PARTS), mask=at < elements)
        come_to(2 * piece, place, memory, RANKS, LANES)
        if TWO_SHOT:
            section = (tl.cdiv(elements, RANKS) + 15) // 16 * 16
            sum_section(x, out, place, slot, section, elements, SUMS, RANKS, TREE, BLOCK)
            come_to(2 * piece + 1, place, memory, RANKS, LANES)
            gather_sections(out + first, place, slot, section, elements, SUMS, RANKS, BLOCK)
        else:
            for block in range(0, elements, BLOCK):
                at = block + tl.arange(0, BLOCK)
                total = sum_of_ranks(place, slot, at, at < elements, x.dtype.element_ty, RANKS, TREE)
                tl.store(out + first + at, total.to(out.dtype.element_ty), mask=at < elements)
    tl.store(count, piece)


@triton.jit
def sum_section(
    x, out, place, slot, section, elements, SUMS: tl.constexpr, RANKS: tl.constexpr, TREE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The rank's section of a piece, in the dtype of ``out``, to its own slot."""
    rank = tl.load(place).to(tl.int32)
    sums = memory_of(place, rank, slot + SUMS, out.dtype.element_ty)
    for block in range(0, section, BLOCK):
        at = block + tl.arange(0, BLOCK)
        is_own = (at < section) & (rank * section + at < elements)
        total = sum_of_ranks(place, slot, rank * section + at, is_own, x.dtype.element_ty, RANKS, TREE)
        tl.store(sums + at, total.to(out.dtype.element_ty), mask=is_own)


@triton.jit
def gather_sections(
    out, place, slot, section, elements, SUMS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The sums of all ranks' sections."""
    for block in range(0, section, BLOCK):
        for other in tl.static_range(RANKS):
            at = block + tl.arange(0, BLOCK)
            is_there = (at < section) & (other * section + at < elements)
            found = tl.load(memory_of(place, other, slot + SUMS, out.dtype.element_ty) + at, mask=is_there)
            tl.store(out + other * section + at, found, mask=is_there)


@triton.jit
def sum_of_parts(x, mask, size, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Of COUNT parts from the part FIRST on: the sum of both halves' sums."""
    if COUNT == 1:
        return tl.load(x + tl.full([], FIRST, tl.int64) * size, mask=mask)
    else:
        HALF: tl.constexpr = COUNT // 2
        return sum_of_parts(x, mask, size, FIRST, HALF) + sum_of_parts(x, mask, size, FIRST + HALF, HALF)


@triton.jit
def sum_of_ranks(place, slot, at, mask, DTYPE: tl.constexpr, RANKS: tl.constexpr, TREE: tl.constexpr):
    """In float32, of what ranks have in their slots at ``at``."""
    if TREE:
        return _tree_of_ranks(place, slot, at, mask, DTYPE, 0, RANKS)
    else:
        total = tl.load(memory_of(place, 0, slot, DTYPE) + at, mask=mask).to(tl.float32)
        for rank in tl.static_range(1, RANKS):
            total += tl.load(memory_of(place, rank, slot, DTYPE) + at, mask=mask).to(tl.float32)
        return total


@triton.jit
def _tree_of_ranks(place, slot, at, mask, DTYPE: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    if COUNT == 1:
        return tl.load(memory_of(place, FIRST, slot, DTYPE) + at, mask=mask)
    else:
        HALF: tl.constexpr = COUNT // 2
        low = _tree_of_ranks(place, slot, at, mask, DTYPE, FIRST, HALF)
        return low + _tree_of_ranks(place, slot, at, mask, DTYPE, FIRST + HALF, HALF)


@triton.jit
def rank_gather_kernel(
    x, out, place, memory, size, run, width, PIECE: tl.constexpr, SLOT: tl.constexpr, RANKS: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """``x`` ``[size / width, width]`` of each rank, integers -> ``out``, their columns side by side."""
    if PROGRAMMATIC:
        wait_for_launches_before()
    begin = tl.program_id(0) * run
    end = tl.minimum(begin + run, size)
    count = pieces_before(memory)
    piece = tl.load(count)
    for first in range(begin, end, PIECE):
        piece += 1
        slot = slot_of(piece, SLOT)
        elements = tl.minimum(PIECE, end - first)
        own = memory_of(place, tl.load(place), slot, x.dtype.element_ty)
        for block in range(0, elements, BLOCK):
            at = block + tl.arange(0, BLOCK)
            tl.store(own + at, tl.load(x + first + at, mask=at < elements), mask=at < elements)
        come_to(2 * piece, place, memory, RANKS, LANES)
        for block in range(0, elements, BLOCK):
            at = block + tl.arange(0, BLOCK)
            row = (first + at) // width
            for rank in tl.static_range(RANKS):
                found = tl.load(memory_of(place, rank, slot, x.dtype.element_ty) + at, mask=at < elements)
                column = first + at - row * width
                tl.store(out + (row.to(tl.int64) * RANKS + rank) * width + column, found, mask=at < elements)
    tl.store(count, piece)
