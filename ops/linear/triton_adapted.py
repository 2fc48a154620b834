"""What adapters change of a linear layer, inside its launch on the GPU.

``lora.py`` says what that is, and ``triton_lora.py`` has it as launches of its own.

The first programs of the launch shrink: each multiplies the rows of a slot by 16 rows of A. The others are those of the
layer. They add up their own products first, then wait until all of the first have ended, and expand what these have
left in memory. So a program waits for programs before it alone, as in a scan with decoupled look-back (Merrill and
Garland, 2016; Inductor's split scans do the same): since a GPU starts the programs of a launch in their order, those
run or have ended, and wait for nobody.

``flags`` counts the first programs that have ended, and those of the others that have seen all of them end. The last
one sets both to zero, for the next launch of the layer: it is ordered behind this one, programmatic or not, since all
programs wait for the launch before to end before they read anything.

A row has the bits of the launches of ``triton_lora.py``. A product with A adds up one matrix instruction after the
other, over all inputs, of the same kind, since no tile of it has the 64 rows that ``wgmma`` wants; one with B adds up
one rank after the other. The layer's own output is rounded before that is added to it, as there.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear.lora import TILE
from compiled_llm.ops.linear.triton_multiply import multiply_add
from compiled_llm.ops.linear.triton_surroundings import inverse_rms_of_rows, normed
from compiled_llm.ops.triton_checks import check_contiguous, refuse
from compiled_llm.ops.triton_programmatic import prefetch_rows

NUM_FLAGS = 2
_ROWS = 16  # the least of a tile
MOST_ROWS = 32  # that programs look through for slots; of a tile: more and registers would spill
_TOGETHER = tl.constexpr(8)  # ranks whose loads are on their way at a time
_AT_ONCE = tl.constexpr(128)  # tiles of B that are asked for at a time


@triton.jit
def times_a(
    x_rows, own, a_rows, rank, IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    norm=None, inverse=None,
):  # fmt: skip
    """``x A.T`` ``[BLOCK_M, BLOCK_R]`` of those rows of x that are a slot's ``own``, and ``rank`` rows of its A."""
    inner, outer = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    a_tile = a_rows + outer[None, :].to(tl.int64) * IN + inner[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for k in range(0, IN, BLOCK_K):
        inside = inner < IN - k
        of_x = tl.load(x_rows[:, None] + k + inner[None, :], mask=own[:, None] & inside[None, :], other=0.0)
        of_x = normed(of_x, inverse, norm, k + inner, IN)
        of_a = tl.load(a_tile + k, mask=(outer < rank)[None, :] & inside[:, None], other=0.0)
        acc = multiply_add(of_x, of_a, acc)
    return acc


@triton.jit
def shrink(
    x, x_stride, num_rows, norm, eps, slots, a, b, ranks, scales, starts, flags, shrunk,
    IN: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """``shrunk[t, p, 16 ranks] = A[s, p] x[t] * scale[s, p]`` for one of the slots that rows have, and a part."""
    first = tl.program_id(0) % (RANK // 16) * 16
    part = tl.program_id(0) // (RANK // 16) % PARTS
    number = tl.program_id(0) // (RANK // 16) // PARTS
    rows = tl.arange(0, BLOCK_M)
    of_rows = tl.load(slots + rows, mask=rows < num_rows, other=0)
    again = (of_rows[:, None] == of_rows[None, :]) & (rows[:, None] > rows[None, :])
    is_new = (of_rows > 0) & (tl.max(again.to(tl.int32), 1) == 0)
    slot = tl.max(tl.where(is_new & (tl.cumsum(is_new.to(tl.int32), 0) == number + 1), of_rows, 0), 0) - 1
    place = tl.maximum(slot, 0).to(tl.int64) * PARTS + part
    rank = tl.load(ranks + place) - first
    if (slot >= 0) & (rank > 0):
        if PROGRAMMATIC:
            _ask_for_b(b, starts, slot, part, first, PARTS, RANK)
        own = of_rows == slot + 1
        x_rows = x + rows.to(tl.int64) * x_stride
        inverse = None
        if norm is not None:
            inverse = inverse_rms_of_rows(x_rows, own, eps, IN, BLOCK_M)
        acc = times_a(x_rows, own, a + (place * RANK + first) * IN, rank, IN, BLOCK_M, 16, BLOCK_K, norm, inverse)
        outer = tl.arange(0, 16)
        target = shrunk + (rows[:, None] * PARTS + part) * RANK + first + outer[None, :]
        tl.store(target, acc * tl.load(scales + place), mask=own[:, None] & (outer < rank)[None, :])
    tl.debug_barrier()  # all threads have stored before one of them counts
    tl.atomic_add(flags, 1, sem="release", scope="gpu")


@triton.jit
def _ask_for_b(b, starts, slot, part, first, PARTS: tl.constexpr, RANK: tl.constexpr):
    """Of a slot and a part, 16 ranks: into the L2 cache, while weights are multiplied."""
    before, count, total = 0, 0, 0
    for other in tl.static_range(PARTS):
        tiles = (tl.load(starts + other + 1) - tl.load(starts + other) + 15) // 16
        before += tl.where(other < part, tiles, 0)
        count += tl.where(other == part, tiles, 0)
        total += tiles
    SIZE: tl.constexpr = 16 * 16 * b.dtype.element_ty.primitive_bitwidth // 8
    for tile in range(0, count, _AT_ONCE):
        own = before + tl.minimum(tile + tl.arange(0, _AT_ONCE), count - 1)
        prefetch_rows(b + ((slot.to(tl.int64) * total + own) * RANK + first) * 16, SIZE, _AT_ONCE, _AT_ONCE * SIZE)


@triton.jit
def wait_for_programs(flags, before):
    """Until so many have counted."""
    done = tl.atomic_add(flags, 0, sem="acquire", scope="gpu")
    while done < before:
        done = tl.atomic_add(flags, 0, sem="acquire", scope="gpu")


@triton.jit
def expand(
    slots, b, ranks, starts, flags, shrunk, before, columns, rows, inside_rows,
    WIDE: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """``B[s] shrunk[t]``, ``[BLOCK_N, BLOCK_M]``, of outputs ``columns`` of ``WIDE``; waits for all that shrink."""
    wait_for_programs(flags, before)
    slot = tl.load(slots + rows, mask=inside_rows, other=0) - 1
    return tl.trans(changes_of(slot, b, ranks, starts, shrunk, columns, rows, WIDE, PARTS, RANK))


@triton.jit
def changes_of(
    slot, b, ranks, starts, shrunk, columns, rows, WIDE: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr
):
    """``B[slot] shrunk[row]``, ``[BLOCK_M, BLOCK_N]``; 0 for rows whose slot is -1."""
    part, first, tile = columns * 0, columns * 0, columns * 0
    total = 0
    for other in tl.static_range(PARTS):
        start = tl.load(starts + other)
        part = tl.where(columns >= start, other, part)
        first = tl.where(columns >= start, start, first)
        tile = tl.where(columns >= start, total, tile)
        total += (tl.load(starts + other + 1) - start + 15) // 16
    tile += (columns - first) // 16
    # Rows by outputs: so neighbouring threads load what lies side by side.
    known = (slot >= 0)[:, None] & (columns < WIDE)[None, :]
    rank = tl.load(ranks + slot[:, None] * PARTS + part[None, :], mask=known, other=0)
    of_b = b + (slot.to(tl.int64)[:, None] * total + tile[None, :]) * (RANK * 16) + ((columns - first) % 16)[None, :]
    terms = shrunk + (rows.to(tl.int32)[:, None] * PARTS + part[None, :]) * RANK
    acc = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    for r in range(0, tl.max(tl.max(rank, 1), 0), _TOGETHER):
        for i in tl.static_range(_TOGETHER):
            inside = r + i < rank
            weight = tl.load(of_b + (r + i) * 16, mask=inside, other=0.0).to(tl.float32)
            # From the L2 cache: that of this SM may have older bytes.
            term = tl.load(terms + r + i, mask=inside, other=0.0, cache_modifier=".cg")
            acc = tl.where(inside, tl.fma(weight, term, acc), acc)
    return acc


@triton.jit
def changed(
    y_rows, inside_rows, slot, b, ranks, starts, shrunk, columns, rows, WIDE: tl.constexpr, PARTS: tl.constexpr,
    RANK: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """``y + B[slot] shrunk[row]``, ``[BLOCK_M, BLOCK_N]``, of rows of y that this program has stored, in some columns.

    So a layer with large tiles takes its own sums back in pieces: there are no registers to change all of them at once.
    SOME: the slot of some rows is -1, and these stay as they are; else all have one, or are not inside.
    """
    mask = inside_rows[:, None] & (columns < WIDE)[None, :]
    # From the L2 cache: another thread has stored it.
    y = tl.load(y_rows[:, None] + columns[None, :], mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    changes = changes_of(slot, b, ranks, starts, shrunk, columns, rows, WIDE, PARTS, RANK)
    if SOME:  # -0.0 stays -0.0
        changes = tl.where((slot >= 0)[:, None], changes, -0.0)
    return y + changes


@triton.jit
def note_expanded(flags, readers):
    """By each of the ``readers``, programs that have expanded: the last one sets ``flags`` to zero."""
    if tl.atomic_add(flags + 1, 1, sem="relaxed", scope="gpu") == readers - 1:
        tl.store(flags, 0)
        tl.store(flags + 1, 0)


class Adapters(NamedTuple):
    """The last arguments of a layer's kernel, for the adapters that change it; of nobody: nothing."""

    slots: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    ranks: Tensor | None = None
    scales: Tensor | None = None
    starts: Tensor | None = None
    flags: Tensor | None = None
    shrunk: Tensor | None = None
    before: int = 0  # programs that shrink

    def constants(self, rows: int, stage_bytes: int) -> dict[str, Any]:
        """For ``rows`` of x, in a kernel whose main loop keeps ``stage_bytes`` of shared memory a stage: no more."""
        if self.a is None:
            return {"PARTS": 0, "RANK": 0, "SHRINK_M": 0, "SHRINK_K": 0}
        block_m = max(_ROWS, triton.next_power_of_2(rows))
        inputs = stage_bytes // (self.a.itemsize * (block_m + TILE))
        block_k = max(16, min(256, triton.next_power_of_2(inputs + 1) // 2))
        return {"PARTS": self.a.shape[1], "RANK": self.a.shape[2], "SHRINK_M": block_m, "SHRINK_K": block_k}


def adapters_of(op: str, x: Tensor, wide: int, lora: Sequence[Tensor]) -> Adapters:
    """What the kernels need of ``lora``, the field of ``Surroundings`` of that name, checked.

    Args:
        x: ``[T, K]``; wide: rows of the weight.

    Raises:
        ValueError: a tensor of another shape, dtype or layout; more rows than programs look through for slots.
    """
    if not lora:
        return Adapters()
    slots, a, b, ranks, scales, starts, flags = lora
    rows, device = len(x), x.device
    if rows > MOST_ROWS:
        raise ValueError(f"{op}: x must have at most {MOST_ROWS} rows with adapters, got {rows}; see add_lora")
    if a.dim() != 4:
        refuse(op, "a", a, f"[S, P, R, {x.shape[1]}]")
    check_contiguous(op, "slots", slots, (rows,), device, torch.int32)
    check_lora(op, x, a, b, ranks, scales, starts)
    if b.shape[1] * TILE < wide:
        refuse(op, "b", b, f"of {wide} outputs, in tiles of {TILE}")
    check_contiguous(op, "flags", flags, (NUM_FLAGS,), device, torch.int32)
    num_slots, parts, rank = a.shape[:3]
    shrunk = torch.empty(rows, parts, rank, dtype=torch.float32, device=device)
    before = min(rows, num_slots) * parts * (rank // TILE)
    return Adapters(slots, a, b, ranks, scales, starts, flags, shrunk, before)


def check_lora(op: str, x: Tensor, a: Tensor, b: Tensor, ranks: Tensor, scales: Tensor, starts: Tensor) -> None:
    """``ValueError`` where tensors are not those of ``lora.LoraWeights`` for inputs ``x`` ``[..., K]``."""
    num_slots, parts, rank, device = *a.shape[:3], x.device
    check_contiguous(op, "a", a, (num_slots, parts, rank, x.shape[-1]), device, x.dtype)
    check_contiguous(op, "b", b, (num_slots, b.shape[1], rank, TILE), device, x.dtype)
    check_contiguous(op, "ranks", ranks, (num_slots, parts), device, torch.int32)
    check_contiguous(op, "scales", scales, (num_slots, parts), device, torch.float32)
    check_contiguous(op, "starts", starts, (parts + 1,), device, torch.int32)
