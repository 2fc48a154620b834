"""Each token's experts, and the rows of each expert, on the GPU: Triton kernels, and the launches.

``routing.py`` says what they compute: ``route`` and ``expert_rows``. A block of up to 32 tokens and all experts is one
matrix of scores. Scores become integers in the same order, with the expert's number below them, so the best expert
left is one maximum, and of equal scores the lower number wins. Those chosen are marked with their place in the choice.

A token uses an expert once at most, so the tokens of a block that use an expert are the bits of one number: how many
rows it has, and which of them is a token's, are numbers of bits. Up to 32 tokens are one launch; more are two, for all
blocks' bits are known only after the first one.

A token's bits depend on nothing but its own logits: maxima and sums of integers have no order, and no product is fused
with a sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.triton_checks import DTYPES, check_contiguous, refuse

BLOCK_TOKENS = 32  # the bits of a number
FEW_EXPERTS = 256  # with which a block of 32 tokens fits into the registers of 8 warps
_BLOCK_ELEMENTS = 4096  # of a block of fewer tokens where there are more experts
_BLOCKS_AT_ONCE = 8

# Of a choice: below every key. Keys of numbers are about 2**47 at most; padding is LOWEST, the j-th choice LOWEST+1+j.
LOWEST = tl.constexpr(-(2**62))
_NUMBERS = tl.constexpr(65536)  # of experts, the lower bits of a key
_UNIT = tl.constexpr(float(2**40))  # of the terms of a softmax's sum, as integers
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _ordered(x):
    """float32 as int32 in the same order, NaN above all as torch sorts it, and -0 as 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, bits)


@triton.jit
def _number_of(key):
    """The float32 of a key."""
    bits = (key >> 16).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _keys(x, numbers):
    """int64: ordered by ``x``, of equals the lower of ``numbers`` is the larger."""
    return (_ordered(x).to(tl.int64) << 16) | (numbers ^ (_NUMBERS - 1))


@triton.jit
def _number_in(key):
    """The expert, or the group, of a key."""
    return ((key & (_NUMBERS - 1)) ^ (_NUMBERS - 1)).to(tl.int32)


@triton.jit
def _in_best_groups(keys, experts, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_POW2: tl.constexpr,
                    TOP_GROUPS: tl.constexpr, BY_TWO: tl.constexpr):  # fmt: skip
    """Which experts of ``[T, E]`` are in the best groups: by the sum of their best two, or not BY_TWO by their best."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    groups = tl.arange(0, GROUPS_POW2)
    sums = tl.full([keys.shape[0], GROUPS_POW2], LOWEST, tl.int64)
    for group in range(GROUPS):
        own = tl.where((experts // SIZE == group)[None, :], keys, LOWEST)
        best = tl.max(own, 1)
        total = _number_of(best)
        if BY_TWO and SIZE > 1:
            total += _number_of(tl.max(tl.where(own != best[:, None], own, LOWEST), 1))
        sums = tl.where((groups == group)[None, :], _keys(total[:, None], groups[None, :]), sums)
    found = tl.zeros(keys.shape, tl.int32)
    for _ in range(TOP_GROUPS):
        best = tl.max(sums, 1)
        found |= ((experts // SIZE)[None, :] == _number_in(best)[:, None]).to(tl.int32)
        sums = tl.where(sums != best[:, None], sums, LOWEST)
    return found != 0


@triton.jit
def choose(
    logits, experts, choice_bias, expert_scale, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORING: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr, TOP_GROUPS: tl.constexpr,
):  # fmt: skip
    """Of float32 ``logits`` ``[T, E]``: which place in its token's choice each expert has, -1 for none; its weight."""
    inside = experts < EXPERTS
    scores = logits
    if SCORING == "sigmoid":
        scores = tl.div_rn(tl.full(logits.shape, 1.0, tl.float32), 1.0 + tl.exp2(logits * -LOG2_E))
    choice = scores
    if choice_bias is not None:
        choice += tl.load(choice_bias + experts, mask=inside, other=0.0)[None, :]
    keys = _keys(choice, experts[None, :])
    if TOP_GROUPS < GROUPS:
        found = _in_best_groups(keys, experts, EXPERTS, GROUPS, GROUPS_POW2, TOP_GROUPS, SCORING == "sigmoid")
        keys = _keys(tl.where(found, choice, float("-inf")), experts[None, :])
    keys = tl.where(inside[None, :], keys, LOWEST)
    mark = tl.full([1, 1], LOWEST + 1, tl.int64)
    total = tl.full([logits.shape[0]], 1e-20, tl.float32)
    for _ in range(TOP_K):
        best = tl.max(keys, 1)[:, None]
        if SCORING == "sigmoid":  # one float at a time, in the order of the choice
            total += tl.sum(tl.where(keys == best, scores, 0.0), 1)
        keys = tl.where(keys == best, mark, keys)
        mark += 1
    order = tl.where(keys <= LOWEST + TOP_K, keys - (LOWEST + 1), -1).to(tl.int32)
    if SCORING == "sigmoid":
        weights = tl.div_rn(scores, total[:, None] + tl.zeros(scores.shape, tl.float32))
    else:
        summed = inside[None, :]
        if SCORING == "softmax_of_chosen":
            summed = order >= 0
        peak = tl.max(tl.where(summed, scores, float("-inf")), 1)
        terms = tl.exp2((scores - peak[:, None]) * LOG2_E)
        # As integers, whose sum has no order: the largest term is 1.
        whole = tl.sum(tl.where(summed, terms * _UNIT, 0.0).to(tl.int64), 1)
        weights = tl.div_rn(terms, (whole.to(tl.float32) * (1.0 / _UNIT))[:, None] + tl.zeros(terms.shape, tl.float32))
    weights *= scale
    if expert_scale is not None:
        weights *= tl.load(expert_scale + experts, mask=inside, other=0.0)[None, :]
    return order, weights


@triton.jit
def _number_of_bits(bits):
    """Of each int32."""
    x = bits.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _store_starts(starts, used, experts, counts, EXPERTS: tl.constexpr):
    """Where the rows of each expert begin, stored and returned; how many experts have rows is added to ``used``."""
    first = tl.cumsum(counts, 0) - counts
    tl.store(starts + experts, first, mask=experts < EXPERTS)
    tl.store(starts + EXPERTS, tl.sum(counts, 0))
    tl.store(used, tl.load(used) + tl.sum((counts > 0).to(tl.int64), 0))
    return first


@triton.jit
def place_few(
    order, weights, experts, num_rows, num_tokens, used, out_weights, places, tokens, starts,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """Stores what ``routed_rows`` gives of up to 32 tokens, from what ``choose`` gave of them."""
    token = tl.arange(0, order.shape[0])
    taken = (order >= 0) & (token < num_rows)[:, None]
    real = taken & (token < num_tokens)[:, None]
    bit = tl.full(token.shape, 1, tl.int32) << token
    bits = tl.sum(tl.where(real, bit[:, None], 0), 0)  # no two have a bit in common
    first = _store_starts(starts, used, experts, _number_of_bits(bits), EXPERTS)
    place = first[None, :] + _number_of_bits(bits[None, :] & (bit - 1)[:, None])
    target = token[:, None] * TOP_K + order
    tl.store(out_weights + target, weights, mask=taken)
    tl.store(places + target, tl.where(real, place, -1), mask=taken)
    tl.store(tokens + place, token[:, None] + tl.zeros(place.shape, tl.int32), mask=real)


@triton.jit
def store_choice(
    order, weights, experts, block, num_rows, num_tokens, out_weights, chosen, users,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """Of a block of tokens, stores what ``choose`` gave, and for each expert the bits of the tokens that use it."""
    place = tl.arange(0, order.shape[0])
    token = block * order.shape[0] + place
    taken = (order >= 0) & (token < num_rows)[:, None]
    real = taken & (token < num_tokens)[:, None]
    target = token.to(tl.int64)[:, None] * TOP_K + order
    tl.store(out_weights + target, weights, mask=taken)
    tl.store(chosen + target, experts[None, :] + tl.zeros(target.shape, tl.int32), mask=taken)
    bit = tl.full(place.shape, 1, tl.int32) << place
    bits = tl.sum(tl.where(real, bit[:, None], 0), 0)
    tl.store(users + block * EXPERTS + experts, bits, mask=experts < EXPERTS)


@triton.jit
def place_blocks(
    chosen, users, first_rows, used, places, tokens, starts, num_rows, num_tokens,
    EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, TOP_K: tl.constexpr, TOP_K_POW2: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Stores the places of up to ``BLOCKS`` blocks' rows, from what other programs of the launch stored of each."""
    experts, block = tl.arange(0, EXPERTS_POW2), tl.arange(0, BLOCKS)
    known = (block * BLOCK_T < num_rows)[:, None] & (experts < EXPERTS)[None, :]
    cell = block[:, None] * EXPERTS + experts[None, :]
    # From the L2 cache, which all programs write to: that of this SM may have older bytes.
    counts = _number_of_bits(tl.load(users + cell, mask=known, other=0, cache_modifier=".cg"))
    first = _store_starts(starts, used, experts, tl.sum(counts, 0), EXPERTS)
    tl.store(first_rows + cell, first[None, :] + tl.cumsum(counts, 0) - counts, mask=known)
    tl.debug_barrier()  # other threads read it
    token, j = tl.arange(0, BLOCKS * BLOCK_T), tl.arange(0, TOP_K_POW2)
    kept = (token < num_rows)[:, None] & (j < TOP_K)[None, :]
    target = token[:, None] * TOP_K + j[None, :]
    expert = tl.load(chosen + target, mask=kept, other=0, cache_modifier=".cg")
    cell = (token // BLOCK_T)[:, None] * EXPERTS + expert
    earlier = (tl.full(token.shape, 1, tl.int32) << (token % BLOCK_T)) - 1
    row = tl.load(first_rows + cell, mask=kept, other=0)
    row += _number_of_bits(tl.load(users + cell, mask=kept, other=0, cache_modifier=".cg") & earlier[:, None])
    real = kept & (token < num_tokens)[:, None]
    tl.store(places + target, tl.where(real, row, -1), mask=kept)
    tl.store(tokens + row, token[:, None] + tl.zeros(row.shape, tl.int32), mask=real)


@triton.jit
def _load_logits(logits, token, experts, num_rows, EXPERTS: tl.constexpr):
    inside = (token < num_rows)[:, None] & (experts < EXPERTS)[None, :]
    places = token.to(tl.int64)[:, None] * EXPERTS + experts[None, :]
    return tl.load(logits + places, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def route_few_kernel(
    logits, choice_bias, expert_scale, num_tokens, used, weights, places, tokens, starts, num_rows, scale,
    EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, TOP_K: tl.constexpr, SCORING: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_POW2: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program for all tokens."""
    experts = tl.arange(0, EXPERTS_POW2)
    scores = _load_logits(logits, tl.arange(0, BLOCK_T), experts, num_rows, EXPERTS)
    order, chosen = choose(
        scores, experts, choice_bias, expert_scale, scale, EXPERTS, TOP_K, SCORING, GROUPS, GROUPS_POW2, TOP_GROUPS
    )
    place_few(
        order, chosen, experts, num_rows, tl.load(num_tokens), used, weights, places, tokens, starts, EXPERTS, TOP_K
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def route_kernel(
    logits, choice_bias, expert_scale, num_tokens, weights, chosen, users, num_rows, scale,
    EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, TOP_K: tl.constexpr, SCORING: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_POW2: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program for each block of tokens: its choice, its weights, and the bits of the tokens that use each expert."""
    experts = tl.arange(0, EXPERTS_POW2)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    scores = _load_logits(logits, token, experts, num_rows, EXPERTS)
    order, of_chosen = choose(
        scores, experts, choice_bias, expert_scale, scale, EXPERTS, TOP_K, SCORING, GROUPS, GROUPS_POW2, TOP_GROUPS
    )
    store_choice(
        order, of_chosen, experts, tl.program_id(0), num_rows, tl.load(num_tokens), weights, chosen, users,
        EXPERTS, TOP_K,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def rows_kernel(
    chosen, users, num_tokens, used, first_rows, places, tokens, starts, num_rows, num_blocks,
    EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, TOP_K: tl.constexpr, TOP_K_POW2: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """A program for each block of tokens: where its rows are, among those of the blocks before and after it."""
    own = tl.program_id(0)
    experts = tl.arange(0, EXPERTS_POW2)
    inside = experts < EXPERTS
    total = tl.zeros([EXPERTS_POW2], tl.int32)
    before = tl.zeros([EXPERTS_POW2], tl.int32)
    for start in range(0, num_blocks, BLOCK_B):
        block = start + tl.arange(0, BLOCK_B)
        known = (block < num_blocks)[:, None] & inside[None, :]
        counts = _number_of_bits(tl.load(users + block[:, None] * EXPERTS + experts[None, :], mask=known, other=0))
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((block < own)[:, None], counts, 0), 0)
    first = tl.cumsum(total, 0) - total
    if own == 0:
        _store_starts(starts, used, experts, total, EXPERTS)
    tl.store(first_rows + own * EXPERTS + experts, first + before, mask=inside)
    tl.debug_barrier()  # other threads read it
    place = tl.arange(0, BLOCK_T)
    token = own * BLOCK_T + place
    j = tl.arange(0, TOP_K_POW2)
    kept = (token < num_rows)[:, None] & (j < TOP_K)[None, :]
    target = token.to(tl.int64)[:, None] * TOP_K + j[None, :]
    expert = tl.load(chosen + target, mask=kept, other=0)
    earlier = (tl.full(place.shape, 1, tl.int32) << place) - 1
    row = tl.load(first_rows + own * EXPERTS + expert, mask=kept, other=0)
    row += _number_of_bits(tl.load(users + own * EXPERTS + expert, mask=kept, other=0) & earlier[:, None])
    real = kept & (token < tl.load(num_tokens))[:, None]
    tl.store(places + target, tl.where(real, row, -1), mask=kept)
    tl.store(tokens + row, token[:, None] + tl.zeros(row.shape, tl.int32), mask=real)


def rule(num_experts: int, top_k: int, scoring: str, groups: int, top_groups: int) -> dict:
    """The constants of ``choose``."""
    return {
        "EXPERTS": num_experts, "EXPERTS_POW2": triton.next_power_of_2(num_experts), "TOP_K": top_k,
        "SCORING": scoring, "GROUPS": groups, "GROUPS_POW2": triton.next_power_of_2(groups), "TOP_GROUPS": top_groups,
    }  # fmt: skip


def warps_for(block_tokens: int, experts_pow2: int) -> int:
    """8 elements of the matrix of scores for a thread, up to 8 warps."""
    return min(8, max(1, block_tokens * experts_pow2 // 256))


def routed_rows(
    logits: Tensor, choice_bias: Tensor | None, expert_scale: Tensor | None, num_tokens: Tensor, used: Tensor,
    top_k: int, scoring: str, scale: float, groups: int, top_groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; experts that cannot be chosen so.
    """
    check(logits, choice_bias, expert_scale, num_tokens, used, top_k, groups, top_groups)
    count, num_experts = logits.shape
    weights = logits.new_empty(count, top_k, dtype=torch.float32)
    places = torch.empty_like(weights, dtype=torch.int32)
    tokens = places.new_empty(count * top_k)
    starts = places.new_empty(num_experts + 1)
    constants = rule(num_experts, top_k, scoring, groups, top_groups)
    experts_pow2 = constants["EXPERTS_POW2"]
    options = {"enable_fp_fusion": False}
    with torch.cuda.device_of(logits):
        if count <= BLOCK_TOKENS and experts_pow2 <= FEW_EXPERTS:
            block = triton.next_power_of_2(max(1, count))
            route_few_kernel[(1,)](
                logits, choice_bias, expert_scale, num_tokens, used, weights, places, tokens, starts, count, scale,
                **constants, BLOCK_T=block, num_warps=warps_for(block, experts_pow2), **options,
            )  # fmt: skip
            return weights, places, tokens, starts
        block = max(1, min(BLOCK_TOKENS, _BLOCK_ELEMENTS // experts_pow2))
        num_blocks = triton.cdiv(count, block)
        chosen = torch.empty_like(places)
        users, first_rows = places.new_empty(2, num_blocks, num_experts)
        warps = warps_for(block, experts_pow2)
        route_kernel[(num_blocks,)](
            logits, choice_bias, expert_scale, num_tokens, weights, chosen, users, count, scale,
            **constants, BLOCK_T=block, num_warps=warps, **options,
        )  # fmt: skip
        rows_kernel[(num_blocks,)](
            chosen, users, num_tokens, used, first_rows, places, tokens, starts, count, num_blocks,
            EXPERTS=num_experts, EXPERTS_POW2=experts_pow2, TOP_K=top_k, TOP_K_POW2=triton.next_power_of_2(top_k),
            BLOCK_T=block, BLOCK_B=_BLOCKS_AT_ONCE, num_warps=4, **options,
        )  # fmt: skip
    return weights, places, tokens, starts


def check(
    logits: Tensor, choice_bias: Tensor | None, expert_scale: Tensor | None, num_tokens: Tensor, used: Tensor,
    top_k: int, groups: int, top_groups: int,
) -> None:  # fmt: skip
    """Of ``routed_rows``."""
    op = "routed_rows"
    if logits.dim() != 2 or not logits.is_contiguous() or logits.dtype not in DTYPES:
        refuse(op, "logits", logits, "a contiguous [T, E] of float32, bfloat16 or float16")
    experts = logits.shape[1]
    fits = 0 < groups <= experts and experts % groups == 0 and 0 < top_groups <= groups
    if not fits or not 0 < top_k <= experts // groups * top_groups or experts > _NUMBERS.value:
        raise ValueError(
            f"routed_rows: groups must divide the number of experts, at most {_NUMBERS.value}, and top_k be from 1 to "
            f"the experts of top_groups groups; got {experts} experts, groups={groups}, top_groups={top_groups}, "
            f"top_k={top_k}"
        )
    check_contiguous(op, "choice_bias", choice_bias, [experts], logits.device, torch.float32)
    check_contiguous(op, "expert_scale", expert_scale, [experts], logits.device, torch.float32)
    check_contiguous(op, "num_tokens", num_tokens, [1], logits.device, torch.int32)
    check_contiguous(op, "used", used, [1], logits.device, torch.int64)
