"""The router with norm and choice on the GPU: its Triton kernel, and the launch. ``routed_linear.py`` says what it is.

A program has 16 rows, 16 experts and a share of the inputs, so that many SMs read weights; it computes the norms of its
rows by itself. The program that is the last to finish adds up the shares, in their order, and chooses for all rows.

Why a row's bits do not depend on how many rows there are: how inputs are shared out follows from the layer alone, a
program always has 16 rows, adds up its inputs from the first to the last, and the squares of a row by place in the
block and then all places, with 8 warps. Of the choice ``triton_expert_rows.py`` says it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear.triton_linear import multiply_add
from compiled_llm.ops.moe.routing import MAX_EXPERTS, MAX_GROUPED_EXPERTS, MAX_ROWS
from compiled_llm.ops.moe.triton_expert_rows import check, choose, place_few, rule
from compiled_llm.ops.rowwise.triton_kernels import inverse_rms, rounded, weighted
from compiled_llm.ops.rowwise.triton_rowwise import aligned_rows

_BLOCK = 16  # rows, and experts, of a program
_BLOCK_K = {2: 128, 4: 64}  # inputs at a time, by the bytes of a weight
_SHARE = 512  # inputs of a program, unless sums of that many shares would be more than the last program reads at once
_SUMS = 512  # experts times shares
_DTYPES = (torch.bfloat16, torch.float16)


@triton.jit
def _share_of_logits(
    x, norm, weight, normed, rows, inside_rows, num_stored, experts, begin, x_stride, eps,
    EXPERTS: tl.constexpr, IN: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Products over ``SHARE`` inputs from ``begin`` on; the normed ones of ``num_stored`` rows are stored."""
    dtype: tl.constexpr = x.dtype.element_ty
    inner = tl.arange(0, BLOCK_K)
    x_rows = x + rows[:, None] * x_stride
    if norm is not None:
        squares = tl.zeros([BLOCK, BLOCK_K], tl.float32)
        for k in range(0, IN, BLOCK_K):
            inside = inside_rows[:, None] & (inner < IN - k)[None, :]
            y = tl.load(x_rows + k + inner[None, :], mask=inside, other=0.0).to(tl.float32)
            squares += y * y
        scale = inverse_rms(squares, eps, IN)[:, None]
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(begin, begin + SHARE, BLOCK_K):
        inputs = k + inner
        inside = inputs < IN
        a = tl.load(x_rows + inputs[None, :], mask=inside_rows[:, None] & inside[None, :], other=0.0)
        if norm is not None:
            weights = tl.load(norm + inputs, mask=inside, other=0.0)[None, :]
            a = weighted(a.to(tl.float32) * scale, weights, dtype)
            target = normed + rows[:, None] * IN + inputs[None, :]
            tl.store(target, a, mask=(rows < num_stored)[:, None] & inside[None, :])
        b = tl.load(
            weight + experts[:, None].to(tl.int64) * IN + inputs[None, :],
            mask=(experts < EXPERTS)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        acc = multiply_add(a.to(b.dtype), tl.trans(b), acc)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def routed_linear_kernel(
    x, norm, weight, bias, choice_bias, expert_scale, num_tokens, used, counters, shares, normed, out_weights, places,
    tokens, starts, num_rows, x_stride, eps, scale,
    EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, TOP_K: tl.constexpr, SCORING: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_POW2: tl.constexpr, TOP_GROUPS: tl.constexpr,
    IN: tl.constexpr, NUM_SHARES: tl.constexpr, SHARE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program a tile of logits and a share of the inputs; ``shares`` is ``[NUM_SHARES, num_rows, EXPERTS]``."""
    num_m = tl.cdiv(num_rows, BLOCK)
    share = tl.program_id(0) % NUM_SHARES
    tile = tl.program_id(0) // NUM_SHARES
    rows = (tile % num_m * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    columns = tile // num_m * BLOCK + tl.arange(0, BLOCK)
    acc = _share_of_logits(
        x, norm, weight, normed, rows, rows < num_rows, tl.where(tile < num_m, num_rows, 0), columns, share * SHARE,
        x_stride, eps,
        EXPERTS, IN, SHARE, BLOCK, BLOCK_K,
    )  # fmt: skip
    tl.store(
        shares + (share * num_rows + rows[:, None]) * EXPERTS + columns[None, :],
        acc, mask=(rows < num_rows)[:, None] & (columns < EXPERTS)[None, :],
    )  # fmt: skip
    # All threads have stored before one of them counts, with a release of what was stored and an acquire of what others
    # released; and all threads wait for its answer.
    tl.debug_barrier()
    if tl.atomic_add(counters, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(counters, 0)
        experts = tl.arange(0, EXPERTS_POW2)
        token = tl.arange(0, BLOCK_T)
        inside = (token < num_rows)[:, None] & (experts < EXPERTS)[None, :]
        logits = tl.zeros([BLOCK_T, EXPERTS_POW2], tl.float32)
        for one in tl.static_range(NUM_SHARES):
            places_of = (one * num_rows + token[:, None]) * EXPERTS + experts[None, :]
            # From the L2 cache, which all programs write to: that of this SM may have older bytes.
            logits += tl.load(shares + places_of, mask=inside, other=0.0, cache_modifier=".cg")
        if bias is not None:
            logits += tl.load(bias + experts, mask=experts < EXPERTS, other=0.0).to(tl.float32)[None, :]
        if weight.dtype.element_ty != tl.float32:
            logits = rounded(logits, weight.dtype.element_ty)
        order, chosen = choose(
            logits, experts, choice_bias, expert_scale, scale,
            EXPERTS, TOP_K, SCORING, GROUPS, GROUPS_POW2, TOP_GROUPS,
        )  # fmt: skip
        place_few(
            order, chosen, experts, num_rows, tl.load(num_tokens), used, out_weights, places, tokens, starts,
            EXPERTS, TOP_K,
        )  # fmt: skip


def shares_of(in_features: int, experts_pow2: int, block_k: int) -> tuple[int, int]:
    """How many shares of the inputs there are, and their size: of a layer, whatever its rows."""
    most = max(1, _SUMS // experts_pow2)
    share = max(_SHARE, triton.cdiv(in_features, most))
    share = triton.cdiv(share, block_k) * block_k
    return triton.cdiv(in_features, share), share


def routed_linear(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None, choice_bias: Tensor | None,
    expert_scale: Tensor | None, num_tokens: Tensor, used: Tensor, counters: Tensor, top_k: int, scoring: str,
    scale: float, groups: int, top_groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never synchronises.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; too many rows or experts; experts that cannot be
            chosen so.
    """
    x, x_stride = aligned_rows(x, "routed_linear", "x", _DTYPES)
    most = MAX_EXPERTS if groups == top_groups else MAX_GROUPED_EXPERTS
    _check(x, norm, weight, bias, counters, most)
    (count, in_features), num_experts = x.shape, weight.shape[0]
    logits = x.new_empty(0, num_experts)
    check(logits, choice_bias, expert_scale, num_tokens, used, top_k, groups, top_groups)
    normed = x.new_empty(0 if norm is None else (count, in_features))
    out_weights = x.new_empty(count, top_k, dtype=torch.float32)
    places = torch.empty_like(out_weights, dtype=torch.int32)
    tokens, starts = places.new_empty(count * top_k), places.new_empty(num_experts + 1)
    constants = rule(num_experts, top_k, scoring, groups, top_groups)
    block_k = _BLOCK_K[weight.itemsize]
    num_shares, share = shares_of(in_features, constants["EXPERTS_POW2"], block_k)
    shares = out_weights.new_empty(num_shares, count, num_experts)
    tiles = triton.cdiv(count, _BLOCK) * triton.cdiv(num_experts, _BLOCK)
    with torch.cuda.device_of(x):
        routed_linear_kernel[(num_shares * tiles,)](
            x, norm, weight, bias, choice_bias, expert_scale, num_tokens, used, counters, shares, normed, out_weights,
            places, tokens, starts, count, x_stride, eps, scale, **constants,
            IN=in_features, NUM_SHARES=num_shares, SHARE=share,
            BLOCK=_BLOCK, BLOCK_K=block_k, BLOCK_T=triton.next_power_of_2(count),
            num_warps=8, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip
    return normed, out_weights, places, tokens, starts


def _check(x: Tensor, norm: Tensor | None, weight: Tensor, bias: Tensor | None, counters: Tensor, most: int) -> None:
    count, size = x.shape
    if not 0 < count <= MAX_ROWS:
        raise ValueError(f"routed_linear: x must have 1 to {MAX_ROWS} rows, got {count}")
    known = (
        ("weight", weight, (weight.shape[0], size), (x.dtype, torch.float32)),
        ("bias", bias, (weight.shape[0],), (weight.dtype,)),
        ("norm", norm, (size,), (x.dtype, torch.float32)),
        ("counters", counters, tuple(counters.shape), (torch.int32,)),
    )
    for name, tensor, shape, dtypes in known:
        if tensor is None:
            continue
        fits = tuple(tensor.shape) == shape and tensor.is_contiguous() and tensor.numel() and tensor.dtype in dtypes
        if not fits or tensor.device != x.device:
            raise ValueError(
                f"routed_linear: {name} must be a contiguous {list(shape)} of {' or '.join(map(str, dtypes))} on "
                f"{x.device}, got {list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            )
    if weight.shape[0] > most:
        raise ValueError(f"routed_linear: there must be at most {most} experts, got {weight.shape[0]}")
