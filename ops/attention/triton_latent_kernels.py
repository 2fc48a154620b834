"""Latent attention in Triton: the loop over keys, the kernel of steps that are no decodes, and what joins splits.

``latent_attention.py`` says what is computed, ``triton_latent.py`` launches it. All query heads share a token's latent,
which is key and value: a tile has the heads of a token, or of some tokens, in its rows, and loads a latent once for
both products. The turned parts of keys are a product of their own, whose scores are added.

Codes become float16 four at a time, and so do queries, divided by the power of two of a row's largest element
(``triton_codes.py``). Scales multiply scores and weights. Weights are float16 there: they are divided by the largest
scale of what their row has seen, so that none is out of range and no row depends on keys that it does not see.
"""

import triton
import triton.language as tl

from compiled_llm.ops.attention.triton_codes import row_units
from compiled_llm.ops.attention.triton_kernels import (
    fold,
    load_rows,
    normalised,
    owner,
)
from compiled_llm.ops.attention.triton_prefill import dot, numbers
from compiled_llm.ops.attention.triton_softmax import (
    LOG2_E,
    LOWEST,
    SMALLEST_UNIT,
    keys_before,
    no_keys,
    seen_keys,
    weighed,
)

PARTITION = tl.constexpr(512)  # keys of an exact partition
GRAIN = tl.constexpr(64)  # keys, of which a split has a multiple
MERGED_AT_ONCE = tl.constexpr(8)  # splits whose loads are under way together


@triton.jit
def in_codes_dtype(q, k_scale):
    """Rows ``q`` as they multiply what a cache has: with codes in float16, and the power of two of each row."""
    unit = tl.full([q.shape[0]], 1.0, tl.float32)
    if k_scale is not None and q.dtype != tl.float32:
        inverse, unit = row_units(q.to(tl.float32))
        q = (q.to(tl.float32) * inverse[:, None]).to(tl.float16)
    return q, unit


@triton.jit
def attend_latents(
    q_latent, q_turned, visible, k_cache, v_cache, k_scale, v_scale, table_row, oldest, begin, end, scale,
    LATENT_DIM: tl.constexpr, TURNED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, nodes=None, context=0,
):  # fmt: skip
    """Softmax of rows over keys ``begin`` to ``end``: weighted sums, maxima (as exponents of two) and sums of weights.

    Row i sees the keys before ``visible[i]``, with a window the last ``WINDOW`` of them, and no key before ``oldest``
    is loaded; ``visible`` None says that every row sees all that are loaded. ``nodes`` and ``context`` are those of
    ``seen_keys``. No row's bits depend on keys that it does not see.
    """
    BLOCK_M: tl.constexpr = q_latent.shape[0]
    IN_FLOAT16: tl.constexpr = v_scale is not None and q_latent.dtype != tl.float32
    latent_dims = tl.arange(0, q_latent.shape[1])
    turned_dims = tl.arange(0, q_turned.shape[1])
    n = tl.arange(0, BLOCK_N)
    q_latent, latent_unit = in_codes_dtype(q_latent, v_scale)
    q_turned, turned_unit = in_codes_dtype(q_turned, k_scale)
    acc, row_max, row_sum = no_keys(BLOCK_M, q_latent.shape[1])
    largest = tl.full([BLOCK_M], SMALLEST_UNIT, tl.float32)  # scale that a row has met, by which its acc is divided
    factor = scale * LOG2_E
    # Block numbers are loaded one tile ahead: a load whose address comes from one of the same turn is pipelined less.
    blocks = tl.load(table_row + (begin + n) // BLOCK_SIZE, mask=begin + n < end, other=0)
    for first in range(begin, end, BLOCK_N):
        positions = first + n
        inside = positions < end
        if WINDOW > 0:
            inside = inside & (positions >= oldest)
        rows = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        following = positions + BLOCK_N
        blocks = tl.load(table_row + following // BLOCK_SIZE, mask=following < end, other=0)
        latents = load_rows(
            v_cache + rows[:, None] * LATENT_DIM + latent_dims[None, :], inside, latent_dims, True, LATENT_DIM
        )
        keys = load_rows(
            k_cache + rows[:, None] * TURNED_DIM + turned_dims[None, :], inside, turned_dims, True, TURNED_DIM
        )
        if v_scale is not None:
            latents = numbers(latents, q_latent.dtype)
            keys = numbers(keys, q_turned.dtype)
        zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if v_scale is None:
            scores = dot(q_turned, tl.trans(keys), dot(q_latent, tl.trans(latents), zeros))
        else:
            scores = dot(q_latent, tl.trans(latents), zeros)
            turned_scores = dot(q_turned, tl.trans(keys), zeros)
            scales = tl.load(v_scale + rows, mask=inside, other=0.0)
            turned_scales = tl.load(k_scale + rows, mask=inside, other=0.0)
            scores = tl.fma(
                scores * latent_unit[:, None], scales[None, :],
                turned_scores * turned_unit[:, None] * turned_scales[None, :],
            )  # fmt: skip
        seen = seen_keys(positions, inside, visible, WINDOW, nodes, context)
        scores = tl.where(seen, scores, float("-inf"))
        probs, decay, row_max, row_sum = weighed(scores, factor, row_max, row_sum)
        if v_scale is not None:
            weights = tl.where(seen, tl.broadcast_to(scales[None, :], [BLOCK_M, BLOCK_N]), 0.0)
            if IN_FLOAT16:
                new_largest = tl.maximum(largest, tl.max(weights, 1))
                decay *= largest / new_largest
                largest = new_largest
                weights = weights / new_largest[:, None]
            probs *= weights
        acc = dot(probs.to(q_latent.dtype), latents, acc * decay[:, None])
    if IN_FLOAT16:
        acc *= largest[:, None]
    return acc, row_max, row_sum


@triton.jit
def splits_of(
    seq_len, query_len, WINDOW: tl.constexpr, EXACT: tl.constexpr, SPLIT_ROWS: tl.constexpr, SPLIT_TOKENS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):  # fmt: skip
    """First key of the first split, keys of a split, and their number: functions of a request's own lengths.

    Requests of up to ``SPLIT_ROWS`` rows have splits: ``MOST_SPLITS`` at most of all rows together, or if EXACT one for
    each partition. Of the others there is one, of all keys. A request without keys has one, too.
    """
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - query_len + 1 - WINDOW, 0)
    if EXACT:
        first = first // PARTITION * PARTITION
        size = tl.where(query_len <= SPLIT_ROWS, PARTITION, tl.maximum(seq_len - first, 1))
    else:
        # A tensor, since the interpreter of Triton 3.8 cannot divide a constant by one.
        most = tl.full((), MOST_SPLITS, tl.int32) // tl.maximum(query_len, 1)
        most = tl.where(query_len <= SPLIT_ROWS, tl.maximum(most, 1), 1)
        size = tl.maximum(SPLIT_TOKENS, tl.cdiv(seq_len - first, most * GRAIN) * GRAIN)
    return first, size, tl.maximum(1, tl.cdiv(seq_len - first, size))


@triton.jit
def store_rows_or_states(
    acc, row_max, row_sum, rows, heads, mask, place, num_splits, out, partial, partial_max, partial_sum,
    NUM_HEADS: tl.constexpr, LATENT_DIM: tl.constexpr,
):  # fmt: skip
    """Outputs of rows and heads from all of their keys, or what ``place`` keeps of one of several splits."""
    dims = tl.arange(0, acc.shape[1])
    inside = mask[:, None] & (dims < LATENT_DIM)[None, :]
    if num_splits == 1:
        target = out + (rows * NUM_HEADS + heads)[:, None] * LATENT_DIM + dims[None, :]
        # Adding zero makes negative zeros positive: joining splits may turn one into the other.
        tl.store(target, (normalised(acc, row_sum) + 0.0).to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(partial + place[:, None] * LATENT_DIM + dims[None, :], acc, mask=inside)
        tl.store(partial_max + place, row_max, mask=mask)
        tl.store(partial_sum + place, row_sum, mask=mask)


@triton.jit
def latent_attention_kernel(
    q_latent, q_turned, k_cache, v_cache, k_scale, v_scale, block_table, query_start_loc, seq_lens, ancestors,
    row_splits, out, partial, partial_max, partial_sum,
    scale, num_requests, partial_rows, table_stride, latent_stride_t, latent_stride_n, turned_stride_t, turned_stride_n,
    SPLIT_ROWS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, MOST_SPLITS: tl.constexpr, EXACT: tl.constexpr,
    NUM_HEADS: tl.constexpr, LATENT_DIM: tl.constexpr, TURNED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """All requests. A task is ``BLOCK_G`` heads of ``BLOCK_M // BLOCK_G`` tokens of one, for one of its splits.

    Programs take turns, from the last task on: in a causal prompt the last tiles are the longest. Tasks over the same
    keys follow each other, so that they share the L2 cache. If EXACT a split is a partition of keys at absolute places,
    and a program that has all keys folds their states as the merge kernel does: operations and their order are the
    same, whoever folds.
    """
    HEAD_TILES: tl.constexpr = (NUM_HEADS + BLOCK_G - 1) // BLOCK_G
    BLOCK_Q: tl.constexpr = BLOCK_M // BLOCK_G
    requests = tl.arange(0, BLOCK_R)
    known = requests < num_requests
    first_rows = tl.load(query_start_loc + requests, mask=known, other=0)
    query_lens = tl.load(query_start_loc + requests + 1, mask=known, other=0) - first_rows
    lengths = tl.load(seq_lens + requests, mask=known, other=0)
    all_splits = splits_of(lengths, query_lens, WINDOW, EXACT, SPLIT_ROWS, SPLIT_TOKENS, MOST_SPLITS)[2]
    ends = tl.cumsum(tl.where(known, all_splits * tl.cdiv(query_lens, BLOCK_Q), 0), 0)
    num_tasks = tl.max(ends, 0) * HEAD_TILES
    m = tl.arange(0, BLOCK_M)
    latent_dims = tl.arange(0, BLOCK_C)
    turned_dims = tl.arange(0, BLOCK_H)
    for turn in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        task = num_tasks - 1 - turn
        head_tile = task % HEAD_TILES
        request, index = owner(ends, task // HEAD_TILES)
        seq_len = tl.load(seq_lens + request)
        first_row = tl.load(query_start_loc + request)
        query_len = tl.load(query_start_loc + request + 1) - first_row
        first_key, size, num_splits = splits_of(
            seq_len, query_len, WINDOW, EXACT, SPLIT_ROWS, SPLIT_TOKENS, MOST_SPLITS
        )  # fmt: skip
        num_tiles = tl.cdiv(query_len, BLOCK_Q)
        split = index // num_tiles
        first_token = index % num_tiles * BLOCK_Q
        tokens = first_token + m // BLOCK_G
        heads = head_tile * BLOCK_G + m % BLOCK_G
        row_mask = (heads < NUM_HEADS) & (tokens < query_len)
        rows = (first_row + tokens).to(tl.int64)
        latent_rows = q_latent + (rows * latent_stride_t + heads * latent_stride_n)[:, None] + latent_dims[None, :]
        turned_rows = q_turned + (rows * turned_stride_t + heads * turned_stride_n)[:, None] + turned_dims[None, :]
        latent_tile = load_rows(latent_rows, row_mask, latent_dims, True, LATENT_DIM)
        turned_tile = load_rows(turned_rows, row_mask, turned_dims, True, TURNED_DIM)

        # For a padding request (seq_len 0) begin and end are 0, so its rows are zero.
        context_len = tl.maximum(seq_len - query_len, 0)
        visible, nodes = keys_before(ancestors, rows, row_mask, context_len, tokens)
        oldest = 0
        if WINDOW > 0:
            before = context_len
            if ancestors is None:  # a tree's rows may stand before their slots
                before += first_token
            oldest = tl.maximum(before + 1 - WINDOW, 0)
        begin = first_key + split * size
        last = tl.minimum(context_len + first_token + BLOCK_Q, seq_len)
        end = tl.minimum(begin + size, last)
        table_row = block_table + request.to(tl.int64) * table_stride
        if EXACT:
            acc, row_max, row_sum = no_keys(BLOCK_M, BLOCK_C)
            begin = tl.maximum(begin, oldest // PARTITION * PARTITION)
            for part_begin in range(begin, end, PARTITION):
                part, part_max, part_sum = attend_latents(
                    latent_tile, turned_tile, visible, k_cache, v_cache, k_scale, v_scale, table_row, oldest,
                    part_begin, tl.minimum(part_begin + PARTITION, end), scale,
                    LATENT_DIM, TURNED_DIM, BLOCK_SIZE, WINDOW, BLOCK_N,
                )  # fmt: skip
                acc, row_max, row_sum = fold(acc, row_max, row_sum, part, part_max, part_sum)
        else:
            if WINDOW > 0:
                begin = tl.maximum(begin, oldest // BLOCK_N * BLOCK_N)
            acc, row_max, row_sum = attend_latents(
                latent_tile, turned_tile, visible, k_cache, v_cache, k_scale, v_scale, table_row, oldest,
                begin, end, scale, LATENT_DIM, TURNED_DIM, BLOCK_SIZE, WINDOW, BLOCK_N, nodes, context_len,
            )  # fmt: skip
        place = (request.to(tl.int64) * NUM_HEADS + heads) * partial_rows + tokens * num_splits + split
        store_rows_or_states(
            acc, row_max, row_sum, rows, heads, row_mask, place, num_splits, out, partial, partial_max, partial_sum,
            NUM_HEADS, LATENT_DIM,
        )  # fmt: skip
        if (num_splits > 1) & (split == 0):
            tl.store(row_splits + rows, num_splits + tl.zeros_like(m), mask=row_mask & (heads == 0))


@triton.jit
def latent_attention_merge_kernel(
    query_start_loc, row_splits, out, partial, partial_max, partial_sum, partial_rows,
    NUM_HEADS: tl.constexpr, LATENT_DIM: tl.constexpr, SPLIT_ROWS: tl.constexpr, EXACT: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Joins splits, one program for a request and a head; without ``query_start_loc`` a row is one.

    ``row_splits`` has the number of a row's splits. If EXACT they are folded one after another, else by weights that
    are known before, for up to ``SPLITS``.
    """
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first_row = request
    query_len = 1
    if query_start_loc is not None:
        first_row = tl.load(query_start_loc + request).to(tl.int64)
        query_len = tl.load(query_start_loc + request + 1) - first_row.to(tl.int32)
        query_len = tl.where(query_len <= SPLIT_ROWS, query_len, 0)
    dims = tl.arange(0, BLOCK_C)
    inside = dims < LATENT_DIM
    for token in range(0, query_len):
        num_splits = tl.load(row_splits + first_row + token)
        if num_splits > 1:
            places = (request * NUM_HEADS + head) * partial_rows + token * num_splits
            if EXACT:
                acc, row_max, row_sum = no_keys(1, BLOCK_C)
                for begin in range(0, num_splits, MERGED_AT_ONCE):
                    for i in tl.static_range(MERGED_AT_ONCE):
                        split = begin + i + tl.arange(0, 1)
                        known = split < num_splits
                        part = tl.load(
                            partial + (places + split)[:, None] * LATENT_DIM + dims[None, :],
                            mask=known[:, None] & inside[None, :], other=0.0,
                        )  # fmt: skip
                        part_max = tl.load(partial_max + places + split, mask=known, other=LOWEST)
                        part_sum = tl.load(partial_sum + places + split, mask=known, other=0.0)
                        acc, row_max, row_sum = fold(acc, row_max, row_sum, part, part_max, part_sum)
            else:
                splits = tl.arange(0, SPLITS)
                all_max = tl.load(partial_max + places + splits, mask=splits < num_splits, other=LOWEST)
                all_sums = tl.load(partial_sum + places + splits, mask=splits < num_splits, other=0.0)
                most = tl.max(all_max, 0)
                row_sum = tl.sum(tl.exp2(all_max - most) * all_sums, 0) + tl.zeros([1], tl.float32)
                total = tl.zeros([BLOCK_C], tl.float32)
                for begin in range(0, num_splits, MERGED_AT_ONCE):
                    split = begin + tl.arange(0, MERGED_AT_ONCE)
                    known = split < num_splits
                    parts = tl.load(
                        partial + (places + split)[:, None] * LATENT_DIM + dims[None, :],
                        mask=known[:, None] & inside[None, :], other=0.0,
                    )  # fmt: skip
                    part_max = tl.load(partial_max + places + split, mask=known, other=LOWEST)
                    total += tl.sum(parts * tl.exp2(part_max - most)[:, None], 0)
                acc = total[None, :]
            target = out + ((first_row + token) * NUM_HEADS + head) * LATENT_DIM + dims[None, :]
            tl.store(target, (normalised(acc, row_sum) + 0.0).to(out.dtype.element_ty), mask=inside[None, :])
