"""Paged attention on the GPU: Triton kernels and their launch. Semantics, schema and reference: ``attention.py``.

Four kernels, each a fixed grid that follows from shapes alone. Every length lives on the device, so a call can be
captured in a CUDA graph once and replayed with other lengths.

- write: this step's keys and values into the cache; zeros into the output rows that no request owns.
- decode: requests with one query row. The keys are cut into splits and a fixed number of programs works through all
  (request, split, KV head) tasks, so a long request among short ones spreads over the whole device, and a grid made
  for the longest possible context costs nothing when contexts are short.
- merge: joins the splits of a request. Skipped by requests of one split, not launched where no table row is longer.
- prefill: requests with several query rows, a tile of rows at a time. Only launched if ``max_query_len > 1``.

The query heads that share a KV head are packed into the rows of one ``tl.dot``: each key is loaded once for them all.

What a result depends on: a request's splits follow from its own length (``_split_tokens``), not from the batch, the
width of the table or the number of programs; a prefill tile starts at its request's first row and walks the keys from
position 0 in equal steps. So a request's output is bit for bit the same whatever stands beside it in the batch. Nor
does the walk of a row depend on the chunks a prompt came in, but for chunks of one token: those the decode kernel
serves. The price of splits of a fixed size is small, 1 to 6% more bytes for long requests in a batch that would have
filled the device without splitting.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton's interpreter computes garbage in a tl.dot of bfloat16 operands: there they are cast to float32 first.
INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
SPLIT_TOKENS = tl.constexpr(256)  # keys of one split of a decode ...
MAX_SPLITS = tl.constexpr(64)  # ... but for requests so long that they would have more splits than this
# Running maxima start here instead of at -inf: a row with no visible key then ends with sum 0, not NaN.
LOWEST = tl.constexpr(-1.0e30)
LOG2_E = 1.4426950408889634
# Said aloud, for Triton 3.10 will no longer fuse multiplications and additions by default.
OPTIONS = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class TileConfig:
    """Tile sizes of the two attention kernels; what a tuned table would hold."""

    decode_block_n: int
    decode_warps: int
    decode_stages: int
    decode_programs_per_sm: int
    prefill_block_m: int
    prefill_block_n: int
    prefill_warps: int
    prefill_stages: int


# By padded head_dim. Chosen to fit without spilling registers, as the test that compiles them ahead of time asserts;
# to be tuned. In the order of the fields: decode n, warps, stages, programs per SM; prefill m, n, warps, stages.
HOPPER_TILES = {
    64: TileConfig(64, 4, 3, 4, 128, 64, 8, 3),
    128: TileConfig(32, 4, 4, 4, 128, 64, 8, 3),
    256: TileConfig(32, 4, 3, 3, 128, 32, 8, 3),
}
OTHER_TILES = {  # at most 76 KB of shared memory: GPUs between the large ones have 99
    64: TileConfig(64, 4, 3, 4, 128, 64, 8, 3),
    128: TileConfig(32, 4, 3, 4, 128, 32, 8, 3),
    256: TileConfig(32, 4, 3, 2, 64, 32, 8, 2),
}
FLOAT32_TILES = {  # exact float32 has no tensor cores, and its operands sit in registers
    64: TileConfig(32, 4, 2, 4, 32, 32, 8, 1),
    128: TileConfig(32, 4, 2, 4, 32, 16, 8, 1),
    256: TileConfig(32, 8, 2, 2, 16, 32, 8, 1),
}


def tile_config(head_dim: int, element_size: int, capability: tuple[int, int]) -> TileConfig:
    if head_dim > 256:
        raise ValueError(f"head_dim {head_dim} is not supported by the GPU kernels: at most 256")
    tiles = FLOAT32_TILES if element_size == 4 else HOPPER_TILES if capability[0] == 9 else OTHER_TILES
    return tiles[max(64, triton.next_power_of_2(head_dim))]


@functools.cache
def _device_facts(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and number of SMs. On a CPU, where only the interpreter runs, one SM keeps tests short."""
    if device.type != "cuda":
        return (9, 0), 1
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


@triton.jit
def _write_kernel(
    k, v, k_cache, v_cache, slot_mapping, query_start_loc, out,
    num_requests, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """One program a token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    i = tl.arange(0, BLOCK_KV)
    head = i // HEAD_DIM
    dim = i % HEAD_DIM
    inside = i < NUM_KV_HEADS * HEAD_DIM
    new_k = tl.load(k + token * k_stride_t + head * k_stride_h + dim, mask=inside)
    new_v = tl.load(v + token * v_stride_t + head * v_stride_h + dim, mask=inside)
    block_start = (slot // BLOCK_SIZE) * (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM)
    target = block_start + (slot % BLOCK_SIZE) * HEAD_DIM + head * (BLOCK_SIZE * HEAD_DIM) + dim
    tl.store(k_cache + target, new_k, mask=inside)
    tl.store(v_cache + target, new_v, mask=inside)

    if token >= tl.load(query_start_loc + num_requests):
        j = tl.arange(0, BLOCK_OUT)
        zeros = tl.zeros([BLOCK_OUT], out.dtype.element_ty)
        tl.store(out + token * (NUM_HEADS * HEAD_DIM) + j, zeros, mask=j < NUM_HEADS * HEAD_DIM)


@triton.jit
def _split_tokens(seq_len):
    """Keys per split: a function of the request's own length alone, a multiple of every decode tile."""
    return tl.maximum(SPLIT_TOKENS, tl.cdiv(seq_len, MAX_SPLITS * 64) * 64)


@triton.jit
def _num_splits(seq_len):
    """At least 1: a padding request has one split with no keys, whose output is zero."""
    return tl.maximum(1, tl.cdiv(seq_len, _split_tokens(seq_len)))


@triton.jit
def _owner(ends, task):
    """The request that owns ``task``, and the task's index within it; ``ends`` are prefix sums of tasks a request."""
    before = ends <= task
    return tl.sum(before.to(tl.int32), 0), task - tl.max(tl.where(before, ends, 0), 0)


@triton.jit
def _load_rows(pointers, row_mask, dims, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rows of ``HEAD_DIM`` elements, zero where masked: stale cache memory may hold NaN and is never read."""
    if MASKED:
        return tl.load(pointers, mask=row_mask[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif dims.shape[0] == HEAD_DIM:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _dot(a, b):
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _attend(
    acc, row_max, row_sum, q, visible, k_head, v_head, table_row,
    begin, end, scale,
    MASKED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax of rows ``q`` over keys ``begin`` to ``end``; row i sees the keys before ``visible[i]``.

    Not MASKED promises that every row sees every key, in whole tiles.
    """
    dims = tl.arange(0, acc.shape[1])
    positions = begin + tl.arange(0, BLOCK_N)
    # Block numbers are loaded one tile ahead and carried: a load whose address comes from a load of the same
    # iteration is pipelined less deep.
    blocks = tl.load(table_row + positions // BLOCK_SIZE, mask=positions < end, other=0)
    for _ in range(begin, end, BLOCK_N):
        inside = positions < end
        block_start = blocks.to(tl.int64) * (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM)
        offsets = (block_start + (positions % BLOCK_SIZE) * HEAD_DIM)[:, None] + dims[None, :]
        next_positions = positions + BLOCK_N
        blocks = tl.load(table_row + next_positions // BLOCK_SIZE, mask=next_positions < end, other=0)

        keys = _load_rows(k_head + offsets, inside, dims, MASKED, HEAD_DIM)
        scores = _dot(q, tl.trans(keys))
        if MASKED:
            scores = tl.where(positions[None, :] < visible[:, None], scores, float("-inf"))
        # Maxima are kept scaled, which takes a positive scale and leaves one fused operation a score.
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        probs = tl.exp2(tl.fma(scores, scale, -new_max[:, None]))
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(probs, 1)
        values = _load_rows(v_head + offsets, inside, dims, MASKED, HEAD_DIM)
        acc = acc * decay[:, None] + _dot(probs.to(values.dtype), values)
        row_max = new_max
        positions = next_positions
    return acc, row_max, row_sum


@triton.jit
def _normalised(acc, row_sum):
    """Rows that saw no key are zero."""
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]


@triton.jit
def _decode_kernel(
    q, k_cache, v_cache, block_table, query_start_loc, seq_lens, out, partial, partial_max, partial_sum,
    scale, num_requests, table_splits, table_stride, q_stride_t, q_stride_n,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """All one-row requests. A task is one split of one request's keys for one KV head, programs take turns."""
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    requests = tl.arange(0, BLOCK_R)
    known = requests < num_requests
    first_rows = tl.load(query_start_loc + requests, mask=known, other=0)
    end_rows = tl.load(query_start_loc + requests + 1, mask=known, other=0)
    splits = _num_splits(tl.load(seq_lens + requests, mask=known, other=0))
    ends = tl.cumsum(tl.where(end_rows - first_rows == 1, splits, 0), 0)
    num_tasks = tl.max(ends, 0) * NUM_KV_HEADS

    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_H)
    row_mask = m < GROUP
    store_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        kv_head = task % NUM_KV_HEADS
        request, split = _owner(ends, task // NUM_KV_HEADS)
        seq_len = tl.load(seq_lens + request)
        token = tl.load(query_start_loc + request).to(tl.int64)
        heads = kv_head * GROUP + m
        q_rows = q + token * q_stride_t + heads[:, None] * q_stride_n + dims[None, :]

        begin = split * _split_tokens(seq_len)
        end = tl.minimum(begin + _split_tokens(seq_len), seq_len)
        q_tile = _load_rows(q_rows, row_mask, dims, True, HEAD_DIM)
        visible = tl.full([BLOCK_M], 1, tl.int32) * end
        k_head = k_cache + kv_head * (BLOCK_SIZE * HEAD_DIM)
        v_head = v_cache + kv_head * (BLOCK_SIZE * HEAD_DIM)
        table_row = block_table + request * table_stride
        acc = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
        row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q_tile, visible, k_head, v_head, table_row, begin, end, scale,
            True, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
        if _num_splits(seq_len) == 1:
            target = out + (token * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(target, _normalised(acc, row_sum).to(out.dtype.element_ty), mask=store_mask)
        else:
            part = (request.to(tl.int64) * NUM_HEADS + heads) * table_splits + split
            tl.store(partial + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=store_mask)
            tl.store(partial_max + part, row_max, mask=row_mask)
            tl.store(partial_sum + part, row_sum, mask=row_mask)


@triton.jit
def _merge_kernel(
    query_start_loc, seq_lens, out, partial, partial_max, partial_sum,
    table_splits,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program a request and head."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start_loc + request).to(tl.int64)
    query_len = tl.load(query_start_loc + request + 1) - token
    num_splits = _num_splits(tl.load(seq_lens + request))
    if query_len == 1 and num_splits > 1:
        splits = tl.arange(0, BLOCK_SPLITS)
        dims = tl.arange(0, BLOCK_H)
        known = splits < num_splits
        part = (request.to(tl.int64) * NUM_HEADS + head) * table_splits + splits
        split_max = tl.load(partial_max + part, mask=known, other=LOWEST)
        weight = tl.exp2(split_max - tl.max(split_max, 0))
        total = tl.sum(weight * tl.load(partial_sum + part, mask=known, other=0.0), 0)
        acc = _load_rows(partial + part[:, None] * HEAD_DIM + dims[None, :], known, dims, True, HEAD_DIM)
        merged = tl.sum(acc * weight[:, None], 0) / total
        target = out + (token * NUM_HEADS + head) * HEAD_DIM + dims
        tl.store(target, merged.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def _prefill_kernel(
    q, k_cache, v_cache, block_table, query_start_loc, seq_lens, out,
    scale, num_requests, table_stride, q_stride_t, q_stride_n,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """All requests of several rows. A program serves ``BLOCK_M // GROUP`` tokens of one request for one KV head."""
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    requests = tl.arange(0, BLOCK_R)
    known = requests < num_requests
    first_rows = tl.load(query_start_loc + requests, mask=known, other=0)
    query_lens = tl.load(query_start_loc + requests + 1, mask=known, other=0) - first_rows
    ends = tl.cumsum(tl.where(query_lens > 1, tl.cdiv(query_lens, BLOCK_Q), 0), 0)
    kv_head = tl.program_id(0)
    # Last tiles first: in a causal prompt they are the longest, and the short ones then fill the gaps at the end.
    task = tl.num_programs(1) - 1 - tl.program_id(1)
    if task < tl.max(ends, 0):
        request, tile = _owner(ends, task)
        seq_len = tl.load(seq_lens + request)
        first_row = tl.load(query_start_loc + request)
        query_len = tl.load(query_start_loc + request + 1) - first_row

        m = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_H)
        first_token = tile * BLOCK_Q
        tokens = first_token + m // GROUP
        heads = kv_head * GROUP + m % GROUP
        row_mask = (m < BLOCK_Q * GROUP) & (tokens < query_len)
        rows = (first_row + tokens).to(tl.int64)
        q_rows = q + (rows * q_stride_t + heads * q_stride_n)[:, None] + dims[None, :]
        q_tile = _load_rows(q_rows, row_mask, dims, True, HEAD_DIM)

        # A padding request (seq_len 0) sees nothing: begin and end are 0 then, and its rows are zero.
        context_len = tl.maximum(seq_len - query_len, 0)
        visible = context_len + tokens + 1
        end = tl.minimum(context_len + first_token + BLOCK_Q, seq_len)
        all_see = tl.minimum(context_len + first_token + 1, seq_len) // BLOCK_N * BLOCK_N
        k_head = k_cache + kv_head * (BLOCK_SIZE * HEAD_DIM)
        v_head = v_cache + kv_head * (BLOCK_SIZE * HEAD_DIM)
        table_row = block_table + request * table_stride
        acc = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
        row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q_tile, visible, k_head, v_head, table_row, 0, all_see, scale,
            False, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q_tile, visible, k_head, v_head, table_row, all_see, end, scale,
            True, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
        target = out + (rows * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
        store_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(target, _normalised(acc, row_sum).to(out.dtype.element_ty), mask=store_mask)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    max_query_len: int,
) -> Tensor:
    """``attention.paged_attention`` on CUDA tensors (on CPU tensors under Triton's interpreter). Never synchronises."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    num_requests, table_width = block_table.shape
    group = num_heads // num_kv_heads
    capability, num_sms = _device_facts(q.device)
    config = tile_config(head_dim, q.element_size(), capability)
    assert sm_scale > 0
    scale = sm_scale * LOG2_E  # softmax in powers of 2
    block_h = max(16, triton.next_power_of_2(head_dim))
    block_r = max(16, triton.next_power_of_2(num_requests))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)

    with torch.cuda.device_of(q):
        _write_kernel[(num_tokens,)](
            k, v, k_cache, v_cache, slot_mapping, query_start_loc, out, num_requests,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
            BLOCK_KV=triton.next_power_of_2(num_kv_heads * head_dim),
            BLOCK_OUT=triton.next_power_of_2(num_heads * head_dim), **OPTIONS,
        )  # fmt: skip

        # What two attention kernels share, in the order of their arguments.
        inputs = (q, k_cache, v_cache, block_table, query_start_loc, seq_lens, out)
        strides = (block_table.stride(0), q.stride(0), q.stride(1))
        shape = {
            "GROUP": group,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_R": block_r,
            "BLOCK_H": block_h,
            **OPTIONS,
        }

        table_splits = min(MAX_SPLITS.value, triton.cdiv(table_width * block_size, SPLIT_TOKENS.value))
        parts = (num_requests, num_heads, table_splits)
        partial = torch.empty((*parts, head_dim), dtype=torch.float32, device=q.device)
        partial_max, partial_sum = torch.empty((2, *parts), dtype=torch.float32, device=q.device)
        max_tasks = num_requests * table_splits * num_kv_heads
        _decode_kernel[(min(max_tasks, num_sms * config.decode_programs_per_sm),)](
            *inputs, partial, partial_max, partial_sum, scale, num_requests, table_splits, *strides, **shape,
            BLOCK_M=max(16, triton.next_power_of_2(group)),
            BLOCK_N=config.decode_block_n,
            num_warps=config.decode_warps,
            num_stages=config.decode_stages,
        )  # fmt: skip
        if table_splits > 1:
            _merge_kernel[(num_requests, num_heads)](
                query_start_loc, seq_lens, out, partial, partial_max, partial_sum, table_splits,
                NUM_HEADS=num_heads, HEAD_DIM=head_dim,
                BLOCK_SPLITS=triton.next_power_of_2(table_splits), BLOCK_H=block_h, **OPTIONS,
            )  # fmt: skip

        if max_query_len > 1 and num_tokens > 1:
            block_m = max(config.prefill_block_m, triton.next_power_of_2(group))
            max_tiles = num_tokens // (block_m // group) + min(num_requests, num_tokens // 2)
            _prefill_kernel[(num_kv_heads, max_tiles)](
                *inputs, scale, num_requests, *strides, **shape,
                BLOCK_M=block_m,
                BLOCK_N=config.prefill_block_n,
                num_warps=config.prefill_warps,
                num_stages=config.prefill_stages,
            )  # fmt: skip
    return out
