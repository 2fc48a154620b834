"""Attention in Triton: split KV for few query rows, and what other kernels share with it.

``triton_attention.py`` says what each is for, and launches them.
"""

import triton
import triton.language as tl

from compiled_llm.ops.attention.triton_codes import attend_codes
from compiled_llm.ops.attention.triton_slots import load_blocks, rows_of
from compiled_llm.ops.attention.triton_softmax import (
    LOG2_E,
    LOWEST,
    SMALLEST_UNIT,
    capped,
    factor_of,
    keys_before,
    no_keys,
    seen_keys,
    weighed,
)

# Triton's interpreter computes garbage in a tl.dot of bfloat16 operands: there they are cast to float32 first.
INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
SHORT_QUERY = tl.constexpr(16)  # rows of a request that the split kernel serves at most
TREE_QUERY = tl.constexpr(64)  # the same where rows may be a tree
MAX_SPLITS = tl.constexpr(64)  # splits of a request of one row; its keys are cut coarser where they would be more
MIN_MAX_SPLITS = tl.constexpr(8)  # requests of q rows have MAX_SPLITS / q at most, but never fewer than this


@triton.jit
def _splits(seq_len, query_len, WINDOW: tl.constexpr, SPLIT_TOKENS: tl.constexpr):
    """First key that a request's rows see, keys of one split, number of splits: functions of its own lengths alone.

    A split has ``SPLIT_TOKENS`` keys at least.

    At least one split: a padding request has one with no keys, whose output is zero.
    """
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(seq_len - query_len + 1 - WINDOW, 0)
    keys = seq_len - first_key
    # A tensor, since the interpreter of Triton 3.8 cannot divide a constant by one.
    most = tl.maximum(tl.full((), MAX_SPLITS, tl.int32) // tl.maximum(query_len, 1), MIN_MAX_SPLITS)
    split_tokens = tl.maximum(SPLIT_TOKENS, tl.cdiv(keys, most * 64) * 64)
    return first_key, split_tokens, tl.maximum(1, tl.cdiv(keys, split_tokens))


@triton.jit
def owner(ends, task):
    """The request that owns ``task``, and the task's index within it; ``ends`` are prefix sums of tasks a request."""
    before = ends <= task
    return tl.sum(before.to(tl.int32), 0), task - tl.max(tl.where(before, ends, 0), 0)


@triton.jit
def load_rows(pointers, row_mask, dims, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rows of ``HEAD_DIM`` elements, zero where masked: stale cache memory may contain NaN and is never read."""
    if MASKED:
        return tl.load(pointers, mask=row_mask[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif dims.shape[0] == HEAD_DIM:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _load_scales(pointers, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def dot(a, b):
    """``b`` may have codes: they are converted to the dtype of ``a``, exactly."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b.to(a.dtype), input_precision="ieee")


@triton.jit
def attend(
    acc, row_max, row_sum, q, visible, k_cache, v_cache, k_scale, v_scale, table_row, kv_head,
    oldest, begin, end, scale,
    MASKED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr = False,
    ALIGNED: tl.constexpr = False, nodes=None, context=0,
):  # fmt: skip
    """Online softmax of rows ``q`` over keys ``begin`` to ``end``; row i sees the keys before ``visible[i]``.

    With a window only the last ``WINDOW`` of them, and no key before ``oldest`` is loaded. ``visible`` None says that
    every row sees all that are loaded; not MASKED that these are whole tiles besides. ALIGNED says that ``begin`` is a
    multiple of ``BLOCK_SIZE``. ``nodes`` and ``context`` are those of
    ``seen_keys``. EXACT promises that no row's bits depend on keys that it does not see.
    """
    dims = tl.arange(0, acc.shape[1])
    factor = factor_of(scale, SOFT_CAP)
    # Block numbers are loaded one tile ahead and carried: a load whose address comes from a load of the same
    # iteration is pipelined less deep.
    blocks = load_blocks(table_row, begin, end, BLOCK_SIZE, BLOCK_N, ALIGNED)
    # In 16 bits the second product over codes is one of float16, which has every code and rounds the weights finer
    # than bfloat16. Its range is small, so weights are divided by the largest scale met so far, the unit of acc. That
    # may be the scale of a key that a row does not see, so if EXACT the product is one of bfloat16, for its range.
    IN_16_BITS: tl.constexpr = v_scale is not None and q.dtype != tl.float32
    IN_FLOAT16: tl.constexpr = IN_16_BITS and not EXACT
    largest = SMALLEST_UNIT
    if IN_FLOAT16:
        acc = acc / largest
    for first in range(begin, end, BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        inside = positions < end
        if WINDOW > 0:
            inside = inside & (positions >= oldest)
        starts, places = rows_of(blocks, first, kv_head, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, ALIGNED)
        offsets = places[:, None] * HEAD_DIM + dims[None, :]
        blocks = load_blocks(table_row, first + BLOCK_N, end, BLOCK_SIZE, BLOCK_N, ALIGNED)

        keys = load_rows(k_cache + starts[:, None] * HEAD_DIM + offsets, inside, dims, MASKED, HEAD_DIM)
        scores = dot(q, tl.trans(keys))
        if k_scale is not None:
            scores *= _load_scales(k_scale + starts + places, inside, MASKED)[None, :]
        scores = capped(scores, scale, SOFT_CAP)
        if MASKED:
            scores = tl.where(seen_keys(positions, inside, visible, WINDOW, nodes, context), scores, float("-inf"))
        probs, decay, row_max, row_sum = weighed(scores, factor, row_max, row_sum)

        values = load_rows(v_cache + starts[:, None] * HEAD_DIM + offsets, inside, dims, MASKED, HEAD_DIM)
        if v_scale is None:
            acc = acc * decay[:, None] + dot(probs.to(q.dtype), values)
        else:
            scales = _load_scales(v_scale + starts + places, inside, MASKED)
            if IN_FLOAT16:
                new_largest = tl.maximum(largest, tl.max(scales, 0))
                weights = (probs * (scales / new_largest)[None, :]).to(tl.float16)
                decay *= largest / new_largest
                largest = new_largest
            else:
                weights = probs * scales[None, :]
            if IN_16_BITS and EXACT:
                high = weights.to(tl.bfloat16)
                acc = acc * decay[:, None] + dot(high, values)
                if q.dtype == tl.float16:  # whose digits bfloat16 has in two numbers
                    acc += dot((weights - high.to(tl.float32)).to(tl.bfloat16), values)
            else:
                acc = acc * decay[:, None] + dot(weights, values)
    if IN_FLOAT16:
        acc = acc * largest
    return acc, row_max, row_sum


@triton.jit
def fold(acc, row_max, row_sum, part, part_max, part_sum):
    """The state of rows after one more partition; that of a row which sees none of its keys stays."""
    new_max = tl.maximum(row_max, part_max)
    keep, add = tl.exp2(row_max - new_max), tl.exp2(part_max - new_max)
    return acc * keep[:, None] + part * add[:, None], new_max, row_sum * keep + part_sum * add


@triton.jit
def add_sinks(row_max, row_sum, sinks, heads, row_mask):
    """Sums of the softmax with the sinks in them; a sink far above every score makes its sum infinite, the output 0."""
    if sinks is not None:
        row_sum += tl.exp2(tl.load(sinks + heads, mask=row_mask, other=0.0) * LOG2_E - row_max)
    return row_sum


@triton.jit
def normalised(acc, row_sum):
    """Rows that saw no key are zero."""
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]


@triton.jit
def store_whole(acc, row_max, row_sum, sinks, heads, row_mask, out, HEAD_DIM: tl.constexpr):
    """The outputs of a token's ``heads`` from all of their keys."""
    dims = tl.arange(0, acc.shape[1])
    row_sum = add_sinks(row_max, row_sum, sinks, heads, row_mask)
    mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    target = out + heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, normalised(acc, row_sum).to(out.dtype.element_ty), mask=mask)


@triton.jit
def merge(
    sinks, out, partial, partial_max, partial_sum, request, kv_head, first_row, first_token, num_rows, num_splits,
    partial_rows,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    MERGE_SPLITS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Joins the splits of the ``num_rows`` rows of a tile: row by row, ``MERGE_SPLITS`` at once and in their order.

    A row's splits lie side by side, so one address serves many loads: several rows at once, whose number of heads need
    not be a power of two, take some 70 registers more.
    """
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    dims = tl.arange(0, BLOCK_H)
    inside = dims < HEAD_DIM
    turns = tl.cdiv(num_splits, MERGE_SPLITS)  # of a row
    acc = tl.zeros([BLOCK_H], tl.float32)
    row_max = LOWEST
    row_sum = 0.0
    # Not fetched ahead (num_stages): on sm_90 that takes 40 registers, and a program of each SM.
    for turn in tl.range(0, num_rows * turns, num_stages=1):
        m = turn // turns
        token = first_token + m // GROUP
        head = kv_head * GROUP + m % GROUP
        first_split = turn % turns * MERGE_SPLITS
        splits = tl.arange(0, MERGE_SPLITS)
        known = splits < num_splits - first_split
        # What differs from split to split are constants, so that one address serves them all. From the L2 cache, which
        # all programs write to: that of this SM may have older bytes.
        part = (request.to(tl.int64) * NUM_HEADS + head) * partial_rows + token * num_splits + first_split
        split_max = tl.load(partial_max + part + splits, mask=known, other=LOWEST, cache_modifier=".cg")
        split_sum = tl.load(partial_sum + part + splits, mask=known, other=0.0, cache_modifier=".cg")
        split_acc = tl.load(
            partial + part * HEAD_DIM + (splits[:, None] * HEAD_DIM + dims[None, :]),
            mask=known[:, None] & inside[None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        if first_split == 0:
            acc = tl.zeros([BLOCK_H], tl.float32)
            row_max = LOWEST
            row_sum = 0.0
        new_max = tl.maximum(row_max, tl.max(split_max, 0))
        decay = tl.exp2(row_max - new_max)
        weight = tl.exp2(split_max - new_max)
        row_sum = row_sum * decay + tl.sum(weight * split_sum, 0)
        acc = acc * decay + tl.sum(split_acc * weight[:, None], 0)
        row_max = new_max
        if first_split + MERGE_SPLITS >= num_splits:
            total = add_sinks(row_max, row_sum, sinks, head, m < num_rows)
            target = out + ((first_row + token).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dims
            result = acc / tl.where(total == 0.0, 1.0, total)
            tl.store(target, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def split_kernel(
    q, k_cache, v_cache, k_scale, v_scale, block_table, query_start_loc, seq_lens, sinks, out,
    ancestors, partial, partial_max, partial_sum, counters,
    scale, num_requests, partial_rows, counter_rows, table_stride, q_stride_t, q_stride_n,
    MIN_QUERY: tl.constexpr, MAX_QUERY: tl.constexpr, SPLIT_TOKENS: tl.constexpr, IS_FP8: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """All requests of ``MIN_QUERY`` to ``MAX_QUERY`` rows.

    A task is one split of one request's keys for one tile of ``BLOCK_M // BLOCK_G`` tokens and one KV head; programs
    take turns. Tasks over the same keys follow each other, so that they share the L2 cache. The program that finishes
    the last split of a tile joins them all, in their order: so it does not matter which program that is.
    ``counters``, zero before the launch, tell it; there are ``counter_rows`` for each request and KV head.

    The heads of a token take ``BLOCK_G`` rows, a power of two: divisions by others take 40 registers.

    Where queries are of 16 bits, a quantised cache comes as int16, two codes each; ``IS_FP8`` says of which kind.
    """
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    BLOCK_Q: tl.constexpr = BLOCK_M // BLOCK_G
    requests = tl.arange(0, BLOCK_R)
    known = requests < num_requests
    first_rows = tl.load(query_start_loc + requests, mask=known, other=0)
    query_lens = tl.load(query_start_loc + requests + 1, mask=known, other=0) - first_rows
    all_splits = _splits(tl.load(seq_lens + requests, mask=known, other=0), query_lens, WINDOW, SPLIT_TOKENS)[2]
    ours = (query_lens >= MIN_QUERY) & (query_lens <= MAX_QUERY)
    ends = tl.cumsum(tl.where(ours, all_splits * tl.cdiv(query_lens, BLOCK_Q), 0), 0)
    num_tasks = tl.max(ends, 0) * NUM_KV_HEADS

    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_H)
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        kv_head = task % NUM_KV_HEADS
        request, index = owner(ends, task // NUM_KV_HEADS)
        seq_len = tl.load(seq_lens + request)
        first_row = tl.load(query_start_loc + request)
        query_len = tl.load(query_start_loc + request + 1) - first_row
        num_tiles = tl.cdiv(query_len, BLOCK_Q)
        first_key, split_tokens, num_splits = _splits(seq_len, query_len, WINDOW, SPLIT_TOKENS)
        split = index // num_tiles

        first_token = index % num_tiles * BLOCK_Q
        tokens = first_token + m // BLOCK_G
        heads = kv_head * GROUP + m % BLOCK_G
        row_mask = (m % BLOCK_G < GROUP) & (tokens < query_len)
        rows = (first_row + tokens).to(tl.int64)
        q_rows = q + (rows * q_stride_t + heads * q_stride_n)[:, None] + dims[None, :]
        q_tile = load_rows(q_rows, row_mask, dims, True, HEAD_DIM)

        # For a padding request (seq_len 0) begin and end are 0, so its rows are zero.
        context_len = tl.maximum(seq_len - query_len, 0)
        begin = first_key + split * split_tokens
        end = tl.minimum(tl.minimum(begin + split_tokens, seq_len), context_len + first_token + BLOCK_Q)
        table_row = block_table + request * table_stride
        visible, nodes = keys_before(ancestors, rows, row_mask, context_len, tokens)
        if k_cache.dtype.element_ty == tl.int16:
            acc, row_max, row_sum = attend_codes(
                q_tile, visible, k_cache, v_cache, k_scale, v_scale, table_row, kv_head,
                begin, begin, end, scale,
                IS_FP8, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, BLOCK_N, WINDOW == 0, nodes, context_len,
            )  # fmt: skip
        else:
            acc, row_max, row_sum = no_keys(BLOCK_M, BLOCK_H)
            acc, row_max, row_sum = attend(
                acc, row_max, row_sum, q_tile, visible, k_cache, v_cache, k_scale, v_scale,
                table_row, kv_head, begin, begin, end, scale,
                True, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, BLOCK_N, False, WINDOW == 0,
                nodes, context_len,
            )  # fmt: skip
        store_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
        if num_splits == 1:
            row_sum = add_sinks(row_max, row_sum, sinks, heads, row_mask)
            target = out + (rows * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(target, normalised(acc, row_sum).to(out.dtype.element_ty), mask=store_mask)
        else:
            part = (request.to(tl.int64) * NUM_HEADS + heads) * partial_rows + tokens * num_splits + split
            tl.store(partial + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=store_mask)
            tl.store(partial_max + part, row_max, mask=row_mask)
            tl.store(partial_sum + part, row_sum, mask=row_mask)
            # All threads have stored before one of them counts, with a release of what was stored and an acquire of
            # what others released; and all threads wait for its answer.
            tl.debug_barrier()
            counter = counters + (request * NUM_KV_HEADS + kv_head) * counter_rows + index % num_tiles
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                num_rows = tl.minimum(BLOCK_Q, query_len - first_token) * GROUP
                merge(
                    sinks, out, partial, partial_max, partial_sum, request, kv_head, first_row, first_token, num_rows,
                    num_splits, partial_rows, GROUP, NUM_KV_HEADS, HEAD_DIM, MERGE_SPLITS, BLOCK_H,
                )  # fmt: skip
