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
from compiled_llm.ops.attention.triton_codes import attend_codes, dot_codes, in_float16, parts
from compiled_llm.ops.attention.triton_kernels import attend, dot, store_whole
from compiled_llm.ops.attention.triton_softmax import LOWEST, SMALLEST_UNIT, capped, factor_of
from compiled_llm.ops.attention.triton_write import quantised_halves
from compiled_llm.ops.rowwise.triton_kernels import cast, inverse_rms, weighted
from compiled_llm.ops.triton_programmatic import prefetch_rows, wait_for_launches_before

TASK = tl.constexpr(TASK_COLUMNS)
NEAR = tl.constexpr(4)  # tiles of a split whose keys all come through registers; of longer ones the first


@triton.jit
def _halves(x, d, mask, HALF: tl.constexpr):
    """The halves of rows ``[M, 2 * HALF]``.

    All loads have this shape, also of rows that are alike: so they lie in threads alike, and nothing is exchanged.
    """
    return tl.load(x + d, mask=mask, other=0.0), tl.load(x + HALF + d, mask=mask, other=0.0)


@triton.jit
def _turned(first, second, cos, sin, norm_first, norm_second, has_norm: tl.constexpr, eps, HALF: tl.constexpr):
    """Halves of heads, normalised and turned."""
    dtype: tl.constexpr = first.dtype
    x, y = first.to(tl.float32), second.to(tl.float32)
    if has_norm:
        scale = inverse_rms(x * x + y * y, eps, 2 * HALF)[:, None]
        x = weighted(x * scale, norm_first, dtype).to(tl.float32)
        y = weighted(y * scale, norm_second, dtype).to(tl.float32)
    return cast(x * cos - y * sin, dtype), cast(y * cos + x * sin, dtype)


@triton.jit
def _joined(first, second):
    """Halves side by side."""
    return tl.reshape(tl.permute(tl.join(first, second), [0, 2, 1]), [first.shape[0], 2 * first.shape[1]])


@triton.jit
def _scores(q_first, q_second, k_first, k_second):
    """Of a key that all rows have."""
    products = q_first.to(tl.float32) * k_first.to(tl.float32) + q_second.to(tl.float32) * k_second.to(tl.float32)
    return tl.sum(products, 1)


@triton.jit
def _prefetch(row, SIZE: tl.constexpr):
    if row is not None:
        ITEM: tl.constexpr = row.dtype.element_ty.primitive_bitwidth // 8
        prefetch_rows(row + tl.zeros([1], tl.int32), SIZE * ITEM, 1, 512)


@triton.jit
def _blocks(table_row, position, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, CACHE: tl.constexpr):
    """Of each key of a tile. ``CACHE``: how it is loaded, as ``tl.load`` has it."""
    positions = position + tl.arange(0, BLOCK_N)
    return tl.load(table_row + positions // BLOCK_SIZE, mask=positions < end, other=0, cache_modifier=CACHE)


@triton.jit
def _load_tile(
    k_cache, v_cache, k_scale, v_scale, blocks, kv_head, position, end,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """Keys and values from ``position`` to ``end``, zeros beyond, and their scales if they are codes."""
    positions = position + tl.arange(0, BLOCK_N)
    inside = positions < end
    dims = tl.arange(0, WIDTH)
    rows = (blocks.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + positions % BLOCK_SIZE
    keys = tl.load(k_cache + rows[:, None] * WIDTH + dims[None, :], mask=inside[:, None], other=0, cache_modifier=CACHE)
    values = tl.load(
        v_cache + rows[:, None] * WIDTH + dims[None, :], mask=inside[:, None], other=0, cache_modifier=CACHE
    )
    k_scales, v_scales = inside, inside
    if k_scale is not None:
        k_scales = tl.load(k_scale + rows, mask=inside, other=0.0, cache_modifier=CACHE)
        v_scales = tl.load(v_scale + rows, mask=inside, other=0.0, cache_modifier=CACHE)
    return keys, values, k_scales, v_scales


@triton.jit
def _softmax(scores, inside, row_max, row_sum, factor, scale, SOFT_CAP: tl.constexpr):
    """A tile's weights, what sums before it are multiplied by, and maxima and sums with it."""
    scores = tl.where(inside[None, :], capped(scores, scale, SOFT_CAP), float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    probs = tl.exp2(tl.fma(scores, factor, -new_max[:, None]))
    decay = tl.exp2(row_max - new_max)
    return probs, decay, new_max, tl.fma(row_sum, decay, tl.sum(probs, 1))


@triton.jit
def _rest(
    acc, row_max, row_sum, q, k_cache, v_cache, k_scale, v_scale, table_row, kv_head, begin, end, scale,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, CODE_MAX: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums, maxima and weights with the keys of a long split from ``begin`` on, by the loops of other kernels."""
    if CODE_MAX > 0:
        other, other_max, other_sum = attend_codes(
            q, None, k_cache, v_cache, k_scale, v_scale, table_row, kv_head, begin, begin, end, scale,
            CODE_MAX == 448, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, 0, SOFT_CAP, BLOCK_N, WINDOW == 0,
        )  # fmt: skip
        new_max = tl.maximum(row_max, other_max)
        decay, other_decay = tl.exp2(row_max - new_max), tl.exp2(other_max - new_max)
        acc = acc * decay[:, None] + other * other_decay[:, None]
        return acc, new_max, row_sum * decay + other_sum * other_decay
    else:
        return attend(
            acc, row_max, row_sum, q, None, k_cache, v_cache, k_scale, v_scale, table_row, kv_head,
            begin, begin, end, scale, True, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, 0, SOFT_CAP, BLOCK_N, False,
            WINDOW == 0,
        )  # fmt: skip


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
        split_max = tl.load(partial_max + part + split, mask=known, other=LOWEST, cache_modifier=".cg")
        row_max = tl.maximum(row_max, split_max)
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
    # What no launch directly before writes: plan, block table, keys of earlier tokens. So they may be read before the
    # wait (``programmatic_launch.py``), from the L2 cache: that of this SM may have older bytes.
    CACHE: tl.constexpr = ".cg" if PROGRAMMATIC else ""
    if PROGRAMMATIC:
        _prefetch(cos_sin, HEAD_DIM)
        _prefetch(q_norm, HEAD_DIM)
        _prefetch(k_norm, HEAD_DIM)
    kv_head = tl.program_id(0)
    task = tasks + (1 + tl.program_id(1)) * TASK
    table_row = block_table + tl.load(task + 1, cache_modifier=CACHE).to(tl.int64) * table_stride
    begin, end = tl.load(task + 2, cache_modifier=CACHE), tl.load(task + 3, cache_modifier=CACHE)
    split, num_splits = tl.load(task + 4, cache_modifier=CACHE), tl.load(task + 5, cache_modifier=CACHE)
    slot = tl.load(task + 6, cache_modifier=CACHE).to(tl.int64)
    has_new = slot >= 0
    if k is not None:  # else the cache has it
        end -= has_new.to(tl.int32)
    blocks = _blocks(table_row, begin, end, BLOCK_SIZE, BLOCK_N, CACHE)
    keys, values, k_scales, v_scales = _load_tile(
        k_cache, v_cache, k_scale, v_scale, blocks, kv_head, begin, end, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, WIDTH, CACHE
    )
    if PROGRAMMATIC:
        wait_for_launches_before()  # for queries and the new key: the launch before has made them

    # All that is asked for before anything is computed: divisions have branches, which loads do not pass.
    m = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + m
    row_mask = m < GROUP
    d = tl.zeros([BLOCK_M, 1], tl.int32) + tl.arange(0, HALF)[None, :]
    q_first, q_second = _halves(q + heads[:, None] * q_stride_n, d, row_mask[:, None] & (d >= 0), HALF)
    first_new = tl.where(has_new, 0, HEAD_DIM)  # no element is new where no key is
    is_new, once = d >= first_new, (m == 0) & (m >= first_new)
    k_first, k_second, v_first, v_second = q_first, q_second, q_first, q_second
    if k is not None:
        k_first, k_second = _halves(k + kv_head * k_stride_h, d, is_new, HALF)
        if IN_CODES:  # even and odd elements, as tiles have them
            v_first = tl.load(v + kv_head * v_stride_h + 2 * d, mask=is_new, other=0.0)
            v_second = tl.load(v + kv_head * v_stride_h + 2 * d + 1, mask=is_new, other=0.0)
        else:
            v_first, v_second = _halves(v + kv_head * v_stride_h, d, is_new, HALF)
    if cos_sin is not None:
        cos, sin = _halves(cos_sin, d, d >= 0, HALF)
        q_norms, k_norms = (cos, sin), (cos, sin)
        if q_norm is not None:
            q_norms = _halves(q_norm, d, d >= 0, HALF)
        if k_norm is not None:
            k_norms = _halves(k_norm, d, d >= 0, HALF)
        q_first, q_second = _turned(q_first, q_second, cos, sin, q_norms[0], q_norms[1], q_norm is not None, eps, HALF)
        k_first, k_second = _turned(k_first, k_second, cos, sin, k_norms[0], k_norms[1], k_norm is not None, eps, HALF)
    if query_scale is not None:
        dtype: tl.constexpr = q_first.dtype
        q_scale = tl.load(query_scale).to(tl.float32)
        q_first = cast(q_first.to(tl.float32) * q_scale, dtype)
        q_second = cast(q_second.to(tl.float32) * q_scale, dtype)

    factor = factor_of(scale, SOFT_CAP)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    largest = SMALLEST_UNIT  # of the scales of values met so far, by which weights are divided
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    acc_even, acc_odd = tl.zeros([BLOCK_M, HALF], tl.float32), tl.zeros([BLOCK_M, HALF], tl.float32)
    if k is not None:
        place = (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        if IN_CODES:
            code: tl.constexpr = tl.int8 if CODE_MAX == 127 else tl.float8e4nv
            k_codes = k_cache.to(tl.pointer_type(code), bitcast=True) + place * HEAD_DIM + d
            v_codes = v_cache.to(tl.pointer_type(code), bitcast=True) + place * HEAD_DIM + 2 * d
            k_first, k_second, scales = quantised_halves(k_first, k_second, CODE_MAX)
            tl.store(k_codes, k_first, mask=once[:, None])
            tl.store(k_codes + HALF, k_second, mask=once[:, None])
            tl.store(k_scale + place + 0 * m, scales, mask=once)
            new_scores = _scores(q_first, q_second, k_first, k_second) * scales
            v_first, v_second, scales = quantised_halves(v_first, v_second, CODE_MAX)
            tl.store(v_codes, v_first, mask=once[:, None])
            tl.store(v_codes + 1, v_second, mask=once[:, None])
            tl.store(v_scale + place + 0 * m, scales, mask=once)
            largest = tl.maximum(tl.where(has_new, tl.max(scales, 0), 0.0), largest)
            acc_even = v_first.to(tl.float32) * (scales / largest)[:, None]
            acc_odd = v_second.to(tl.float32) * (scales / largest)[:, None]
        else:
            tl.store(k_cache + place * HEAD_DIM + d, k_first, mask=once[:, None])
            tl.store(k_cache + place * HEAD_DIM + HALF + d, k_second, mask=once[:, None])
            tl.store(v_cache + place * HEAD_DIM + d, v_first, mask=once[:, None])
            tl.store(v_cache + place * HEAD_DIM + HALF + d, v_second, mask=once[:, None])
            new_scores = _scores(q_first, q_second, k_first, k_second)
            acc = _joined(v_first, v_second).to(tl.float32)
        row_max = tl.where(has_new, capped(new_scores, scale, SOFT_CAP) * factor, LOWEST)
        row_sum = tl.where(has_new, tl.exp2(row_max - row_max), 0.0)  # 1, but not of a key that is not finite
    q_tile = _joined(q_first, q_second)
    if IN_CODES:
        q_even, q_odd, unit = in_float16(q_tile)

    near = tl.where(end - begin <= NEAR * BLOCK_N, end, begin + BLOCK_N)
    if begin + BLOCK_N < near:
        blocks = _blocks(table_row, begin + BLOCK_N, near, BLOCK_SIZE, BLOCK_N, "")
    for start in tl.range(begin, near, BLOCK_N, num_stages=1):
        inside = start + tl.arange(0, BLOCK_N) < end
        now_keys, now_values, now_k_scales, now_v_scales = keys, values, k_scales, v_scales
        if start + BLOCK_N < near:
            keys, values, k_scales, v_scales = _load_tile(
                k_cache, v_cache, k_scale, v_scale, blocks, kv_head, start + BLOCK_N, near,
                NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, WIDTH, "",
            )  # fmt: skip
            blocks = _blocks(table_row, start + 2 * BLOCK_N, near, BLOCK_SIZE, BLOCK_N, "")
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
    if near < end:
        acc, row_max, row_sum = _rest(
            acc, row_max, row_sum, q_tile, k_cache, v_cache, k_scale, v_scale, table_row, kv_head, near, end, scale,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, CODE_MAX, WINDOW, SOFT_CAP, BLOCK_N,
        )  # fmt: skip

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
            if num_splits <= SPLITS // 2:  # half the code
                _join(
                    sinks, out, partial, partial_max, partial_sum, kv_head, num_splits, partial_rows,
                    GROUP, NUM_KV_HEADS, HEAD_DIM, BLOCK_G, SPLITS // 2,
                )  # fmt: skip
            else:
                _join(
                    sinks, out, partial, partial_max, partial_sum, kv_head, num_splits, partial_rows,
                    GROUP, NUM_KV_HEADS, HEAD_DIM, BLOCK_G, SPLITS,
                )  # fmt: skip
