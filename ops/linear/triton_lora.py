"""What adapters change, on the GPU: one Triton kernel and its launch. ``lora.py`` says what is computed.

The first programs shrink: each multiplies some rows by the A of a part. The next wait for these and expand: each some
rows and outputs, added to ``y`` in place. The last wait for those, and compute what follows the layer, each a row or a
piece of one, by the functions of the single ops (``rowwise/triton_kernels.py``, ``moe/triton_routing.py``); where
nothing follows there are none. So a program waits for programs before it alone, as in ``triton_adapted.py``, which says
why none waits for ever.

A program that shrinks or expands takes the slots of its rows one after the other. So rows need no order, no list of
them is made, and nothing grows with the number of slots. A row's sums are its own, in one order: over the inputs in
steps of one size, with the instructions of tiles of 16 rows; then over the ranks, one after the other.

Layers of few rows have this inside their own launch (``triton_adapted.py``), with the same bits.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear.triton_adapted import NUM_FLAGS, check_lora, note_expanded, times_a, wait_for_programs
from compiled_llm.ops.moe.triton_routing import check_sum, store_sums
from compiled_llm.ops.rowwise.reference import ACTIVATIONS
from compiled_llm.ops.rowwise.triton_kernels import (
    activated_piece,
    cast,
    gated_piece,
    layer_norm_row,
    norm_row,
    sum_of_norms_row,
)
from compiled_llm.ops.rowwise.triton_rowwise import aligned_rows
from compiled_llm.ops.triton_checks import DTYPES, check_contiguous, check_rows, refuse

ROWS = 16  # of a tile
_PROGRAMS = 128  # about a GPU's SMs: fewer rows than tiles for so many are shared out to as many programs
_OUTPUTS = 1024  # of all rows, that a program expands: 8 a thread
MOST_INPUTS = 8192  # elements of A that a step of a program of 4 warps reads; of 8 half: more and registers would spill
_PIECE = 1024  # elements of a row that a program computes which follows
_NORM_BLOCK = 8192  # and that a norm holds
_TOGETHER = tl.constexpr(8)  # ranks whose loads are on their way at a time
_BEHIND_ALL = tl.constexpr(2**31 - 1)


@triton.jit
def rows_of(
    rows, inside, slots, tokens, bounds, num_tokens, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr
):  # fmt: skip
    """Of each row its slot, from 1 on, or 0; its token; and its head or expert."""
    token, group = rows, rows * 0
    if bounds is not None:
        place = tl.arange(0, BLOCK_G)
        ends = tl.load(bounds + 1 + place, mask=place < GROUPS, other=_BEHIND_ALL)
        group = tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), 1)
        inside = inside & (group < GROUPS)
        token = tl.load(tokens + rows, mask=inside, other=0)  # those of nobody's rows are anything
    elif GROUPS > 1:
        token, group = rows % num_tokens, rows // num_tokens
    slot = tl.load(slots + token, mask=inside, other=0)
    return tl.where(slot > 0, (slot - 1) * GROUPS + group + 1, 0), token.to(tl.int64), group


@triton.jit
def shrink_rows(
    number, x, slots, tokens, bounds, a, ranks, scales, shrunk, num_rows, num_tokens, share, stride_x, step_x,
    IN: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr,
    GATHERED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``shrunk[row, p] = A[s, p] x * scale[s, p]`` for ``share`` rows and a part."""
    part, place_of_row, outer = number % PARTS, tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    rows = number // PARTS * share + place_of_row
    inside = (place_of_row < share) & (rows < num_rows)
    left, token, group = rows_of(rows, inside, slots, tokens, bounds, num_tokens, GROUPS, BLOCK_G)
    source = token if GATHERED else rows.to(tl.int64)
    x_rows = x + source * stride_x + group.to(tl.int64) * step_x
    slot = tl.max(left, 0)
    while slot > 0:
        own = left == slot
        place = (slot - 1).to(tl.int64) * PARTS + part
        rank = tl.load(ranks + place)
        if rank > 0:
            acc = times_a(x_rows, own, a + place * RANK * IN, rank, IN, BLOCK_M, BLOCK_R, BLOCK_K)
            target = shrunk + (rows.to(tl.int64)[:, None] * PARTS + part) * RANK + outer[None, :]
            tl.store(target, acc * tl.load(scales + place), mask=own[:, None] & (outer < rank)[None, :])
        left = tl.where(own, 0, left)
        slot = tl.max(left, 0)


@triton.jit
def expand_rows(
    number, y, slots, tokens, bounds, b, ranks, starts, shrunk, num_rows, num_tokens, share, num_tiles, stride_y,
    PARTS: tl.constexpr, RANK: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """``y += B[s] shrunk[row]`` for ``share`` rows and some tiles of outputs, of one part or several."""
    pieces = tl.cdiv(num_tiles, TILES)
    first, place_of_row = number % pieces * TILES, tl.arange(0, BLOCK_M)
    rows = number // pieces * share + place_of_row
    inside_rows = (place_of_row < share) & (rows < num_rows)
    left, token, group = rows_of(rows, inside_rows, slots, tokens, bounds, num_tokens, GROUPS, BLOCK_G)
    target_rows = rows.to(tl.int64)
    if bounds is None and GROUPS > 1:
        target_rows = token * GROUPS + group
    y_rows = y + target_rows * stride_y
    place = tl.arange(0, TILES * 16)
    tile = first + place // 16
    slot = tl.max(left, 0)
    while slot > 0:
        own = left == slot
        b_tile = b + ((slot - 1).to(tl.int64) * num_tiles + tile) * (RANK * 16) + place % 16
        tiles_before = 0
        for part in tl.static_range(PARTS):
            start, end = tl.load(starts + part), tl.load(starts + part + 1)
            count = (end - start + 15) // 16
            rank = tl.load(ranks + (slot - 1) * PARTS + part)
            if (rank > 0) & (first < tiles_before + count) & (first + TILES > tiles_before):
                columns = start + (tile - tiles_before) * 16 + place % 16
                inside = (tile >= tiles_before) & (columns < end)
                terms = shrunk + (rows.to(tl.int64) * PARTS + part) * RANK
                acc = tl.zeros([BLOCK_M, TILES * 16], tl.float32)
                for r in range(0, rank, _TOGETHER):
                    for i in tl.static_range(_TOGETHER):
                        known = place * 0 + r + i < rank
                        weight = tl.load(b_tile + (r + i) * 16, mask=inside & known, other=0.0).to(tl.float32)
                        # From the L2 cache: that of this SM may have older bytes.
                        has_term = own & (place_of_row * 0 + r + i < rank)
                        term = tl.load(terms + r + i, mask=has_term, other=0.0, cache_modifier=".cg")
                        acc = tl.where(known[None, :], tl.fma(weight[None, :], term[:, None], acc), acc)
                target, mask = y_rows[:, None] + columns[None, :], own[:, None] & inside[None, :]
                sums = tl.load(target, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32) + acc
                tl.store(target, cast(sums, y.dtype.element_ty), mask=mask)
            tiles_before += count
        left = tl.where(own, 0, left)
        slot = tl.max(left, 0)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "share", "num_tiles", "shrinking", "expanding"])
def lora_kernel(
    y, x, slots, tokens, bounds, a, b, ranks, scales, starts, flags, shrunk,
    residual, delta_norm, scale, norm, norm_bias, total, places, expert_weights, beside, out,
    num_rows, num_tokens, share, num_tiles, stride_x, step_x, stride_y, stride_residual, shrinking, expanding,
    eps, alpha, limit,
    IN: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr,
    GATHERED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    EXPAND_M: tl.constexpr, TILES: tl.constexpr,
    AFTER: tl.constexpr, ACTIVATION: tl.constexpr, TOP_K: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``shrinking`` programs, then ``expanding`` ones, then those of ``AFTER``, if anything is after."""
    number = tl.program_id(0)
    if number < shrinking:
        shrink_rows(
            number, x, slots, tokens, bounds, a, ranks, scales, shrunk, num_rows, num_tokens, share, stride_x, step_x,
            IN, PARTS, RANK, GROUPS, BLOCK_G, GATHERED, BLOCK_M, BLOCK_R, BLOCK_K,
        )  # fmt: skip
        tl.debug_barrier()  # all threads have stored before one of them counts
        tl.atomic_add(flags, 1, sem="release", scope="gpu")
    elif number < shrinking + expanding:
        wait_for_programs(flags, shrinking)
        expand_rows(
            number - shrinking, y, slots, tokens, bounds, b, ranks, starts, shrunk, num_rows, num_tokens, share,
            num_tiles, stride_y, PARTS, RANK, GROUPS, BLOCK_G, EXPAND_M, TILES,
        )  # fmt: skip
        if AFTER == "":
            note_expanded(flags, expanding)
        else:
            tl.debug_barrier()
            tl.atomic_add(flags, 1, sem="release", scope="gpu")
    elif AFTER != "":
        number -= shrinking + expanding
        wait_for_programs(flags, shrinking + expanding)
        BY_PIECE: tl.constexpr = AFTER == "gate" or AFTER == "activation" or AFTER == "sum"
        PIECES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK if BY_PIECE else 1
        row, piece = (number // PIECES).to(tl.int64), number % PIECES
        if AFTER == "norm":
            norm_row(row, residual, y, norm, total, out, stride_residual, stride_y, eps, SIZE, BLOCK)
        elif AFTER == "own norm":
            norm_row(row, y, None, norm, None, out, stride_y, 0, eps, SIZE, BLOCK)
        elif AFTER == "layer_norm":
            layer_norm_row(
                row, residual, y, beside, norm, norm_bias, total, out, stride_residual, stride_y, eps, SIZE, BLOCK
            )
        elif AFTER == "norms":
            sum_of_norms_row(
                row, residual, None, y, delta_norm, scale, norm, total, out, stride_residual, stride_y, eps, SIZE, BLOCK
            )  # fmt: skip
        elif AFTER == "gate":
            gated_piece(row, piece, y, out, stride_y, alpha, limit, SIZE, ACTIVATION, BLOCK)
        elif AFTER == "activation":
            activated_piece(row, piece, y, out, stride_y, SIZE, ACTIVATION, BLOCK)
        else:
            token, columns = row + tl.arange(0, 1), piece * BLOCK + tl.arange(0, BLOCK)
            store_sums(
                y, places, expert_weights, beside, residual, out, token, token >= 0, columns, TOP_K, SIZE, False
            )  # fmt: skip
        note_expanded(flags, tl.num_programs(0) - shrinking - expanding)


def rows_together(rows: int) -> int:
    """Of a program that shrinks or expands."""
    return min(ROWS, triton.cdiv(rows, _PROGRAMS))


def rows_of_a_piece(warps: int, outputs: int) -> int:
    """That a program of a layer's own launch expands at a time, of a tile so wide: 8 outputs a thread."""
    return min(ROWS, 8 * 32 * warps // outputs)


class SharedOut(NamedTuple):
    """To how many programs rows are shared out that shrink, and to how many that expand."""

    share: int  # rows of each
    shrinking: int
    expanding: int
    constants: dict[str, int]  # of ``expand_rows``

    @classmethod
    def of(cls, rows: int, a: Tensor, b: Tensor) -> "SharedOut":
        share = rows_together(rows)
        expand_m = triton.next_power_of_2(share)
        tiles = _OUTPUTS // 16 // expand_m if expand_m < 8 else 8
        sharing = triton.cdiv(rows, share)
        constants = {"EXPAND_M": expand_m, "TILES": tiles}
        return cls(share, sharing * a.shape[1], sharing * triton.cdiv(b.shape[1], tiles), constants)


def shrinking_tile(rank: int, stage_bytes: int = 1 << 20, most_inputs: int = MOST_INPUTS) -> dict[str, int]:
    """Constants of ``shrink_rows``, in a kernel whose main loop keeps so many bytes of shared memory a stage: no more.

    Elements of the inputs have 16 bits there.
    """
    block_r = triton.next_power_of_2(rank)
    inputs = min(most_inputs // block_r, stage_bytes // (2 * (ROWS + block_r)))
    return {"BLOCK_R": block_r, "BLOCK_K": max(16, min(256, triton.next_power_of_2(inputs + 1) // 2))}


def lora_followed(
    y: Tensor, x: Tensor, slots: Tensor, tokens: Tensor | None, bounds: Tensor | None, groups: int, gathered: bool,
    a: Tensor, b: Tensor, ranks: Tensor, scales: Tensor, starts: Tensor, flags: Tensor,
    activation: str, gated: bool, alpha: float, limit: float,
    places: Tensor | None, expert_weights: Tensor | None, beside: Tensor | None, residual: Tensor | None,
    delta_norm: Tensor | None, scale: Tensor | None, norm: Tensor | None, norm_bias: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    Raises:
        ValueError: a tensor of another shape, dtype or layout; an unknown activation.
    """
    op, by_head = "lora_followed", x.dim() == 3
    num_tokens, wide = len(slots), y.shape[-1]
    if by_head:
        if x.shape[:2] != (num_tokens, groups) or x.stride(2) != 1 or x.dtype not in DTYPES:
            refuse(op, "x", x, f"[{num_tokens}, {groups}, K] with the last stride 1")
        check_contiguous(op, "y", y, (*x.shape[:2], wide), x.device, x.dtype)
        y = y.flatten(0, 1)
    else:
        check_rows(op, x)
    rows = len(y)
    if y.dim() != 2 or y.stride(1) != 1 or y.dtype != x.dtype:
        refuse(op, "y", y, f"[R, N] of {x.dtype} with the last stride 1")
    if bounds is not None:
        check_contiguous(op, "bounds", bounds, (groups + 1,), x.device, torch.int32)
        check_contiguous(op, "tokens", tokens, (rows,), x.device, torch.int32)
        num_sources = num_tokens if gathered else rows
    else:
        num_sources = num_tokens
        if rows != num_tokens * groups:
            refuse(op, "y", y, f"[{num_tokens * groups}, N]")
    if len(x) != num_sources:
        refuse(op, "x", x, f"[{num_sources}, K]")
    check_contiguous(op, "slots", slots, (num_tokens,), x.device, torch.int32)
    check_contiguous(op, "flags", flags, (NUM_FLAGS,), x.device, torch.int32)
    check_lora(op, x, a, b, ranks, scales, starts)
    after, out, total, following, block = "", x.new_empty(0), x.new_empty(0), 0, 16
    residual_stride, size, top_k = 0, 1, 1
    if places is not None:
        assert expert_weights is not None, "of the places"
        check_sum(y, places, expert_weights, beside, residual, wide)
        (num_sums, top_k), after, size = places.shape, "sum", wide
        out = x.new_empty(num_sums, size)
    elif residual is not None:
        for name, weights in (("delta_norm", delta_norm), ("norm", norm), ("norm_bias", norm_bias)):
            check_contiguous(op, name, weights, (wide,), x.device, x.dtype, torch.float32)
        check_contiguous(op, "scale", scale, (1,), x.device, torch.float32)
        if (residual.shape, residual.dtype) != (y.shape, y.dtype):
            refuse(op, "residual", residual, f"like y, {list(y.shape)} of {y.dtype}")
        residual, residual_stride = aligned_rows(residual, op, "residual")
        after, following, size = "norms", rows, wide
        total, out = x.new_empty(rows, wide), x.new_empty(0 if norm is None else (rows, wide))
        block = min(_PIECE, triton.next_power_of_2(size))
        if delta_norm is None and scale is None and norm is not None:
            after = "norm" if norm_bias is None else "layer_norm"
            block = min(_NORM_BLOCK, triton.next_power_of_2(size))
        if after == "layer_norm":
            check_contiguous(op, "beside", beside, (rows, wide), x.device, x.dtype)
        elif beside is not None or norm_bias is not None:
            raise ValueError(f"{op}: beside and norm_bias must be None but for a layer norm of a sum alone")
    elif norm is not None:
        check_contiguous(op, "norm", norm, norm.shape[:1], x.device, x.dtype, torch.float32)
        if len(norm) > wide:
            refuse(op, "norm", norm, f"of at most {wide} elements")
        after, following, size, out = "own norm", rows, len(norm), x.new_empty(rows, len(norm))
        block = min(_NORM_BLOCK, triton.next_power_of_2(size))
    elif activation:
        if activation not in (*ACTIVATIONS, "clamped_swiglu") or (activation == "clamped_swiglu" and not gated):
            raise ValueError(f"{op}: activation must be {' or '.join(ACTIVATIONS)} or clamped_swiglu, got {activation}")
        after, size = ("gate", wide // 2) if gated else ("activation", wide)
        out = x.new_empty(rows, size)
    if after in ("gate", "activation", "sum"):
        block = min(_PIECE, triton.next_power_of_2(size))
        following = len(out) * triton.cdiv(size, block)
    parts, rank = a.shape[1:3]
    shrunk = torch.empty(rows, parts, rank, dtype=torch.float32, device=x.device)
    if not rows:
        return out, total, shrunk
    share, shrinking, expanding, of_tiles = SharedOut.of(rows, a, b)
    warps = 8 if after in ("norm", "own norm", "layer_norm") and block >= _PIECE else 4
    with torch.cuda.device_of(x):
        lora_kernel[(shrinking + expanding + following,)](
            y, x, slots, tokens, bounds, a, b, ranks, scales, starts, flags, shrunk,
            residual, delta_norm, scale, norm, norm_bias, total, places, expert_weights, beside, out,
            rows, num_tokens, share, b.shape[1], x.stride(0), x.stride(1) if by_head else 0, y.stride(0),
            residual_stride, shrinking, expanding, eps, alpha, limit,
            IN=x.shape[-1], PARTS=parts, RANK=rank, GROUPS=groups, BLOCK_G=triton.next_power_of_2(groups),
            GATHERED=gathered or by_head, BLOCK_M=ROWS, **of_tiles,
            AFTER=after, ACTIVATION=activation, TOP_K=top_k, SIZE=size, BLOCK=block,
            **shrinking_tile(rank, most_inputs=MOST_INPUTS * 4 // warps), num_warps=warps, num_stages=3,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out, total, shrunk


def add_lora(
    y: Tensor, x: Tensor, slots: Tensor, a: Tensor, b: Tensor, ranks: Tensor, scales: Tensor, starts: Tensor
) -> Tensor:
    """The op: ``lora_followed`` with nothing behind it, and flags of its own."""
    flags = torch.zeros(NUM_FLAGS, dtype=torch.int32, device=x.device)
    given: Any = a, b, ranks, scales, starts, flags, "", False, 0.0, 0.0, *[None] * 8, 0.0
    return lora_followed(y, x, slots, None, None, 1, False, *given)[2]
