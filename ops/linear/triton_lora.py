"""Low-rank changes on the GPU: two Triton kernels and their launches. ``lora.py`` says what is computed.

A program has some rows, and takes their slots one after the other. So rows need no order, no list of them is made, and
nothing grows with the number of slots. A row's sums are its own, in one order: over the inputs in steps of one size,
then over the ranks; tiles have 16 rows whatever the step has, so the instructions are the same ones.

Layers of few rows have this inside their own launch (``triton_adapted.py``).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear.triton_adapted import check_lora, times_a
from compiled_llm.ops.linear.triton_multiply import multiply_add
from compiled_llm.ops.rowwise.triton_kernels import cast
from compiled_llm.ops.triton_checks import check_rows, refuse

_ROWS = 16  # of a tile
_PROGRAMS = 128  # about a GPU's SMs: fewer rows than tiles for so many are shared out to as many programs
_TILES = 8  # of 16 outputs, that a program of the second kernel has
_MOST_INPUTS = 8192  # elements of A that a step of the first kernel reads


@triton.jit(do_not_specialize=["num_rows", "share"])
def shrink_kernel(
    x, slots, a, ranks, scales, shrunk, num_rows, share, stride_x,
    IN: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``shrunk[t, p] = A[s, p] x[t] * scale[s, p]`` for ``share`` rows and a part."""
    part, place_of_row, outer = tl.program_id(1), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    rows = (tl.program_id(0) * share + place_of_row).to(tl.int64)
    left = tl.load(slots + rows, mask=(place_of_row < share) & (rows < num_rows), other=0)
    slot = tl.max(left, 0)
    while slot > 0:
        own = left == slot
        place = (slot - 1).to(tl.int64) * PARTS + part
        rank = tl.load(ranks + place)
        if rank > 0:
            acc = times_a(x + rows * stride_x, own, a + place * RANK * IN, rank, IN, BLOCK_M, BLOCK_R, BLOCK_K)
            target = shrunk + (rows[:, None] * PARTS + part) * RANK + outer[None, :]
            tl.store(target, acc * tl.load(scales + place), mask=own[:, None] & (outer < rank)[None, :])
        left = tl.where(own, 0, left)
        slot = tl.max(left, 0)


@triton.jit(do_not_specialize=["num_rows", "share", "num_tiles"])
def expand_kernel(
    y, slots, b, ranks, starts, shrunk, num_rows, share, num_tiles, stride_y, PARTS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """``y[t] += B[s] shrunk[t]`` for ``share`` rows and some tiles of outputs, of one part or several."""
    first, place_of_row = tl.program_id(1) * TILES, tl.arange(0, BLOCK_M)
    rows = (tl.program_id(0) * share + place_of_row).to(tl.int64)
    left = tl.load(slots + rows, mask=(place_of_row < share) & (rows < num_rows), other=0)
    place = tl.arange(0, TILES * 16)
    tile, ranked = first + place // 16, tl.arange(0, 16)
    slot = tl.max(left, 0)
    while slot > 0:
        own = left == slot
        tiles = (slot - 1).to(tl.int64) * num_tiles + tile
        b_tile = b + (tiles[None, :] * RANK + ranked[:, None]) * 16 + place[None, :] % 16
        tiles_before = 0
        for part in tl.static_range(PARTS):
            start, end = tl.load(starts + part), tl.load(starts + part + 1)
            count = (end - start + 15) // 16
            rank = tl.load(ranks + (slot - 1) * PARTS + part)
            if (rank > 0) & (first < tiles_before + count) & (first + TILES > tiles_before):
                columns = start + (tile - tiles_before) * 16 + place % 16
                inside = (tile >= tiles_before) & (columns < end)
                s_tile = shrunk + (rows[:, None] * PARTS + part) * RANK + ranked[None, :]
                acc = tl.zeros([BLOCK_M, TILES * 16], tl.float32)
                for r in range(0, rank, 16):
                    of_rank = ranked < rank - r
                    s = tl.load(s_tile + r, mask=own[:, None] & of_rank[None, :], other=0.0)
                    of_b = tl.load(b_tile + r * 16, mask=of_rank[:, None] & inside[None, :], other=0.0)
                    acc = multiply_add(s, of_b.to(tl.float32), acc)
                target, mask = y + rows[:, None] * stride_y + columns[None, :], own[:, None] & inside[None, :]
                sums = tl.load(target, mask=mask, other=0.0).to(tl.float32) + acc
                tl.store(target, cast(sums, y.dtype.element_ty), mask=mask)
            tiles_before += count
        left = tl.where(own, 0, left)
        slot = tl.max(left, 0)


def add_lora(
    y: Tensor, x: Tensor, slots: Tensor, a: Tensor, b: Tensor, ranks: Tensor, scales: Tensor, starts: Tensor
) -> Tensor:
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    Raises:
        ValueError: a tensor of another shape, dtype or layout.
    """
    check_rows("add_lora", x)
    if y.dim() != 2 or y.stride(1) != 1 or y.dtype != x.dtype or len(y) != len(x):
        refuse("add_lora", "y", y, f"[{len(x)}, N] of {x.dtype} with the last stride 1")
    check_lora("add_lora", x, slots, a, b, ranks, scales, starts)
    parts, rank = a.shape[1:3]
    shrunk = x.new_empty(len(x), parts, rank, dtype=torch.float32)
    share, block_r = min(_ROWS, triton.cdiv(len(x), _PROGRAMS)), triton.next_power_of_2(rank)
    groups = triton.cdiv(len(x), share or 1)
    if not groups:
        return shrunk
    with torch.cuda.device_of(x):
        shrink_kernel[(groups, parts)](
            x, slots, a, ranks, scales, shrunk, len(x), share, x.stride(0), IN=x.shape[1], PARTS=parts, RANK=rank,
            BLOCK_M=_ROWS, BLOCK_R=block_r, BLOCK_K=max(16, min(256, _MOST_INPUTS // block_r)),
            num_warps=4, num_stages=3, enable_fp_fusion=x.itemsize == 4,
        )  # fmt: skip
        expand_kernel[(groups, triton.cdiv(b.shape[1], _TILES))](
            y, slots, b, ranks, starts, shrunk, len(x), share, b.shape[1], y.stride(0), PARTS=parts, RANK=rank,
            BLOCK_M=_ROWS, TILES=_TILES, num_warps=4, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
    return shrunk
