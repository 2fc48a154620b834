"""Attention of a decode of one request, whose time is not bandwidth but one thing after another, and code run once.

As the kernel of ``triton_decode.py``, which launches it, but for these:

- A program has one task, or an empty one: there is no loop over tasks, and nobody waits for their number.
- The first keys and values are asked for before queries are turned. Tiles lie in registers, and while one is attended
  to, the next is on its way; code for a second tile is not run where there is one.
- Sums begin with the new key and value, as the cache will have them: rounded, or in codes. They are stored besides, and
  nobody waits for that or reads them back.
- Splits are joined all at once, and no thread waits for another.
"""

import triton
import triton.language as tl

from compiled_llm.ops.attention.tiles import TASK_COLUMNS
from compiled_llm.ops.attention.triton_codes import SMALLEST_UNIT, dot_codes, in_float16, parts
from compiled_llm.ops.attention.triton_kernels import LOG2_E, LOWEST, dot, store_whole
from compiled_llm.ops.attention.triton_write import quantised_halves
from compiled_llm.ops.rowwise.triton_kernels import cast, inverse_rms, weighted
from compiled_llm.ops.triton_programmatic import wait_for_launches_before

TASK = tl.constexpr(TASK_COLUMNS)


@triton.jit
def _turned(heads, inside, d, cosines, norm, eps, HALF: tl.constexpr):
    """The halves of the heads at ``heads``, ``[M, HALF]``, normalised and turned.

    All loads have this shape, also of rows that are alike: so they lie in threads alike, and nothing is exchanged.
    """
    dtype: tl.constexpr = heads.dtype.element_ty
    first = tl.load(heads, mask=inside, other=0.0)
    second = tl.load(heads + HALF, mask=inside, other=0.0)
    if cosines is None:
        return first, second
    else:
        x, y = first.to(tl.float32), second.to(tl.float32)
        if norm is not None:
            scale = inverse_rms(x * x + y * y, eps, 2 * HALF)[:, None]
            x = weighted(x * scale, tl.load(norm + d, mask=inside, other=0.0), dtype).to(tl.float32)
            y = weighted(y * scale, tl.load(norm + HALF + d, mask=inside, other=0.0), dtype).to(tl.float32)
        cos = tl.load(cosines + d, mask=inside, other=0.0)
        sin = tl.load(cosines + HALF + d, mask=inside, other=0.0)
        return cast(x * cos - y * sin, dtype), cast(y * cos + x * sin, dtype)


@triton.jit
def _new_keys(q_first, q_second, k_first, k_second, v, k_row, v_row, d, has_new, once, HALF: tl.constexpr):
    """The scores of a new key and, in all rows, its value; stored by the rows ``once``."""
    tl.store(k_row + d, k_first, mask=once[:, None])
    tl.store(k_row + HALF + d, k_second, mask=once[:, None])
    products = q_first.to(tl.float32) * k_first.to(tl.float32) + q_second.to(tl.float32) * k_second.to(tl.float32)
    dims = tl.zeros([d.shape[0], 1], tl.int32) + tl.arange(0, 2 * HALF)[None, :]
    values = tl.load(v + dims, mask=dims < tl.where(has_new, 2 * HALF, 0), other=0.0)
    tl.store(v_row + dims, values, mask=once[:, None])
    return tl.sum(products, 1), values.to(tl.float32)


@triton.jit
def _new_codes(
    q_first, q_second, k_first, k_second, v, k_row, v_row, k_scale, v_scale, d, inside, once, CODE_MAX: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Likewise of codes: scores, even and odd elements of the value's codes, and the value's scale."""
    first, second, scales = quantised_halves(k_first, k_second, CODE_MAX)
    tl.store(k_row + d, first, mask=once[:, None])
    tl.store(k_row + HALF + d, second, mask=once[:, None])
    tl.store(k_scale + tl.zeros(once.shape, tl.int32), scales, mask=once)
    products = q_first.to(tl.float32) * first.to(tl.float32) + q_second.to(tl.float32) * second.to(tl.float32)
    scores = tl.sum(products, 1) * scales
    even, odd = tl.load(v + 2 * d, mask=inside, other=0.0), tl.load(v + 2 * d + 1, mask=inside, other=0.0)
    even, odd, scales = quantised_halves(even, odd, CODE_MAX)
    tl.store(v_row + 2 * d, even, mask=once[:, None])
    tl.store(v_row + 2 * d + 1, odd, mask=once[:, None])
    tl.store(v_scale + tl.zeros(once.shape, tl.int32), scales, mask=once)
    return scores, even.to(tl.float32), odd.to(tl.float32), scales


@triton.jit
def _blocks(table_row, position, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of each key of a tile."""
    positions = position + tl.arange(0, BLOCK_N)
    return tl.load(table_row + positions // BLOCK_SIZE, mask=positions < end, other=0)


@triton.jit
def _load_tile(
    k_cache, v_cache, k_scale, v_scale, blocks, kv_head, position, end,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Keys and values from ``position`` to ``end``, zeros beyond, and their scales if they are codes."""
    positions = position + tl.arange(0, BLOCK_N)
    inside = positions < end
    dims = tl.arange(0, WIDTH)
    rows = (blocks.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + positions % BLOCK_SIZE
    keys = tl.load(k_cache + rows[:, None] * WIDTH + dims[None, :], mask=inside[:, None], other=0)
    values = tl.load(v_cache + rows[:, None] * WIDTH + dims[None, :], mask=inside[:, None], other=0)
    k_scales, v_scales = inside, inside
    if k_scale is not None:
        k_scales = tl.load(k_scale + rows, mask=inside, other=0.0)
        v_scales = tl.load(v_scale + rows, mask=inside, other=0.0)
    return keys, values, k_scales, v_scales


@triton.jit
def _capped(scores, scale, SOFT_CAP: tl.constexpr):
    """In units of the cap, as ``attend`` has them: tanh(x) = 1 - 2 / (1 + exp(2 x))."""
    if SOFT_CAP > 0:
        scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale * (2.0 * LOG2_E / SOFT_CAP))))
    return scores


@triton.jit
def _softmax(scores, inside, row_max, row_sum, factor, scale, SOFT_CAP: tl.constexpr):
    """A tile's weights, what sums before it are multiplied by, and maxima and sums with it."""
    scores = tl.where(inside[None, :], _capped(scores, scale, SOFT_CAP), float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    probs = tl.exp2(tl.fma(scores, factor, -new_max[:, None]))
    decay = tl.exp2(row_max - new_max)
    return probs, decay, new_max, tl.fma(row_sum, decay, tl.sum(probs, 1))


@triton.jit
def _join(
    sinks, out, partial, partial_max, partial_sum, kv_head, num_splits, partial_rows,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """The outputs of a KV head's queries from their splits, ``SPLITS`` at most, in their order.

    From the L2 cache, which all programs write to: that of this SM may have older bytes. Maxima are asked for twice,
    once to find the largest: all loads are on their way at once, and no register waits.
    """
    m = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, HEAD_DIM)
    heads = kv_head * GROUP + m
    part = heads * partial_rows
    row_max = tl.full([BLOCK_G], LOWEST, tl.float32)
    for split in tl.static_range(SPLITS):
        known = m < tl.where(split < num_splits, GROUP, 0)
        row_max = tl.maximum(
            row_max, tl.load(partial_max + part + split, mask=known, other=LOWEST, cache_modifier=".cg")
        )
    acc = tl.zeros([BLOCK_G, HEAD_DIM], tl.float32)
    row_sum = tl.zeros([BLOCK_G], tl.float32)
    for split in tl.static_range(SPLITS):
        known = m < tl.where(split < num_splits, GROUP, 0)
        split_max = tl.load(partial_max + part + split, mask=known, other=LOWEST, cache_modifier=".cg")
        split_sum = tl.load(partial_sum + part + split, mask=known, other=0.0, cache_modifier=".cg")
        split_acc = tl.load(
            partial + (part * HEAD_DIM)[:, None] + (split * HEAD_DIM + dims[None, :]), mask=known[:, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        weight = tl.exp2(split_max - row_max)
        row_sum = tl.fma(split_sum, weight, row_sum)
        acc = tl.fma(split_acc, tl.broadcast_to(weight[:, None], [BLOCK_G, HEAD_DIM]), acc)
    store_whole(acc, row_max, row_sum, sinks, heads, m < GROUP, out, HEAD_DIM)


@triton.jit
def alone_kernel(
    q, k, v, cos_sin, q_norm, k_norm, query_scale, k_cache, v_cache, k_scale, v_scale,
    block_table, tasks, counters, sinks, out, partial, partial_max, partial_sum,
    eps, scale, partial_rows, table_stride, q_stride_n, k_stride_h, v_stride_h,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CODE_MAX: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """A program for each KV head and each of ``SPLITS`` tasks of the plan, some of which may be empty.

    A quantised cache comes as int16, two codes each; ``CODE_MAX`` tells the kind.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    IN_CODES: tl.constexpr = CODE_MAX > 0
    WIDTH: tl.constexpr = HALF if IN_CODES else HEAD_DIM
    tl.static_assert(WINDOW >= 0)  # no task has a key before it
    if PROGRAMMATIC:
        wait_for_launches_before()
    kv_head = tl.program_id(0)
    task = tasks + (1 + tl.program_id(1)) * TASK
    table_row = block_table + tl.load(task + 1).to(tl.int64) * table_stride
    begin, end = tl.load(task + 2), tl.load(task + 3)
    split, num_splits = tl.load(task + 4), tl.load(task + 5)
    slot = tl.load(task + 6).to(tl.int64)
    has_new = slot >= 0
    if k is not None:  # else the cache has it
        end -= has_new.to(tl.int32)
    blocks = _blocks(table_row, begin, end, BLOCK_SIZE, BLOCK_N)
    keys, values, k_scales, v_scales = _load_tile(
        k_cache, v_cache, k_scale, v_scale, blocks, kv_head, begin, end, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, WIDTH
    )

    m = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + m
    row_mask = m < GROUP
    d = tl.zeros([BLOCK_M, 1], tl.int32) + tl.arange(0, HALF)[None, :]
    q_first, q_second = _turned(
        q + heads[:, None] * q_stride_n + d, row_mask[:, None] & (d >= 0), d, cos_sin, q_norm, eps, HALF
    )
    if query_scale is not None:
        dtype: tl.constexpr = q_first.dtype
        q_scale = tl.load(query_scale).to(tl.float32)
        q_first, q_second = (
            cast(q_first.to(tl.float32) * q_scale, dtype),
            cast(q_second.to(tl.float32) * q_scale, dtype),
        )
    factor = scale * LOG2_E  # as ``attend`` has it
    if SOFT_CAP > 0:
        factor = SOFT_CAP * LOG2_E
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    largest = SMALLEST_UNIT  # of the scales of values met so far, by which weights are divided
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    acc_even, acc_odd = tl.zeros([BLOCK_M, HALF], tl.float32), tl.zeros([BLOCK_M, HALF], tl.float32)
    if k is not None:
        first_new = tl.where(has_new, 0, HEAD_DIM)  # no element is new where no key is
        is_new, once = d >= first_new, (m == 0) & (m >= first_new)
        k_first, k_second = _turned(k + kv_head * k_stride_h + d, is_new, d, cos_sin, k_norm, eps, HALF)
        place = (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        new_value = v + kv_head * v_stride_h
        if IN_CODES:
            code: tl.constexpr = tl.int8 if CODE_MAX == 127 else tl.float8e4nv
            k_codes = k_cache.to(tl.pointer_type(code), bitcast=True) + place * HEAD_DIM
            v_codes = v_cache.to(tl.pointer_type(code), bitcast=True) + place * HEAD_DIM
            new_scores, acc_even, acc_odd, scales = _new_codes(
                q_first, q_second, k_first, k_second, new_value, k_codes, v_codes, k_scale + place, v_scale + place,
                d, is_new, once, CODE_MAX, HALF,
            )  # fmt: skip
            largest = tl.maximum(tl.where(has_new, tl.max(scales, 0), 0.0), largest)
            acc_even *= (scales / largest)[:, None]
            acc_odd *= (scales / largest)[:, None]
        else:
            new_scores, acc = _new_keys(
                q_first, q_second, k_first, k_second, new_value, k_cache + place * HEAD_DIM, v_cache + place * HEAD_DIM,
                d, has_new, once, HALF,
            )  # fmt: skip
        row_max = tl.where(has_new, _capped(new_scores, scale, SOFT_CAP) * factor, LOWEST)
        row_sum = tl.where(has_new, row_sum + 1.0, 0.0)
    q_tile = tl.reshape(tl.permute(tl.join(q_first, q_second), [0, 2, 1]), [BLOCK_M, HEAD_DIM])
    if IN_CODES:
        q_even, q_odd, unit = in_float16(q_tile)

    if begin + BLOCK_N < end:
        blocks = _blocks(table_row, begin + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N, num_stages=1):
        inside = start + tl.arange(0, BLOCK_N) < end
        now_keys, now_values, now_k_scales, now_v_scales = keys, values, k_scales, v_scales
        if start + BLOCK_N < end:
            keys, values, k_scales, v_scales = _load_tile(
                k_cache, v_cache, k_scale, v_scale, blocks, kv_head, start + BLOCK_N, end,
                NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, WIDTH,
            )  # fmt: skip
            blocks = _blocks(table_row, start + 2 * BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        if IN_CODES:
            k_even, k_odd = parts(tl.trans(now_keys), CODE_MAX == 448)
            scores = dot_codes(q_odd, k_odd, dot_codes(q_even, k_even, tl.zeros([BLOCK_M, BLOCK_N], tl.float32)))
            scores *= unit[:, None] * now_k_scales[None, :]
        else:
            scores = dot(q_tile, tl.trans(now_keys))
        weights, decay, row_max, row_sum = _softmax(scores, inside, row_max, row_sum, factor, scale, SOFT_CAP)
        if IN_CODES:
            new_largest = tl.maximum(largest, tl.max(now_v_scales, 0))
            weights = (weights * (now_v_scales / new_largest)[None, :]).to(tl.float16)
            decay *= largest / new_largest
            largest = new_largest
            v_even, v_odd = parts(now_values, CODE_MAX == 448)
            acc_even = dot_codes(weights, v_even, acc_even * decay[:, None])
            acc_odd = dot_codes(weights, v_odd, acc_odd * decay[:, None])
        else:
            acc = acc * decay[:, None] + dot(weights.to(q_tile.dtype), now_values)
    if IN_CODES:
        acc = tl.join(acc_even, acc_odd).reshape([BLOCK_M, HEAD_DIM]) * largest

    if num_splits == 1:
        store_whole(acc, row_max, row_sum, sinks, heads, row_mask, out, HEAD_DIM)
    elif split < num_splits:  # else the task is empty
        part = heads * partial_rows + split
        tl.store(partial + part[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :], acc, mask=row_mask[:, None])
        tl.store(partial_max + part, row_max, mask=row_mask)
        tl.store(partial_sum + part, row_sum, mask=row_mask)
        # As in ``decode_kernel``.
        tl.debug_barrier()
        if tl.atomic_add(counters + kv_head, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
            tl.store(counters + kv_head, 0)
            _join(
                sinks, out, partial, partial_max, partial_sum, kv_head, num_splits, partial_rows,
                GROUP, NUM_KV_HEADS, HEAD_DIM, BLOCK_G, SPLITS,
            )  # fmt: skip
