"""Paged attention on the GPU where a row's bits depend on its own query and keys alone: kernels and launch.

``paged_attention.py`` says what is computed, ``triton_attention.py`` how it is computed where speed comes first. There
a decode's row and the same row in a prompt's chunk have other tiles, other splits and other instructions. Here:

- The keys are cut into partitions of ``PARTITION`` at absolute positions. Within one, a row's softmax starts anew and
  takes tiles of keys in their order. Tiles have the same number of rows and keys and the same warps in every launch on
  a GPU, so that products and sums have one instruction and one layout.
- The states of the partitions are folded one after another, from the first. For requests of few rows each partition is
  a task of its own, which spreads over the GPU, and the merge kernel folds what the tasks have stored; for the others a
  program takes all partitions and folds them in registers. ``fold`` is the same code, each operation rounded by itself
  (``enable_fp_fusion=False``), so it does not matter who folds.
- Keys that a row does not see, because they are later or out of its window, leave its state as it is: they weigh 0 and
  are not above the maximum. So the other rows of a tile and the length of a chunk do not matter either.

What it costs against the other kernels: a decode's tile has 64 rows for the few heads of a KV head, which takes about a
third of the tensor cores' time while it waits for memory; a prompt's has 64 rows instead of 128, and masks every tile.

Memory: the states of decodes take ``R * N * (H + 2)`` float32 for each 256 tokens of the table's width.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.attention import kv_quant, triton_attention
from compiled_llm.ops.attention.tiles import exact_tile
from compiled_llm.ops.attention.triton_attention import Turn, device_facts, write_new_rows
from compiled_llm.ops.attention.triton_kernels import (
    SHORT_QUERY,
    add_sinks,
    attend,
    fold,
    load_rows,
    normalised,
    owner,
)
from compiled_llm.ops.attention.triton_softmax import LOWEST, no_keys

PARTITION = tl.constexpr(256)  # keys
MERGED_AT_ONCE = tl.constexpr(8)  # partitions whose loads are under way together
OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def _partitions(seq_len, query_len, WINDOW: tl.constexpr):
    """The first partition that some row of a request sees, and the end of them. At least one: padding has an empty."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - query_len + 1 - WINDOW, 0) // PARTITION
    return first, tl.maximum(tl.cdiv(seq_len, PARTITION), first + 1)


@triton.jit
def _store(target, acc, row_max, row_sum, sinks, heads, row_mask, mask):
    row_sum = add_sinks(row_max, row_sum, sinks, heads, row_mask)
    # Adding zero makes negative zeros positive: a fold may turn one into the other.
    tl.store(target, (normalised(acc, row_sum) + 0.0).to(target.dtype.element_ty), mask=mask)


@triton.jit
def exact_attention_kernel(
    q, k_cache, v_cache, k_scale, v_scale, block_table, query_start_loc, seq_lens, sinks, out,
    partial, partial_max, partial_sum,
    scale, num_requests, partial_rows, table_stride, q_stride_t, q_stride_n,
    MIN_QUERY: tl.constexpr, MAX_QUERY: tl.constexpr, WHOLE: tl.constexpr,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """All requests of ``MIN_QUERY`` to ``MAX_QUERY`` rows.

    A task is a tile of ``BLOCK_M // GROUP`` tokens of one request for one KV head: all its partitions if WHOLE, else
    one of them. Programs take turns, from the last task on: in a causal prompt the last tiles are the longest.
    """
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    requests = tl.arange(0, BLOCK_R)
    known = requests < num_requests
    first_rows = tl.load(query_start_loc + requests, mask=known, other=0)
    query_lens = tl.load(query_start_loc + requests + 1, mask=known, other=0) - first_rows
    tiles = tl.cdiv(query_lens, BLOCK_Q)
    if not WHOLE:
        all_first, all_end = _partitions(tl.load(seq_lens + requests, mask=known, other=0), query_lens, WINDOW)
        tiles *= all_end - all_first
    ours = (query_lens >= MIN_QUERY) & (query_lens <= MAX_QUERY)
    ends = tl.cumsum(tl.where(ours, tiles, 0), 0)
    num_tasks = tl.max(ends, 0) * NUM_KV_HEADS

    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_H)
    for turn in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        task = num_tasks - 1 - turn
        kv_head = task % NUM_KV_HEADS
        request, index = owner(ends, task // NUM_KV_HEADS)
        seq_len = tl.load(seq_lens + request)
        first_row = tl.load(query_start_loc + request)
        query_len = tl.load(query_start_loc + request + 1) - first_row
        num_tiles = tl.cdiv(query_len, BLOCK_Q)

        first_token = index % num_tiles * BLOCK_Q
        tokens = first_token + m // GROUP
        heads = kv_head * GROUP + m % GROUP
        row_mask = (m < BLOCK_Q * GROUP) & (tokens < query_len)
        rows = (first_row + tokens).to(tl.int64)
        q_rows = q + (rows * q_stride_t + heads * q_stride_n)[:, None] + dims[None, :]
        q_tile = load_rows(q_rows, row_mask, dims, True, HEAD_DIM)

        # For a padding request (seq_len 0) end is 0, so its rows are zero.
        context_len = tl.maximum(seq_len - query_len, 0)
        end = tl.minimum(context_len + first_token + BLOCK_Q, seq_len)
        oldest = 0
        if WINDOW > 0:
            oldest = tl.maximum(context_len + first_token + 1 - WINDOW, 0)
        first_part, end_part = _partitions(seq_len, query_len, WINDOW)
        num_parts = end_part - first_part
        of_task = first_part + index // num_tiles
        from_part, to_part = of_task, of_task + 1
        if WHOLE:
            from_part, to_part = oldest // PARTITION, tl.cdiv(end, PARTITION)

        total, total_max, total_sum = no_keys(BLOCK_M, BLOCK_H)
        for part in range(from_part, to_part):
            acc, row_max, row_sum = no_keys(BLOCK_M, BLOCK_H)
            acc, row_max, row_sum = attend(
                acc, row_max, row_sum, q_tile, context_len + tokens + 1, k_cache, v_cache, k_scale, v_scale,
                block_table + request * table_stride, kv_head,
                oldest, part * PARTITION, tl.minimum((part + 1) * PARTITION, end), scale,
                True, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, BLOCK_N, True,
            )  # fmt: skip
            total, total_max, total_sum = fold(total, total_max, total_sum, acc, row_max, row_sum)

        store_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
        target = out + (rows * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
        if WHOLE or num_parts == 1:
            _store(target, total, total_max, total_sum, sinks, heads, row_mask, store_mask)
        else:
            place = (request.to(tl.int64) * NUM_HEADS + heads) * partial_rows + tokens * num_parts + index // num_tiles
            tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], total, mask=store_mask)
            tl.store(partial_max + place, total_max, mask=row_mask)
            tl.store(partial_sum + place, total_sum, mask=row_mask)


@triton.jit
def exact_merge_kernel(
    query_start_loc, seq_lens, sinks, out, partial, partial_max, partial_sum, partial_rows,
    MAX_QUERY: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Folds the partitions. Programs of one request and head take turns at its tokens."""
    request = tl.program_id(0)
    head = tl.program_id(1) + tl.arange(0, 1)
    first_row = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first_row
    first_part, end_part = _partitions(tl.load(seq_lens + request), query_len, WINDOW)
    num_parts = end_part - first_part
    if query_len <= MAX_QUERY and num_parts > 1:
        dims = tl.arange(0, BLOCK_H)
        inside = (dims < HEAD_DIM)[None, :]
        for token in range(tl.program_id(2), query_len, tl.num_programs(2)):
            first = (request.to(tl.int64) * NUM_HEADS + head) * partial_rows + token * num_parts
            total, total_max, total_sum = no_keys(1, BLOCK_H)
            for begin in range(0, num_parts, MERGED_AT_ONCE):
                for i in tl.static_range(MERGED_AT_ONCE):
                    index = begin + i + tl.arange(0, 1)
                    known = index < num_parts
                    place = first + index
                    acc = tl.load(
                        partial + place[:, None] * HEAD_DIM + dims[None, :], mask=known[:, None] & inside, other=0.0
                    )
                    part_max = tl.load(partial_max + place, mask=known, other=LOWEST)
                    part_sum = tl.load(partial_sum + place, mask=known, other=0.0)
                    total, total_max, total_sum = fold(total, total_max, total_sum, acc, part_max, part_sum)
            target = out + ((first_row + token).to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
            _store(target, total, total_max, total_sum, sinks, head, head < NUM_HEADS, inside)


def paged_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
    v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    sinks: Tensor | None, sm_scale: float, max_query_len: int, window: int, soft_cap: float,
    ancestors: Tensor | None = None, turn: Turn | None = None,
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    With ``turn``, ``q`` is where turned queries go, and ``k`` is still to be turned.
    """
    if ancestors is not None:
        raise ValueError("paged_attention_exact: ancestors must be None on a GPU: keys of a path lie apart there")
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    num_requests, table_width = block_table.shape
    group = num_heads // num_kv_heads
    _, capability, num_sms = device_facts(q.device)
    kv_quant.check_capability(k_cache.dtype, capability)
    tile = exact_tile(head_dim, q.element_size(), k_cache.element_size())
    block_m = max(tile.m, triton.next_power_of_2(group))
    block_h = max(16, triton.next_power_of_2(head_dim))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)

    # Requests of more rows than `split_rows` take all their partitions one after another.
    split_rows = max(1, max_query_len) if max_query_len <= SHORT_QUERY.value else 1
    table_parts = triton.cdiv(table_width * block_size, PARTITION.value)
    if window > 0:
        table_parts = min(table_parts, (window + split_rows - 2) // PARTITION.value + 2)
    split_tasks = num_requests * table_parts * triton.cdiv(split_rows, block_m // group)
    parts = (num_requests, num_heads, split_rows * table_parts)
    with torch.cuda.device_of(q):
        write_new_rows(k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, query_start_loc, out, None, turn)
        partial = torch.empty((*parts, head_dim), dtype=torch.float32, device=q.device)
        partial_max, partial_sum = torch.empty((2, *parts), dtype=torch.float32, device=q.device)
        launches = [(1, split_rows, False, min(split_tasks * num_kv_heads, num_sms * tile.programs_per_sm))]
        if min(max_query_len, num_tokens) > split_rows:
            most_tiles = num_tokens // (block_m // group) + min(num_requests, num_tokens // (split_rows + 1))
            launches.append((split_rows + 1, num_tokens, True, most_tiles * num_kv_heads))
        for min_query, max_query, whole, programs in launches:
            exact_attention_kernel[(programs,)](
                q, k_cache, v_cache, k_scale, v_scale, block_table, query_start_loc, seq_lens, sinks, out,
                partial, partial_max, partial_sum,
                sm_scale, num_requests, parts[2], block_table.stride(0), q.stride(0), q.stride(1),
                MIN_QUERY=min_query, MAX_QUERY=max_query, WHOLE=whole,
                GROUP=group, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
                WINDOW=window, SOFT_CAP=soft_cap,
                BLOCK_R=max(16, triton.next_power_of_2(num_requests)),
                BLOCK_M=block_m, BLOCK_N=tile.n, BLOCK_H=block_h,
                num_warps=tile.warps, num_stages=tile.stages, **OPTIONS,
            )  # fmt: skip
        if table_parts > 1:
            exact_merge_kernel[(num_requests, num_heads, split_rows)](
                query_start_loc, seq_lens, sinks, out, partial, partial_max, partial_sum, parts[2],
                MAX_QUERY=split_rows, NUM_HEADS=num_heads, HEAD_DIM=head_dim, WINDOW=window, BLOCK_H=block_h, **OPTIONS,
            )  # fmt: skip
    return out


rotary_attention = functools.partial(triton_attention.rotary_attention, attention=paged_attention)
