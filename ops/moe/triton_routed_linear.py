"""The router with norm and choice on the GPU: its Triton kernel, and the launch. ``routed_linear.py`` says what it is.

A program has 16 rows, some experts and a share of the inputs, so that many SMs read weights; it computes the norms of
its rows by itself. The program that is the last to finish adds up the shares, in their order, and chooses for all rows.
Of more than 32 rows the last one of each 16 chooses for these, and the last of those sorts the rows of all by expert.

Why a row's bits do not depend on how many rows there are: how inputs are shared out follows from the layer alone, a
program always has 16 rows, adds up its inputs from the first to the last, and the squares of a row by place in the
block and then all places, with 8 warps. Of the choice ``triton_expert_rows.py`` says it.

What adapters change of ``delta`` is in the launch: the first programs are those of ``linear/triton_lora.py`` that
shrink and expand, and the others wait for them.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear.triton_adapted import NUM_FLAGS, check_lora, note_expanded, wait_for_programs
from compiled_llm.ops.linear.triton_lora import (
    MOST_INPUTS,
    ROWS,
    SharedOut,
    expand_rows,
    shrink_rows,
    shrinking_tile,
)
from compiled_llm.ops.linear.triton_multiply import multiply_add
from compiled_llm.ops.moe.routing import MAX_EXPERTS, MAX_GROUPED_EXPERTS, MAX_ROWS
from compiled_llm.ops.moe.triton_expert_rows import (
    BLOCK_TOKENS,
    check,
    choose,
    place_blocks,
    place_few,
    rule,
    store_choice,
)
from compiled_llm.ops.programmatic_launch import launch_options
from compiled_llm.ops.rowwise.triton_kernels import cast, inverse_rms, rounded, weighted
from compiled_llm.ops.rowwise.triton_rowwise import aligned_rows
from compiled_llm.ops.triton_checks import check_contiguous, refuse
from compiled_llm.ops.triton_programmatic import wait_for_launches_before

_BLOCK = 16  # rows of a program; and its experts, but for more rows, whose norms fewer programs are to compute
_ROWS_OF_16_EXPERTS = 64
_BLOCK_K = {2: 128, 4: 64}  # inputs at a time, by the bytes of a weight
_SHARE = 512  # inputs of a program, unless sums of that many shares would be more than the last program reads at once
_SUMS = 512  # experts times shares
_DTYPES = (torch.bfloat16, torch.float16)


@triton.jit
def _inputs(x_rows, delta_rows, inputs, inside):
    """Elements ``inputs`` of rows, with what is added to them."""
    y = tl.load(x_rows + inputs[None, :], mask=inside, other=0.0)
    if delta_rows is not None:
        delta = tl.load(delta_rows + inputs[None, :], mask=inside, other=0.0)
        y = cast(y.to(tl.float32) + delta.to(tl.float32), y.dtype)
    return y


@triton.jit
def _share_of_logits(
    x, delta, norm, seen_norm, weight, total, normed, rows, inside_rows, num_stored, experts, begin, x_stride,
    delta_stride, eps,
    MULTIPLIER: tl.constexpr, EXPERTS: tl.constexpr, IN: tl.constexpr, SHARE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Products over ``SHARE`` inputs from ``begin`` on; sums and norms of ``num_stored`` rows are stored."""
    dtype: tl.constexpr = x.dtype.element_ty
    inner = tl.arange(0, BLOCK_K)
    x_rows = x + rows[:, None] * x_stride
    delta_rows = delta
    if delta is not None:
        delta_rows = delta + rows[:, None] * delta_stride
    if norm is not None:
        squares = tl.zeros([BLOCK, BLOCK_K], tl.float32)
        for k in range(0, IN, BLOCK_K):
            inside = inside_rows[:, None] & (inner < IN - k)[None, :]
            y = _inputs(x_rows, delta_rows, k + inner, inside).to(tl.float32)
            squares += y * y
        scale = inverse_rms(squares, eps, IN)[:, None]
    acc = tl.zeros([BLOCK, BLOCK_E], tl.float32)
    for k in range(begin, begin + SHARE, BLOCK_K):
        inputs = k + inner
        inside = inputs < IN
        a = _inputs(x_rows, delta_rows, inputs, inside_rows[:, None] & inside[None, :])
        if norm is not None:
            stored = (rows < num_stored)[:, None] & inside[None, :]
            target = rows[:, None] * IN + inputs[None, :]
            if delta is not None:
                tl.store(total + target, a, mask=stored)
            weights = tl.load(norm + inputs, mask=inside, other=0.0)[None, :]
            y = a.to(tl.float32) * scale
            a = weighted(y, weights, dtype)
            tl.store(normed + target, a, mask=stored)
            if seen_norm is not None:
                weights = tl.load(seen_norm + inputs, mask=inside, other=0.0)[None, :]
                a = cast(weighted(y, weights, dtype).to(tl.float32) * MULTIPLIER, dtype)
        b = tl.load(
            weight + experts[:, None].to(tl.int64) * IN + inputs[None, :],
            mask=(experts < EXPERTS)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        acc = multiply_add(a.to(b.dtype), tl.trans(b), acc)
    return acc


@triton.jit
def _choice(
    shares, weight, bias, choice_bias, expert_scale, token, num_rows, scale,
    EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, TOP_K: tl.constexpr, SCORING: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_POW2: tl.constexpr, TOP_GROUPS: tl.constexpr, NUM_SHARES: tl.constexpr,
):  # fmt: skip
    """What ``choose`` gives of ``token``, whose logits are the sums of ``shares``."""
    experts = tl.arange(0, EXPERTS_POW2)
    inside = (token < num_rows)[:, None] & (experts < EXPERTS)[None, :]
    logits = tl.zeros([token.shape[0], EXPERTS_POW2], tl.float32)
    for one in tl.static_range(NUM_SHARES):
        places_of = (one * num_rows + token[:, None]) * EXPERTS + experts[None, :]
        # From the L2 cache, which all programs write to: that of this SM may have older bytes.
        logits += tl.load(shares + places_of, mask=inside, other=0.0, cache_modifier=".cg")
    if bias is not None:
        logits += tl.load(bias + experts, mask=experts < EXPERTS, other=0.0).to(tl.float32)[None, :]
    if weight.dtype.element_ty != tl.float32:
        logits = rounded(logits, weight.dtype.element_ty)
    return choose(
        logits, experts, choice_bias, expert_scale, scale,
        EXPERTS, TOP_K, SCORING, GROUPS, GROUPS_POW2, TOP_GROUPS,
    )  # fmt: skip


@triton.jit
def _is_last(counter, count):
    """Whether a program is the last of ``count`` that ask; all threads know it, and what the others stored before.

    All threads have stored before one of them counts, with a release of what was stored and an acquire of what others
    released; and all threads wait for its answer. ``counter``, zero before the launch, is zero again.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit(do_not_specialize=["num_rows", "lora_tiles", "share_of_rows", "shrinking", "expanding"])
def routed_linear_kernel(
    x, delta, norm, seen_norm, weight, bias, choice_bias, expert_scale, num_tokens, used, counters, shares, chosen,
    users, first_rows, total, normed, out_weights, places, tokens, starts, num_rows, x_stride, delta_stride, eps, scale,
    changed_by, slots, lora_a, lora_b, ranks, scales, lora_starts, flags, shrunk, lora_tiles, changed_by_stride,
    share_of_rows, shrinking, expanding,
    EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, TOP_K: tl.constexpr, SCORING: tl.constexpr,
    MULTIPLIER: tl.constexpr, GROUPS: tl.constexpr, GROUPS_POW2: tl.constexpr, TOP_GROUPS: tl.constexpr,
    IN: tl.constexpr, NUM_SHARES: tl.constexpr, SHARE: tl.constexpr, TOP_K_POW2: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, RANK: tl.constexpr, SHRINK_IN: tl.constexpr, SHRINK_M: tl.constexpr, SHRINK_R: tl.constexpr,
    SHRINK_K: tl.constexpr, EXPAND_M: tl.constexpr, TILES: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """A program a tile of logits and a share of the inputs; ``shares`` is ``[NUM_SHARES, num_rows, EXPERTS]``.

    With ``slots`` there are ``shrinking`` programs and ``expanding`` ones before them.

    It has ``BLOCK_T`` tokens chosen for at a time: all, or those of a program, whose choices are then in ``chosen`` and
    ``users``.
    """
    if PROGRAMMATIC:
        wait_for_launches_before()
    number, count = tl.program_id(0), tl.num_programs(0)
    if slots is not None:
        if number < shrinking:
            shrink_rows(
                number, changed_by, slots, None, None, lora_a, ranks, scales, shrunk, num_rows, num_rows,
                share_of_rows, changed_by_stride, 0, SHRINK_IN, PARTS, RANK, 1, 1, False, SHRINK_M, SHRINK_R, SHRINK_K,
            )  # fmt: skip
        elif number < shrinking + expanding:
            wait_for_programs(flags, shrinking)
            expand_rows(
                number - shrinking, delta, slots, None, None, lora_b, ranks, lora_starts, shrunk, num_rows, num_rows,
                share_of_rows, lora_tiles, delta_stride, PARTS, RANK, 1, 1, EXPAND_M, TILES,
            )  # fmt: skip
        if number < shrinking + expanding:
            tl.debug_barrier()  # all threads have stored before one of them counts
            tl.atomic_add(flags, 1, sem="release", scope="gpu")
            return
        number -= shrinking + expanding
        count -= shrinking + expanding
        wait_for_programs(flags, shrinking + expanding)
        note_expanded(flags, count)
    num_m = tl.cdiv(num_rows, BLOCK)
    share = number % NUM_SHARES
    tile = number // NUM_SHARES
    rows = (tile % num_m * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    columns = tile // num_m * BLOCK_E + tl.arange(0, BLOCK_E)
    acc = _share_of_logits(
        x, delta, norm, seen_norm, weight, total, normed, rows, rows < num_rows, tl.where(tile < num_m, num_rows, 0),
        columns, share * SHARE, x_stride, delta_stride, eps, MULTIPLIER, EXPERTS, IN, SHARE, BLOCK, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    tl.store(
        shares + (share * num_rows + rows[:, None]) * EXPERTS + columns[None, :],
        acc, mask=(rows < num_rows)[:, None] & (columns < EXPERTS)[None, :],
    )  # fmt: skip
    experts, token = tl.arange(0, EXPERTS_POW2), tl.arange(0, BLOCK_T)
    if users is None:
        if _is_last(counters, count):
            order, of_chosen = _choice(
                shares, weight, bias, choice_bias, expert_scale, token, num_rows, scale,
                EXPERTS, EXPERTS_POW2, TOP_K, SCORING, GROUPS, GROUPS_POW2, TOP_GROUPS, NUM_SHARES,
            )  # fmt: skip
            place_few(
                order, of_chosen, experts, num_rows, tl.load(num_tokens), used, out_weights, places, tokens, starts,
                EXPERTS, TOP_K,
            )  # fmt: skip
    else:
        tl.static_assert(BLOCK_T == BLOCK)
        block = tile % num_m
        if _is_last(counters + 1 + block, count // num_m):
            order, of_chosen = _choice(
                shares, weight, bias, choice_bias, expert_scale, block * BLOCK_T + token, num_rows, scale,
                EXPERTS, EXPERTS_POW2, TOP_K, SCORING, GROUPS, GROUPS_POW2, TOP_GROUPS, NUM_SHARES,
            )  # fmt: skip
            store_choice(
                order, of_chosen, experts, block, num_rows, tl.load(num_tokens), out_weights, chosen, users,
                EXPERTS, TOP_K,
            )  # fmt: skip
            if _is_last(counters, num_m):
                place_blocks(
                    chosen, users, first_rows, used, places, tokens, starts, num_rows, tl.load(num_tokens),
                    EXPERTS, EXPERTS_POW2, TOP_K, TOP_K_POW2, BLOCK_T, BLOCKS,
                )  # fmt: skip


def shares_of(in_features: int, experts_pow2: int, block_k: int) -> tuple[int, int]:
    """How many shares of the inputs there are, and their size: of a layer, whatever its rows."""
    most = max(1, _SUMS // experts_pow2)
    share = max(_SHARE, triton.cdiv(in_features, most))
    share = triton.cdiv(share, block_k) * block_k
    return triton.cdiv(in_features, share), share


def routed_linear(
    x: Tensor, delta: Tensor | None, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None,
    choice_bias: Tensor | None, expert_scale: Tensor | None, num_tokens: Tensor, used: Tensor, counters: Tensor,
    top_k: int, scoring: str, scale: float, groups: int, top_groups: int, seen_norm: Tensor | None, multiplier: float,
    lora: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The ops ``routed_linear`` and, with ``lora``, ``changed_routed_linear`` on CUDA tensors.

    On CPU tensors under Triton's interpreter. Never waits for the GPU.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; too many rows or experts; experts that cannot be
            chosen so.
    """
    x, x_stride = aligned_rows(x, "routed_linear", "x", _DTYPES)
    most = MAX_EXPERTS if groups == top_groups else MAX_GROUPED_EXPERTS
    _check(x, delta, norm, seen_norm, weight, bias, counters, most)
    (count, in_features), num_experts = x.shape, weight.shape[0]
    logits = x.new_empty(0, num_experts)
    check(logits, choice_bias, expert_scale, num_tokens, used, top_k, groups, top_groups)
    delta_stride = 0
    if delta is not None:
        delta, delta_stride = aligned_rows(delta, "routed_linear", "delta", (x.dtype,))
    total, normed = (x.new_empty(0 if one is None else (count, in_features)) for one in (delta, norm))
    out_weights = x.new_empty(count, top_k, dtype=torch.float32)
    places = torch.empty_like(out_weights, dtype=torch.int32)
    tokens, starts = places.new_empty(count * top_k), places.new_empty(num_experts + 1)
    constants = rule(num_experts, top_k, scoring, groups, top_groups)
    block_k = _BLOCK_K[weight.itemsize]
    num_shares, share = shares_of(in_features, constants["EXPERTS_POW2"], block_k)
    shares = out_weights.new_empty(num_shares, count, num_experts)
    num_m, block_t, chosen, users, first_rows = triton.cdiv(count, _BLOCK), triton.next_power_of_2(count), *[None] * 3
    if count > BLOCK_TOKENS:
        block_t, chosen = _BLOCK, torch.empty_like(places)
        users, first_rows = places.new_empty(2, num_m, num_experts)
    block_e = _BLOCK * triton.next_power_of_2(triton.cdiv(count, _ROWS_OF_16_EXPERTS))
    if lora:  # with 64 experts and 256 rows it spills on sm_90 and sm_100
        block_e = min(block_e, 2 * _BLOCK)
    adapters, before, of_adapters = _adapters(delta, count, lora)
    with torch.cuda.device_of(x):
        routed_linear_kernel[(before + num_shares * num_m * triton.cdiv(num_experts, block_e),)](
            x, delta, norm, seen_norm, weight, bias, choice_bias, expert_scale, num_tokens, used, counters, shares,
            chosen, users, first_rows, total, normed, out_weights, places, tokens, starts,
            count, x_stride, delta_stride, eps, scale, *adapters, **of_adapters, **constants, MULTIPLIER=multiplier,
            IN=in_features, NUM_SHARES=num_shares, SHARE=share, TOP_K_POW2=triton.next_power_of_2(top_k),
            BLOCK=_BLOCK, BLOCK_E=block_e, BLOCK_K=block_k, BLOCK_T=block_t, BLOCKS=triton.next_power_of_2(num_m),
            num_warps=8, num_stages=3, enable_fp_fusion=False, **launch_options(count),
            maxnreg=255 if lora else None,  # by itself the assembler takes fewer, and spills
        )  # fmt: skip
    return total, normed, out_weights, places, tokens, starts


def _adapters(
    delta: Tensor | None, rows: int, lora: Sequence[Tensor]
) -> tuple[tuple[Tensor | int | None, ...], int, dict[str, int]]:
    """The kernel's arguments for what adapters change of ``delta``, programs before the others, and constants."""
    names = ("PARTS", "RANK", "SHRINK_IN", "SHRINK_M", "SHRINK_R", "SHRINK_K", "EXPAND_M", "TILES")
    if not lora:
        return (*[None] * 9, *[0] * 5), 0, dict.fromkeys(names, 0)
    op, (changed_by, slots, a, b, ranks, scales, starts, flags) = "routed_linear", lora
    assert delta is not None, "see changed_routed_linear"
    check_contiguous(op, "slots", slots, (rows,), delta.device, torch.int32)
    check_contiguous(op, "flags", flags, (NUM_FLAGS,), delta.device, torch.int32)
    changed_by, stride = aligned_rows(changed_by, op, "changed_by", (delta.dtype,))
    check_lora(op, changed_by, a, b, ranks, scales, starts)
    parts, rank = a.shape[1:3]
    if b.shape[1] * ROWS < delta.shape[1]:
        refuse(op, "b", b, f"of {delta.shape[1]} outputs, in tiles of {ROWS}")
    shrunk = torch.empty(rows, parts, rank, dtype=torch.float32, device=delta.device)
    apart, tile = SharedOut.of(rows, a, b), shrinking_tile(rank, most_inputs=MOST_INPUTS // 2)  # of 8 warps
    constants = parts, rank, changed_by.shape[1], ROWS, tile["BLOCK_R"], tile["BLOCK_K"], *apart.constants.values()
    tensors = changed_by, slots, a, b, ranks, scales, starts, flags, shrunk
    numbers = b.shape[1], stride, apart.share, apart.shrinking, apart.expanding
    return (*tensors, *numbers), apart.shrinking + apart.expanding, dict(zip(names, constants, strict=True))


def _check(
    x: Tensor, delta: Tensor | None, norm: Tensor | None, seen_norm: Tensor | None, weight: Tensor,
    bias: Tensor | None, counters: Tensor, most: int,
) -> None:  # fmt: skip
    count, size = x.shape
    if not 0 < count <= MAX_ROWS:
        raise ValueError(f"routed_linear: x must have 1 to {MAX_ROWS} rows, got {count}")
    op, experts, either = "routed_linear", weight.shape[0], (x.dtype, torch.float32)
    check_contiguous(op, "weight", weight, (experts, size), x.device, *either)
    check_contiguous(op, "bias", bias, (experts,), x.device, weight.dtype)
    check_contiguous(op, "norm", norm, (size,), x.device, *either)
    check_contiguous(op, "seen_norm", seen_norm, (size,), x.device, *either)
    check_contiguous(op, "counters", counters, (counters.numel(),), x.device, torch.int32)
    if seen_norm is not None and norm is None:
        raise ValueError("routed_linear: seen_norm must come with a norm, got None")
    if delta is not None and (norm is None or delta.shape != x.shape or delta.device != x.device):
        raise ValueError(
            f"routed_linear: delta must be {list(x.shape)} on {x.device} as x is, and come with a norm, got "
            f"{list(delta.shape)} on {delta.device}"
        )
    if len(counters) <= triton.cdiv(count, _BLOCK):
        raise ValueError(f"routed_linear: counters must be more than {triton.cdiv(count, _BLOCK)}, got {len(counters)}")
    if experts > most:
        raise ValueError(f"routed_linear: there must be at most {most} experts, got {experts}")
