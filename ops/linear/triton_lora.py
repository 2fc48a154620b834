"""Low-rank changes on the GPU: two Triton kernels and their launches. ``lora.py`` says what is computed.

A program has a tile of rows and a slot, and computes the rows of that slot among them; mostly there are none, and it
ends after one look at the slots. So rows need no order, and no list of them is made. A row's sums are its own, in one
order: over the inputs in steps of one size, then over the ranks; tiles have 16 rows whatever the step has, so the
instructions are the same ones.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear.lora import TILE
from compiled_llm.ops.linear.triton_linear import multiply_add
from compiled_llm.ops.rowwise.triton_kernels import cast
from compiled_llm.ops.triton_checks import check_contiguous, check_rows, refuse

_ROWS = 16  # of a tile
_TILES = 8  # of 16 outputs, that a program of the second kernel has
_MOST_INPUTS = 8192  # elements of A that a step of the first kernel reads


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(
    x, slots, a, ranks, scales, shrunk, num_rows, stride_x, IN: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``shrunk[t, p] = A[s, p] x[t] * scale[s, p]`` for a tile of rows, a slot and a part."""
    slot, part = tl.program_id(1), tl.program_id(2)
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    own = tl.load(slots + rows, mask=rows < num_rows, other=0) == slot + 1
    place = slot * PARTS + part
    rank = tl.load(ranks + place)
    if (tl.max(own.to(tl.int32), 0) > 0) & (rank > 0):
        inner, outer = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
        a_tile = a + (place.to(tl.int64) * RANK + outer[None, :]) * IN + inner[:, None]
        x_tile = x + rows[:, None] * stride_x + inner[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for k in range(0, IN, BLOCK_K):
            inside = inner < IN - k
            of_x = tl.load(x_tile + k, mask=own[:, None] & inside[None, :], other=0.0)
            of_a = tl.load(a_tile + k, mask=(outer < rank)[None, :] & inside[:, None], other=0.0)
            acc = multiply_add(of_x, of_a, acc)
        acc *= tl.load(scales + place)
        target = shrunk + (rows[:, None] * PARTS + part) * RANK + outer[None, :]
        tl.store(target, acc, mask=own[:, None] & (outer < rank)[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def expand_kernel(
    y, slots, b, ranks, starts, shrunk, num_rows, num_tiles, stride_y, PARTS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """``y[t] += B[s] shrunk[t]`` for a tile of rows, a slot and some tiles of outputs, of one part or several."""
    slot, first = tl.program_id(1), tl.program_id(2) * TILES
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    own = tl.load(slots + rows, mask=rows < num_rows, other=0) == slot + 1
    if tl.max(own.to(tl.int32), 0) > 0:
        place = tl.arange(0, TILES * 16)
        tile, ranked = first + place // 16, tl.arange(0, 16)
        b_tile = (
            b + ((slot.to(tl.int64) * num_tiles + tile[None, :]) * RANK + ranked[:, None]) * 16 + place[None, :] % 16
        )
        tiles_before = 0
        for part in tl.static_range(PARTS):
            start, end = tl.load(starts + part), tl.load(starts + part + 1)
            count = (end - start + 15) // 16
            rank = tl.load(ranks + slot * PARTS + part)
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
    num_slots, parts, rank, device = *a.shape[:3], x.device
    check_contiguous("add_lora", "a", a, (num_slots, parts, rank, x.shape[1]), device, x.dtype)
    check_contiguous("add_lora", "b", b, (num_slots, b.shape[1], rank, TILE), device, x.dtype)
    check_contiguous("add_lora", "slots", slots, (len(x),), device, torch.int32)
    check_contiguous("add_lora", "ranks", ranks, (num_slots, parts), device, torch.int32)
    check_contiguous("add_lora", "scales", scales, (num_slots, parts), device, torch.float32)
    check_contiguous("add_lora", "starts", starts, (parts + 1,), device, torch.int32)
    shrunk = x.new_empty(len(x), parts, rank, dtype=torch.float32)
    tiles, block_r = triton.cdiv(len(x), _ROWS), triton.next_power_of_2(rank)
    with torch.cuda.device_of(x):
        shrink_kernel[(tiles, num_slots, parts)](
            x, slots, a, ranks, scales, shrunk, len(x), x.stride(0), IN=x.shape[1], PARTS=parts, RANK=rank,
            BLOCK_M=_ROWS, BLOCK_R=block_r, BLOCK_K=max(16, min(256, _MOST_INPUTS // block_r)),
            num_warps=4, num_stages=3, enable_fp_fusion=x.itemsize == 4,
        )  # fmt: skip
        expand_kernel[(tiles, num_slots, triton.cdiv(b.shape[1], _TILES))](
            y, slots, b, ranks, starts, shrunk, len(x), b.shape[1], y.stride(0), PARTS=parts, RANK=rank,
            BLOCK_M=_ROWS, TILES=_TILES, num_warps=4, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
    return shrunk
