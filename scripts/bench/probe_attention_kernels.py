"""A decode's attention for few requests: the candidate that probe_attention.py times, with a switch for each change.

As ``decode_kernel`` of ops/attention/triton_decode.py, with these differences:

- A program has one task, or an empty one, so there is no loop over tasks, and no number of tasks is waited for.
- ``FROM_TASK``: the block numbers of a split's first tile come with its task (columns 8 to 15, each of an eighth of a
  tile's keys), instead of from the block table.
- ``IN_REGISTERS``: the new key and value are attended to from registers, where sums begin, and their store keeps
  nobody waiting. Else the program stores them and reads them back.
- ``EARLY``: the first tile's keys and values are asked for before queries are turned.
- Tiles are loaded into registers, the next one while one is computed; what is not executed costs nothing.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from compiled_llm.ops.attention.triton_codes import SMALLEST_UNIT, in_float16, parts
from compiled_llm.ops.attention.triton_codes import dot_codes as codes_dot
from compiled_llm.ops.attention.triton_decode import _merge_heads, _write_new
from compiled_llm.ops.attention.triton_kernels import LOG2_E, LOWEST, store_whole
from compiled_llm.ops.attention.triton_kernels import dot as _dot
from compiled_llm.ops.attention.triton_write import _codes, _factors, _largest
from compiled_llm.ops.rowwise.triton_kernels import cast, inverse_rms, weighted
from compiled_llm.ops.triton_programmatic import wait_for_launches_before

TASK = tl.constexpr(16)


@triton.jit
def read_kernel(x, out, BLOCK: tl.constexpr, TRIPS: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    """Reads ``TRIPS`` blocks a program, and stores only what random data never give."""
    if PROGRAMMATIC:
        gdc_launch_dependents()
    offsets = tl.program_id(0).to(tl.int64) * (BLOCK * TRIPS) + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for trip in range(TRIPS):
        total |= tl.load(x + offsets + trip * BLOCK)
    if tl.sum((total == 12345678).to(tl.int32), 0) == BLOCK:
        tl.store(out, 1)


@triton.jit
def turned_halves(heads, inside, d, cosines, norm, eps, HALF: tl.constexpr):
    """The halves of heads at pointers ``heads`` ``[M, BLOCK_HALF]``, normalised and turned."""
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
def joined(first, second):
    """Halves ``[M, D]`` side by side."""
    return tl.reshape(tl.permute(tl.join(first, second), [0, 2, 1]), [first.shape[0], 2 * first.shape[1]])


@triton.jit
def block_numbers(
    task, table_row, position, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, FROM_TASK: tl.constexpr
):
    """The block of each key of a tile; ``FROM_TASK`` of the first one of a split."""
    n = tl.arange(0, BLOCK_N)
    if FROM_TASK:
        return tl.load(task + 8 + n // (BLOCK_N // 8))
    else:
        return tl.load(table_row + (position + n) // BLOCK_SIZE, mask=position + n < end, other=0)


@triton.jit
def rows_at(blocks, position, kv_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    places = (position + tl.arange(0, BLOCK_N)) % BLOCK_SIZE
    return (blocks.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + places


@triton.jit
def tile_at(cache, rows, inside, dims, WIDTH: tl.constexpr):
    return tl.load(cache + rows[:, None] * WIDTH + dims[None, :], mask=inside[:, None], other=0)


@triton.jit
def softmax_step(scores, inside, row_max, row_sum, factor, scale, SOFT_CAP: tl.constexpr):
    """A tile's weights, and what sums before it are multiplied by."""
    if SOFT_CAP > 0:
        scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale * (2.0 * LOG2_E / SOFT_CAP))))
    scores = tl.where(inside[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    probs = tl.exp2(tl.fma(scores, factor, -new_max[:, None]))
    decay = tl.exp2(row_max - new_max)
    return probs, decay, new_max, tl.fma(row_sum, decay, tl.sum(probs, 1))


@triton.jit
def load_tile(
    k_cache, v_cache, k_scale, v_scale, blocks, position, end, kv_head,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Keys, values and, of a quantised cache, their scales."""
    inside = position + tl.arange(0, BLOCK_N) < end
    dims = tl.arange(0, WIDTH)
    rows = rows_at(blocks, position, kv_head, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N)
    keys = tile_at(k_cache, rows, inside, dims, WIDTH)
    values = tile_at(v_cache, rows, inside, dims, WIDTH)
    if k_scale is not None:
        k_scales = tl.load(k_scale + rows, mask=inside, other=0.0)
        v_scales = tl.load(v_scale + rows, mask=inside, other=0.0)
        return keys, values, k_scales, v_scales
    else:
        return keys, values, inside, inside


@triton.jit
def keys_step(q, keys, values, inside, acc, row_max, row_sum, factor, scale, SOFT_CAP: tl.constexpr):
    """Sums, maxima and weights with one more tile."""
    scores = _dot(q, tl.trans(keys))
    probs, decay, row_max, row_sum = softmax_step(scores, inside, row_max, row_sum, factor, scale, SOFT_CAP)
    return acc * decay[:, None] + _dot(probs.to(q.dtype), values), row_max, row_sum


@triton.jit
def codes_step(
    q_even, q_odd, unit, keys, values, k_scales, v_scales, inside, acc_even, acc_odd, row_max, row_sum, largest, factor,
    scale, IS_FP8: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Likewise, over pairs of codes."""
    k_even, k_odd = parts(tl.trans(keys), IS_FP8)
    scores = tl.zeros([q_even.shape[0], keys.shape[0]], tl.float32)
    scores = codes_dot(q_odd, k_odd, codes_dot(q_even, k_even, scores)) * (unit[:, None] * k_scales[None, :])
    probs, decay, row_max, row_sum = softmax_step(scores, inside, row_max, row_sum, factor, scale, SOFT_CAP)
    v_even, v_odd = parts(values, IS_FP8)
    new_largest = tl.maximum(largest, tl.max(v_scales, 0))
    weights = (probs * (v_scales / new_largest)[None, :]).to(tl.float16)
    decay *= largest / new_largest
    acc_even = codes_dot(weights, v_even, acc_even * decay[:, None])
    acc_odd = codes_dot(weights, v_odd, acc_odd * decay[:, None])
    return acc_even, acc_odd, row_max, row_sum, new_largest


@triton.jit
def merge_at_once(
    sinks, out, partial, partial_max, partial_sum, row, kv_head, num_splits, partial_rows,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Joins the splits of the heads of one token, ``SPLITS`` at most, in their order; no thread waits for another."""
    m = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, HEAD_DIM)
    heads = kv_head * GROUP + m
    part = (row * (NUM_KV_HEADS * GROUP) + heads) * partial_rows
    acc = tl.zeros([BLOCK_G, HEAD_DIM], tl.float32)
    row_max = tl.full([BLOCK_G], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_G], tl.float32)
    for split in tl.static_range(SPLITS):
        known = (m < GROUP) & (m * 0 + split < num_splits)
        split_max = tl.load(partial_max + part + split, mask=known, other=LOWEST, cache_modifier=".cg")
        row_max = tl.maximum(row_max, split_max)
    for split in tl.static_range(SPLITS):
        known = (m < GROUP) & (m * 0 + split < num_splits)
        split_max = tl.load(partial_max + part + split, mask=known, other=LOWEST, cache_modifier=".cg")
        split_sum = tl.load(partial_sum + part + split, mask=known, other=0.0, cache_modifier=".cg")
        split_acc = tl.load(
            partial + (part * HEAD_DIM)[:, None] + (split * HEAD_DIM + dims[None, :]), mask=known[:, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        weight = tl.exp2(split_max - row_max)
        row_sum = tl.fma(split_sum, weight, row_sum)
        acc = tl.fma(split_acc, tl.broadcast_to(weight[:, None], [BLOCK_G, HEAD_DIM]), acc)
    store_whole(acc, row_max, row_sum, sinks, heads, m < GROUP, out + row * (NUM_KV_HEADS * GROUP * HEAD_DIM), HEAD_DIM)


@triton.jit
def few_task(
    number, kv_head,
    q, k, v, cos_sin, q_norm, k_norm, k_cache, v_cache, k_scale, v_scale,
    block_table, tasks, counters, sinks, out, partial, partial_max, partial_sum,
    eps, scale, partial_rows, table_stride, cos_sin_stride,
    q_stride_t, q_stride_n, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CODE_MAX: tl.constexpr, SOFT_CAP: tl.constexpr, MERGE_HEADS: tl.constexpr, MERGE_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FROM_TASK: tl.constexpr, IN_REGISTERS: tl.constexpr, EARLY: tl.constexpr, LOOP: tl.constexpr, SEM: tl.constexpr,
    PROGRAMMATIC: tl.constexpr, BEFORE: tl.constexpr, IN_TURNS: tl.constexpr,
):  # fmt: skip
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    HALF: tl.constexpr = HEAD_DIM // 2
    QUANTISED: tl.constexpr = CODE_MAX > 0
    WIDTH: tl.constexpr = HALF if QUANTISED else HEAD_DIM
    task = tasks + (1 + number) * TASK
    row = tl.load(task).to(tl.int64)
    table_row = block_table + tl.load(task + 1).to(tl.int64) * table_stride
    begin, end = tl.load(task + 2), tl.load(task + 3)
    split, num_splits = tl.load(task + 4), tl.load(task + 5)
    slot = tl.load(task + 6).to(tl.int64)
    blocks = block_numbers(task, table_row, begin, end, BLOCK_SIZE, BLOCK_N, FROM_TASK)
    cosines = None
    if cos_sin is not None:
        cosines = cos_sin + row * cos_sin_stride
    has_new = slot >= 0
    if not IN_REGISTERS:
        if has_new:
            _write_new(
                k + row * k_stride_t, v + row * v_stride_t, cosines, k_norm, None, eps, k_cache, v_cache,
                k_scale, v_scale, slot, kv_head, k_stride_h, v_stride_h,
                NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, CODE_MAX, HEAD_DIM,
            )  # fmt: skip
        tl.debug_barrier()
    else:
        end -= has_new.to(tl.int32)
    n = tl.arange(0, BLOCK_N)
    if EARLY:
        keys, values, k_scales, v_scales = load_tile(
            k_cache, v_cache, k_scale, v_scale, blocks, begin, end, kv_head, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, WIDTH
        )
    if PROGRAMMATIC and BEFORE:
        wait_for_launches_before()

    # Queries, and what the sums begin with.
    m = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + m
    row_mask = m < GROUP
    d = tl.zeros([BLOCK_M, 1], tl.int32) + tl.arange(0, HALF)[None, :]
    q_first, q_second = turned_halves(
        q + row * q_stride_t + heads[:, None] * q_stride_n + d, row_mask[:, None] & (d >= 0), d, cosines, q_norm, eps,
        HALF,
    )  # fmt: skip
    factor = scale * LOG2_E
    if SOFT_CAP > 0:
        factor = SOFT_CAP * LOG2_E
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    largest = SMALLEST_UNIT
    if IN_REGISTERS:
        first_new = tl.where(has_new, 0, HEAD_DIM)  # no element is new where no key is
        new = d >= first_new
        once = (m == 0) & (m >= first_new)
        k_first, k_second = turned_halves(
            k + row * k_stride_t + kv_head * k_stride_h + d, new, d, cosines, k_norm, eps, HALF
        )
        target = (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        stored = new & once[:, None]
        v_new = v + row * v_stride_t + kv_head * v_stride_h
        if QUANTISED:
            k_codes = k_cache.to(tl.pointer_type(tl.int8 if CODE_MAX == 127 else tl.float8e4nv), bitcast=True)
            v_codes = v_cache.to(tl.pointer_type(tl.int8 if CODE_MAX == 127 else tl.float8e4nv), bitcast=True)
            x, y = k_first.to(tl.float32), k_second.to(tl.float32)
            x_largest, x_bad = _largest(x)
            y_largest, y_bad = _largest(y)
            bad = x_bad | y_bad
            inverse, new_scale = _factors(tl.maximum(x_largest, y_largest), bad, CODE_MAX)
            first_codes, second_codes = _codes(x, inverse, bad, CODE_MAX), _codes(y, inverse, bad, CODE_MAX)
            tl.store(k_codes + target * HEAD_DIM + d, first_codes, mask=stored)
            tl.store(k_codes + target * HEAD_DIM + HALF + d, second_codes, mask=stored)
            tl.store(k_scale + target + m * 0, new_scale, mask=once)
            products = q_first.to(tl.float32) * first_codes.to(tl.float32)
            products += q_second.to(tl.float32) * second_codes.to(tl.float32)
            score = tl.sum(products, 1) * new_scale
            even = tl.load(v_new + 2 * d, mask=new, other=0.0).to(tl.float32)
            odd = tl.load(v_new + 2 * d + 1, mask=new, other=0.0).to(tl.float32)
            x_largest, x_bad = _largest(even)
            y_largest, y_bad = _largest(odd)
            bad = x_bad | y_bad
            inverse, new_scale = _factors(tl.maximum(x_largest, y_largest), bad, CODE_MAX)
            even_codes, odd_codes = _codes(even, inverse, bad, CODE_MAX), _codes(odd, inverse, bad, CODE_MAX)
            tl.store(v_codes + target * HEAD_DIM + 2 * d, even_codes, mask=stored)
            tl.store(v_codes + target * HEAD_DIM + 2 * d + 1, odd_codes, mask=stored)
            tl.store(v_scale + target + m * 0, new_scale, mask=once)
            largest = tl.where(has_new, tl.maximum(SMALLEST_UNIT, tl.max(new_scale, 0)), SMALLEST_UNIT)
            unit_scale = (new_scale / largest)[:, None]
            acc_even = even_codes.to(tl.float32) * unit_scale
            acc_odd = odd_codes.to(tl.float32) * unit_scale
        else:
            tl.store(k_cache + target * HEAD_DIM + d, k_first, mask=stored)
            tl.store(k_cache + target * HEAD_DIM + HALF + d, k_second, mask=stored)
            score = tl.sum(q_first.to(tl.float32) * k_first.to(tl.float32)
                + q_second.to(tl.float32) * k_second.to(tl.float32), 1)  # fmt: skip
            wide = tl.zeros([BLOCK_M, 1], tl.int32) + tl.arange(0, HEAD_DIM)[None, :]
            value = tl.load(v_new + wide, mask=wide >= first_new, other=0.0)
            tl.store(v_cache + target * HEAD_DIM + wide, value, mask=once[:, None] & (wide >= 0))
            acc = value.to(tl.float32)
        if SOFT_CAP > 0:
            score = 1.0 - 2.0 / (1.0 + tl.exp2(score * (scale * (2.0 * LOG2_E / SOFT_CAP))))
        row_max = tl.where(has_new, score * factor, LOWEST)
        row_sum = tl.where(has_new, row_sum + 1.0, 0.0)
    else:
        acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
        acc_even = tl.zeros([BLOCK_M, HALF], tl.float32)
        acc_odd = tl.zeros([BLOCK_M, HALF], tl.float32)
    q_tile = joined(q_first, q_second)
    if QUANTISED:
        q_even, q_odd, unit = in_float16(q_tile)
    if not EARLY:
        keys, values, k_scales, v_scales = load_tile(
            k_cache, v_cache, k_scale, v_scale, blocks, begin, end, kv_head, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, WIDTH
        )
    last = begin + 1
    if LOOP:
        last = end
    if LOOP and begin + BLOCK_N < end:
        blocks = block_numbers(task, table_row, begin + BLOCK_N, end, BLOCK_SIZE, BLOCK_N, False)
    for start in tl.range(begin, last, BLOCK_N, num_stages=1):
        now_keys, now_values, now_k_scales, now_v_scales = keys, values, k_scales, v_scales
        if LOOP and start + BLOCK_N < end:
            keys, values, k_scales, v_scales = load_tile(
                k_cache, v_cache, k_scale, v_scale, blocks, start + BLOCK_N, end, kv_head, NUM_KV_HEADS, BLOCK_SIZE,
                BLOCK_N, WIDTH,
            )  # fmt: skip
            blocks = block_numbers(task, table_row, start + 2 * BLOCK_N, end, BLOCK_SIZE, BLOCK_N, False)
        if QUANTISED:
            acc_even, acc_odd, row_max, row_sum, largest = codes_step(
                q_even, q_odd, unit, now_keys, now_values, now_k_scales, now_v_scales, start + n < end, acc_even,
                acc_odd, row_max, row_sum, largest, factor, scale, CODE_MAX == 448, SOFT_CAP,
            )  # fmt: skip
        else:
            acc, row_max, row_sum = keys_step(
                q_tile, now_keys, now_values, start + n < end, acc, row_max, row_sum, factor, scale, SOFT_CAP
            )
    if QUANTISED:
        acc = tl.join(acc_even, acc_odd).reshape([BLOCK_M, HEAD_DIM]) * largest

    if num_splits == 1:
        store_whole(acc, row_max, row_sum, sinks, heads, row_mask, out + row * (NUM_HEADS * HEAD_DIM), HEAD_DIM)
    elif split < num_splits:  # else there is nothing to do
        places = tl.arange(0, HEAD_DIM)
        part = (row * NUM_HEADS + heads) * partial_rows + split
        tl.store(partial + part[:, None] * HEAD_DIM + places[None, :], acc, mask=row_mask[:, None])
        tl.store(partial_max + part, row_max, mask=row_mask)
        tl.store(partial_sum + part, row_sum, mask=row_mask)
        tl.debug_barrier()
        counter = counters + row * NUM_KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem=SEM, scope="gpu") == num_splits - 1:
            tl.store(counter, 0)
            if IN_TURNS:
                _merge_heads(
                    sinks, out, partial, partial_max, partial_sum, row, kv_head, num_splits, partial_rows,
                    GROUP, NUM_KV_HEADS, HEAD_DIM, MERGE_HEADS, MERGE_SPLITS, HEAD_DIM,
                )  # fmt: skip
            else:
                merge_at_once(
                    sinks, out, partial, partial_max, partial_sum, row, kv_head, num_splits, partial_rows,
                    GROUP, NUM_KV_HEADS, HEAD_DIM, MERGE_HEADS, MERGE_SPLITS,
                )  # fmt: skip


@triton.jit
def few_kernel(
    q, k, v, cos_sin, q_norm, k_norm, k_cache, v_cache, k_scale, v_scale,
    block_table, tasks, counters, sinks, out, partial, partial_max, partial_sum,
    eps, scale, partial_rows, table_stride, cos_sin_stride,
    q_stride_t, q_stride_n, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CODE_MAX: tl.constexpr, SOFT_CAP: tl.constexpr, MERGE_HEADS: tl.constexpr, MERGE_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FROM_TASK: tl.constexpr, IN_REGISTERS: tl.constexpr, EARLY: tl.constexpr, LOOP: tl.constexpr, SEM: tl.constexpr,
    PROGRAMMATIC: tl.constexpr, BEFORE: tl.constexpr, IN_TURNS: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """``BEFORE``: tasks and the first tile are asked for before the launch before has ended. Not LOOP: one tile a
    split, and no code for more. PERSISTENT: programs take tasks in turns; else there is one for each."""
    if PROGRAMMATIC and not BEFORE:
        wait_for_launches_before()
    if PERSISTENT:
        for number in range(tl.program_id(1), tl.load(tasks), tl.num_programs(1)):
            few_task(
                number, tl.program_id(0),
                q, k, v, cos_sin, q_norm, k_norm, k_cache, v_cache, k_scale, v_scale, block_table,
                tasks, counters, sinks, out, partial, partial_max, partial_sum, eps, scale,
                partial_rows, table_stride, cos_sin_stride, q_stride_t, q_stride_n, k_stride_t,
                k_stride_h, v_stride_t, v_stride_h, GROUP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
                CODE_MAX, SOFT_CAP, MERGE_HEADS, MERGE_SPLITS, BLOCK_M, BLOCK_N, FROM_TASK,
                IN_REGISTERS, EARLY, LOOP, SEM, PROGRAMMATIC, BEFORE, IN_TURNS,
            )  # fmt: skip
    else:
        few_task(
            tl.program_id(1), tl.program_id(0),
            q, k, v, cos_sin, q_norm, k_norm, k_cache, v_cache, k_scale, v_scale, block_table, tasks,
            counters, sinks, out, partial, partial_max, partial_sum, eps, scale, partial_rows,
            table_stride, cos_sin_stride, q_stride_t, q_stride_n, k_stride_t, k_stride_h, v_stride_t,
            v_stride_h, GROUP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, CODE_MAX, SOFT_CAP, MERGE_HEADS,
            MERGE_SPLITS, BLOCK_M, BLOCK_N, FROM_TASK, IN_REGISTERS, EARLY, LOOP, SEM, PROGRAMMATIC,
            BEFORE, IN_TURNS,
        )  # fmt: skip
