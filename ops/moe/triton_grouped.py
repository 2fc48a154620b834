"""The experts' linear layers on the GPU: Triton kernel and launch. ``grouped_linear.py`` says what it computes.

The grid is fixed by the shapes, so the launch needs no look at which expert has how many rows, and may be part of a
CUDA graph. A program computes one tile of rows of one expert; it finds which from ``starts``. Experts share no tiles,
so there are at most ``R / m + E`` of them, of m rows each; the programs that are left over end at once.

An output is one accumulator over all inputs, in the tiles and with the instructions of ``triton_linear.py``: so its
bits do not depend on the rows that its expert has besides. A gate behind a product, and the sum of a token's experts
behind another, round where the ops on their own round.

What adapters change is in the launch, as in ``linear/triton_adapted.py``: the first programs shrink, as those of
``linear/triton_lora.py``, and the others expand what they have stored, some rows at a time.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear import triton_linear
from compiled_llm.ops.linear.triton_adapted import NUM_FLAGS, changed, check_lora, note_expanded, wait_for_programs
from compiled_llm.ops.linear.triton_lora import ROWS, rows_of_a_piece, rows_together, shrink_rows, shrinking_tile
from compiled_llm.ops.linear.triton_multiply import multiply_add
from compiled_llm.ops.linear.triton_quantized import aligned
from compiled_llm.ops.linear.triton_surroundings import gated
from compiled_llm.ops.moe.grouped_linear import rows_of_a_tile
from compiled_llm.ops.moe.triton_routing import check_sum, store_sums
from compiled_llm.ops.programmatic_launch import launch_options
from compiled_llm.ops.rowwise.reference import GATES
from compiled_llm.ops.rowwise.triton_kernels import cast, rounded
from compiled_llm.ops.triton_checks import check_contiguous, check_rows, refuse
from compiled_llm.ops.triton_programmatic import wait_for_launches_before

SUMMED_AT_ONCE = 16  # rows of a tile, whose tokens may be complete


@triton.jit
def own_tile(starts, place, EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of the tile at ``place``: its expert, its rows, which of them there are; and how many rows all experts have.

    The expert is EXPERTS or more where no tile is left.
    """
    experts = tl.arange(0, EXPERTS_POW2)
    first = tl.load(starts + experts, mask=experts < EXPERTS, other=0)
    count = tl.load(starts + experts + 1, mask=experts < EXPERTS, other=0) - first
    tiles = (count + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= place).to(tl.int32), 0)  # whose tiles end after this place
    own = experts == expert
    row = tl.sum(tl.where(own, first + (place - (ends - tiles)) * BLOCK_M, 0), 0)
    end = tl.sum(tl.where(own, first + count, 0), 0)
    rows = row + tl.arange(0, BLOCK_M)
    return expert, rows, rows < end, tl.sum(count, 0)


@triton.jit
def _with_bias(acc, bias, columns, inside):
    """The sums of ``columns`` and their biases."""
    if bias is not None:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _tile_outputs(
    x, weight, bias, expert, sources, inside_rows, columns, x_stride, alpha, limit, wide,
    OUT: tl.constexpr, IN: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``OUT`` outputs an expert, of a tile of them; with an activation from as many gates and then as many ups.

    ``wide``: where gates and ups are stored, of the tile's rows ``[BLOCK_M]``, and no more is done; None: nowhere.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    WIDE: tl.constexpr = OUT if ACTIVATION == "" else 2 * OUT
    inner = tl.arange(0, BLOCK_K)
    inside_columns = columns < OUT
    x_tile = x + sources.to(tl.int64)[:, None] * x_stride + inner[None, :]
    w_tile = weight + expert.to(tl.int64) * WIDE * IN + columns[:, None] * IN + inner[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, IN, BLOCK_K):
        inside = (inner < IN - k)[None, :]
        a = tl.load(x_tile + k, mask=inside_rows[:, None] & inside, other=0.0)
        b = tl.load(w_tile + k, mask=inside_columns[:, None] & inside, other=0.0)
        acc = multiply_add(a, tl.trans(b), acc)
        if ACTIVATION != "":
            b = tl.load(w_tile + OUT * IN + k, mask=inside_columns[:, None] & inside, other=0.0)
            up = multiply_add(a, tl.trans(b), up)
    acc = _with_bias(acc, bias, expert * WIDE + columns, inside_columns)
    if ACTIVATION != "":
        up = _with_bias(up, bias, expert * WIDE + OUT + columns, inside_columns)
        if wide is not None:
            mask = inside_rows[:, None] & inside_columns[None, :]
            tl.store(wide[:, None] + columns[None, :], cast(acc, dtype), mask=mask)
            tl.store(wide[:, None] + OUT + columns[None, :], cast(up, dtype), mask=mask)
        else:
            acc = gated(rounded(acc, dtype), rounded(up, dtype), alpha, limit, ACTIVATION, dtype)
    return cast(acc, dtype)


@triton.jit
def _change_tile(
    y, out, expert, rows, inside_rows, columns, alpha, limit, tokens, slots, b, ranks, starts, flags, shrunk, before,
    OUT: tl.constexpr, ACTIVATION: tl.constexpr, EXPERTS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """The tile's sums in ``y`` as adapters change them, and the activation of these, in ``out``.

    Without an activation both are one tensor, and rows that nothing changes are passed over.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    WIDE: tl.constexpr = OUT if ACTIVATION == "" else 2 * OUT
    tl.debug_barrier()  # all threads have stored before one of them loads it again
    wait_for_programs(flags, before)
    first_row, end_row = tl.min(rows, 0), tl.max(tl.where(inside_rows, rows + 1, 0), 0)
    for first in range(first_row, end_row, PIECE):
        row = first + tl.arange(0, PIECE)
        token = tl.load(tokens + row, mask=row < end_row, other=0)
        slot = tl.load(slots + token, mask=row < end_row, other=0)
        if ACTIVATION != "" or tl.max(slot, 0) > 0:
            own = tl.where(slot > 0, (slot - 1) * EXPERTS + expert, -1)
            inside = slot > 0 if ACTIVATION == "" else row < end_row
            SOME: tl.constexpr = ACTIVATION != ""
            y_rows = y + row.to(tl.int64) * WIDE
            acc = changed(y_rows, inside, own, b, ranks, starts, shrunk, columns, row, WIDE, PARTS, RANK, SOME)
            if ACTIVATION != "":
                gate = rounded(acc, dtype)
                up = changed(y_rows, inside, own, b, ranks, starts, shrunk, OUT + columns, row, WIDE, PARTS, RANK, SOME)
                acc = gated(gate, rounded(up, dtype), alpha, limit, ACTIVATION, dtype)
            target = out + row.to(tl.int64)[:, None] * OUT + columns[None, :]
            tl.store(target, cast(acc, dtype), mask=inside[:, None] & (columns < OUT)[None, :])


@triton.jit(do_not_specialize=["before", "share", "num_rows", "num_tokens"])
def grouped_kernel(
    x, weight, bias, rows, starts, out, x_stride, alpha, limit, gates_and_ups,
    slots, lora_a, lora_b, ranks, scales, lora_starts, flags, shrunk, before, share, num_rows, num_tokens,
    NUM_M: tl.constexpr, EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    SHRINK_M: tl.constexpr, SHRINK_R: tl.constexpr, SHRINK_K: tl.constexpr, PIECE: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """A program a tile of outputs. Those with the same outputs of other rows follow each other, and share weights."""
    if PROGRAMMATIC:
        wait_for_launches_before()
    if slots is not None and tl.program_id(0) < before:
        shrink_rows(
            tl.program_id(0), x, slots, rows, starts, lora_a, ranks, scales, shrunk, num_rows, num_tokens, share,
            x_stride, 0, IN, PARTS, RANK, EXPERTS, EXPERTS_POW2, True, SHRINK_M, SHRINK_R, SHRINK_K,
        )  # fmt: skip
        tl.debug_barrier()  # all threads have stored before one of them counts
        tl.atomic_add(flags, 1, sem="release", scope="gpu")
        return
    number = tl.program_id(0) - before
    expert, targets, inside_rows, _ = own_tile(starts, number % NUM_M, EXPERTS, EXPERTS_POW2, BLOCK_M)
    if expert < EXPERTS:
        sources = targets
        if rows is not None:
            sources = tl.load(rows + targets, mask=inside_rows, other=0)
        columns = (number // NUM_M * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        wide = None
        if slots is not None and ACTIVATION != "":
            wide = gates_and_ups + targets.to(tl.int64) * (2 * OUT)
        outputs = _tile_outputs(
            x, weight, bias, expert, sources, inside_rows, columns, x_stride, alpha, limit, wide,
            OUT, IN, ACTIVATION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if wide is None:
            tl.store(
                out + targets.to(tl.int64)[:, None] * OUT + columns[None, :],
                outputs,
                mask=inside_rows[:, None] & (columns < OUT)[None, :],
            )
        if slots is not None:
            y = out if ACTIVATION == "" else gates_and_ups
            _change_tile(
                y, out, expert, targets, inside_rows, columns, alpha, limit,
                rows, slots, lora_b, ranks, lora_starts, flags, shrunk, before,
                OUT, ACTIVATION, EXPERTS, PARTS, RANK, PIECE,
            )  # fmt: skip
    if slots is not None:  # also where no tile was left
        wait_for_programs(flags, before)
        note_expanded(flags, tl.num_programs(0) - before)


@triton.jit
def add_complete(
    y, tokens, places, weights, beside, residual, out, counters, rows, inside_rows, columns, tile, num_tokens,
    OUT: tl.constexpr, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """After ``rows`` of ``y`` were stored in ``columns``: adds up there the rows of those tokens that now have all.

    In the order of a token's choice, so it does not matter which program does so. ``counters``, one for each token and
    tile of columns, zero before the launch and after it, tell it.
    """
    # All threads have stored before some of them count, with a release of what was stored and an acquire of what
    # others released; and all threads wait for their answers.
    tl.debug_barrier()
    first_row, end_row = tl.min(rows, 0), tl.max(tl.where(inside_rows, rows + 1, 0), 0)
    for first in range(first_row, end_row, BLOCK_T):
        row = first + tl.arange(0, BLOCK_T)
        counted = row < end_row
        token = tl.load(tokens + row, mask=counted, other=0)
        counter = counters + tile * num_tokens + token
        before = tl.atomic_add(counter, 1, mask=counted, sem="acq_rel", scope="gpu")
        complete = counted & (before == TOP_K - 1)
        tl.debug_barrier()
        if tl.max(complete.to(tl.int32), 0) == 1:
            tl.store(counter, 0, mask=complete)
            store_sums(y, places, weights, beside, residual, out, token, complete, columns, TOP_K, OUT, True)


@triton.jit
def add_padding(
    y, places, weights, beside, residual, out, num_rows, place, columns, num_tokens,
    NUM_M: tl.constexpr, OUT: tl.constexpr, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Padding has no rows: its sums, of nothing, are shared out among all ``NUM_M`` programs of these columns."""
    real = num_rows // TOP_K
    for first in range(real + place * BLOCK_T, num_tokens, NUM_M * BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        store_sums(y, places, weights, beside, residual, out, token, token < num_tokens, columns, TOP_K, OUT, False)


@triton.jit(do_not_specialize=["num_tokens", "before", "share", "num_rows"])
def grouped_sum_kernel(
    x, weight, bias, tokens, starts, y, places, weights, beside, residual, out, counters, x_stride, num_tokens,
    slots, lora_a, lora_b, ranks, scales, lora_starts, flags, shrunk, before, share, num_rows,
    NUM_M: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    SHRINK_M: tl.constexpr, SHRINK_R: tl.constexpr, SHRINK_K: tl.constexpr, PIECE: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """As ``grouped_kernel``; the program that writes the last row of a token adds up the token's rows in its columns.

    ``add_complete`` says how.
    """
    if PROGRAMMATIC:
        wait_for_launches_before()
    if slots is not None and tl.program_id(0) < before:
        shrink_rows(
            tl.program_id(0), x, slots, tokens, starts, lora_a, ranks, scales, shrunk, num_rows, num_tokens, share,
            x_stride, 0, IN, PARTS, RANK, EXPERTS, EXPERTS_POW2, False, SHRINK_M, SHRINK_R, SHRINK_K,
        )  # fmt: skip
        tl.debug_barrier()  # all threads have stored before one of them counts
        tl.atomic_add(flags, 1, sem="release", scope="gpu")
        return
    number = tl.program_id(0) - before
    place, tile = number % NUM_M, number // NUM_M
    expert, rows, inside_rows, num_real = own_tile(starts, place, EXPERTS, EXPERTS_POW2, BLOCK_M)
    columns = (tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    if expert < EXPERTS:
        outputs = _tile_outputs(
            x, weight, bias, expert, rows, inside_rows, columns, x_stride, 0.0, 0.0, None,
            OUT, IN, "", BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        tl.store(
            y + rows.to(tl.int64)[:, None] * OUT + columns[None, :],
            outputs,
            mask=inside_rows[:, None] & (columns < OUT)[None, :],
        )
        if slots is not None:
            _change_tile(
                y, y, expert, rows, inside_rows, columns, 0.0, 0.0,
                tokens, slots, lora_b, ranks, lora_starts, flags, shrunk, before,
                OUT, "", EXPERTS, PARTS, RANK, PIECE,
            )  # fmt: skip
        add_complete(
            y, tokens, places, weights, beside, residual, out, counters, rows, inside_rows, columns, tile, num_tokens,
            OUT, TOP_K, BLOCK_T,
        )  # fmt: skip
    add_padding(
        y, places, weights, beside, residual, out, num_real, place, columns, num_tokens, NUM_M, OUT, TOP_K, BLOCK_T
    )
    if slots is not None:  # also where no tile was left
        wait_for_programs(flags, before)
        note_expanded(flags, tl.num_programs(0) - before)


class _Grid(NamedTuple):
    """What a launch follows from: ``programs`` tiles, ``num_m`` of them of the same outputs."""

    programs: int
    num_m: int
    constants: dict[str, int]
    options: dict[str, Any]


def _grid(x: Tensor, weight: Tensor, count: int, is_gated: bool = False) -> _Grid:
    experts, out_features, in_features = weight.shape
    tile = triton_linear.row_tile_for(rows_of_a_tile(count, experts), x.itemsize, triton_linear._capability(x.device))
    block_n = tile.n
    if is_gated:  # of each half
        out_features, block_n = out_features // 2, max(16, tile.n // 2)
    num_m = min(count, count // tile.m + experts)
    constants = {
        "NUM_M": num_m, "EXPERTS": experts, "EXPERTS_POW2": triton.next_power_of_2(experts), "OUT": out_features,
        "IN": in_features, "BLOCK_M": tile.m, "BLOCK_N": block_n, "BLOCK_K": triton_linear.BLOCK_K[x.itemsize],
    }  # fmt: skip
    # In float32 a step of a product is one fused operation; what follows a product of 16 bits rounds after each.
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": x.itemsize == 4}
    return _Grid(num_m * triton.cdiv(out_features, block_n), num_m, constants, options)


class _Adapters(NamedTuple):
    """The arguments of the kernels for adapters, and their constants."""

    tensors: tuple[Tensor | None, ...] = (None,) * 8
    before: int = 0
    share: int = 0
    constants: Mapping[str, int] = MappingProxyType(
        {"PARTS": 0, "RANK": 0, "SHRINK_M": 0, "SHRINK_R": 0, "SHRINK_K": 0, "PIECE": 0}
    )


def _adapters(op: str, x: Tensor, weight: Tensor, rows: int, grid: _Grid, lora: Sequence[Tensor]) -> _Adapters:
    """Of ``lora``, as of ``grouped_gated_linear``, checked."""
    if not lora:
        return _Adapters()
    slots, a, b, ranks, scales, starts, flags = lora
    if x.dtype == torch.float32:  # in which products and sums are fused here, not there
        raise ValueError(f"{op}: with adapters x must be of 16 bits, got {x.dtype}")
    if a.dim() != 4 or len(a) % len(weight) or b.shape[1] * ROWS < weight.shape[1]:
        refuse(op, "a", a, f"[S * {len(weight)}, P, R, {x.shape[1]}], and b of {weight.shape[1]} outputs")
    check_lora(op, x, a, b, ranks, scales, starts)
    check_contiguous(op, "slots", slots, slots.shape[:1], x.device, torch.int32)
    check_contiguous(op, "flags", flags, (NUM_FLAGS,), x.device, torch.int32)
    parts, rank = a.shape[1:3]
    shrunk, share = torch.empty(rows, parts, rank, dtype=torch.float32, device=x.device), rows_together(rows)
    block_m, block_n, block_k = (grid.constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    tile = shrinking_tile(rank, (block_m + block_n) * block_k * x.itemsize)
    piece = rows_of_a_piece(grid.options["num_warps"], block_n)
    of_a = {"SHRINK_M": ROWS, "SHRINK_R": tile["BLOCK_R"], "SHRINK_K": tile["BLOCK_K"], "PIECE": piece}
    tensors = slots, a, b, ranks, scales, starts, flags, shrunk
    return _Adapters(tensors, triton.cdiv(rows, share) * parts, share, {"PARTS": parts, "RANK": rank, **of_a})


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | None, starts: Tensor, activation: str = "",
    alpha: float = 0.0, limit: float = 0.0, lora: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """The ops ``grouped_linear`` and, with an activation, ``grouped_gated_linear`` on CUDA tensors.

    On CPU tensors under Triton's interpreter. Never waits for the GPU.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; an unknown activation.
    """
    _check(x, weight, bias, rows, starts)
    if activation and (activation not in GATES or weight.shape[1] % 2):
        raise ValueError(
            f"grouped_gated_linear: activation must be {' or '.join(GATES)} and N even, got {activation!r} and "
            f"N={weight.shape[1]}"
        )
    count = x.shape[0] if rows is None else rows.shape[0]
    x = aligned(x)
    out = x.new_empty(count, weight.shape[1] // (2 if activation else 1))
    if not out.numel():
        return out
    grid = _grid(x, weight, count, bool(activation))
    own = _adapters("grouped_linear", x, weight, count, grid, lora)
    wide = x.new_empty(count, weight.shape[1]) if lora and activation else None
    with torch.cuda.device_of(x):
        grouped_kernel[(own.before + grid.programs,)](
            x, weight, bias, rows, starts, out, _stride(x), alpha, limit, wide, *own.tensors, own.before,
            own.share, count, len(x), ACTIVATION=activation, **own.constants, **grid.constants, **grid.options,
            **launch_options(len(x)),
        )  # fmt: skip
    return out


def grouped_linear_sum(
    x: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, starts: Tensor, places: Tensor, weights: Tensor,
    beside: Tensor | None, residual: Tensor | None, counters: Tensor, lora: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; too few counters.
    """
    _check(x, weight, bias, tokens, starts)
    (num_tokens, top_k), out_features = places.shape, weight.shape[1]
    if x.dtype == torch.float32 or x.shape[0] != num_tokens * top_k or len(tokens) != len(x):
        raise ValueError(
            f"grouped_linear_sum: x must be [{num_tokens * top_k}, K] of bfloat16 or float16, got {list(x.shape)} of "
            f"{x.dtype} with {len(tokens)} tokens"
        )
    check_sum(x, places, weights, beside, residual, out_features)
    x = aligned(x)
    out = x.new_empty(num_tokens, out_features)
    if not out.numel():
        return out
    y = x.new_empty(num_tokens * top_k, out_features)
    grid = _grid(x, weight, len(x))
    needed = num_tokens * grid.programs // grid.num_m
    check_counters("grouped_linear_sum", counters, needed)
    own = _adapters("grouped_linear_sum", x, weight, len(x), grid, lora)
    with torch.cuda.device_of(x):
        grouped_sum_kernel[(own.before + grid.programs,)](
            x, weight, bias, tokens, starts, y, places, weights, beside, residual, out, counters, _stride(x),
            num_tokens, *own.tensors, own.before, own.share, len(x), **own.constants, TOP_K=top_k,
            BLOCK_T=min(SUMMED_AT_ONCE, triton.next_power_of_2(num_tokens)),
            **grid.constants, **grid.options, **launch_options(num_tokens),
        )  # fmt: skip
    return out


def check_counters(op: str, counters: Tensor, needed: int) -> None:
    """``ValueError`` for too few."""
    if counters.dtype != torch.int32 or counters.dim() != 1 or len(counters) < needed:
        raise ValueError(
            f"{op}: counters must be [{needed}] of torch.int32 or longer, got {list(counters.shape)} of "
            f"{counters.dtype}"
        )


def _stride(x: Tensor) -> int:
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | None, starts: Tensor) -> None:
    op = "grouped_linear"
    check_rows(op, x)
    if weight.dim() != 3 or weight.shape[2] != x.shape[1] or not weight.numel() or not weight.is_contiguous():
        refuse(op, "weight", weight, f"a contiguous [E, N, {x.shape[1]}]")
    check_contiguous(op, "weight", weight, weight.shape, x.device, x.dtype)
    check_contiguous(op, "bias", bias, weight.shape[:2], x.device, x.dtype)
    check_contiguous(op, "rows", rows, () if rows is None else rows.shape[:1], x.device, torch.int32)
    check_contiguous(op, "starts", starts, (len(weight) + 1,), x.device, torch.int32)
