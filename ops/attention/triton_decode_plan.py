"""The plan of a decode on the GPU, see ``decode_plan.py``: its kernel and the launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.attention.decode_plan import num_counters
from compiled_llm.ops.attention.latent_tiles import latent_splits, latent_tiles
from compiled_llm.ops.attention.tiles import (
    SPLIT_GRAIN,
    TASK_COLUMNS,
    TileConfig,
    decode_splits,
    most_splits,
    tile_config,
)
from compiled_llm.ops.attention.triton_attention import device_facts

GRAIN = tl.constexpr(SPLIT_GRAIN)
TASK = tl.constexpr(TASK_COLUMNS)


@triton.jit
def plan_kernel(
    slot_mapping, table_rows, query_start_loc, seq_lens, tasks, counters, num_requests,
    WINDOW: tl.constexpr, SPLIT_TOKENS: tl.constexpr, MOST_SPLITS: tl.constexpr, ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program a request: its tasks come after those of all requests before it.

    Of a request alone there are tasks in all ``ROWS``, empty ones behind its own: its programs need not ask how many.
    """
    request = tl.program_id(0)
    requests = tl.arange(0, BLOCK_R)
    known = requests < num_requests
    starts = tl.load(query_start_loc + requests, mask=known, other=0)
    has_row = tl.load(query_start_loc + requests + 1, mask=known, other=0) > starts
    lengths = tl.where(has_row, tl.load(seq_lens + requests, mask=known, other=0), 0)
    first_keys = tl.zeros([BLOCK_R], tl.int32)
    if WINDOW > 0:
        first_keys = tl.maximum(lengths - WINDOW, 0)
    keys = tl.maximum(lengths - first_keys - 1, 0)  # that the cache has
    SLACK: tl.constexpr = SPLIT_TOKENS // (2 * GRAIN) * GRAIN
    counts = tl.minimum(tl.cdiv(tl.maximum(keys - SLACK, 1), SPLIT_TOKENS), MOST_SPLITS)
    sizes = tl.cdiv(tl.maximum(keys, 1), counts * GRAIN) * GRAIN
    counts = tl.where(known, tl.maximum(1, tl.cdiv(keys, sizes)), 0)
    is_mine = requests == request
    first_task = tl.sum(tl.where(requests < request, counts, 0), 0)
    seq_len = tl.sum(tl.where(is_mine, lengths, 0), 0)
    first_key = tl.sum(tl.where(is_mine, first_keys, 0), 0)
    size = tl.sum(tl.where(is_mine, sizes, 0), 0)
    count = tl.sum(tl.where(is_mine, counts, 0), 0)
    # Rows after those of requests go to the requests without one, in their order.
    num_rows = tl.load(query_start_loc + num_requests)
    before = tl.sum(tl.where(known & (requests < request) & (has_row == 0), 1, 0), 0)
    mine_has_row = tl.sum(tl.where(is_mine & has_row, 1, 0), 0)
    row = tl.where(mine_has_row > 0, tl.sum(tl.where(is_mine, starts, 0), 0), num_rows + before)
    table_row = request
    if table_rows is not None:
        table_row = tl.load(table_rows + request)

    splits = tl.arange(0, BLOCK_S)
    mine = splits < count
    begins = first_key + splits * size
    target = tasks + (1 + first_task + splits) * TASK
    slot = tl.load(slot_mapping + row)
    filled = splits < tl.where(num_requests == 1, ROWS, count)
    zeros = tl.zeros([BLOCK_S], tl.int32)
    tl.store(target, zeros + row, mask=filled)
    tl.store(target + 1, zeros + table_row, mask=filled)
    tl.store(target + 2, tl.where(mine, begins, 0), mask=filled)
    ends = tl.where(splits == count - 1, seq_len, begins + size)
    tl.store(target + 3, tl.where(mine, ends, 0), mask=filled)
    tl.store(target + 4, splits, mask=filled)
    tl.store(target + 5, tl.where(mine, count, 0), mask=filled)
    tl.store(target + 6, tl.where((splits == count - 1) & (seq_len > 0), slot, -1), mask=filled)
    if request == 0:
        tl.store(tasks, tl.sum(counts, 0))
    heads = tl.arange(0, BLOCK_K)
    tl.store(
        counters + request * NUM_KV_HEADS + heads, tl.zeros([BLOCK_K], tl.int32), mask=heads < NUM_KV_HEADS
    )  # fmt: skip


def decode_plan(
    slot_mapping: Tensor, table_rows: Tensor | None, query_start_loc: Tensor, seq_lens: Tensor, table_tokens: int,
    window: int, num_heads: int, head_dim: int, q_bytes: int, cache_bytes: int, latents: bool,
    tiles: TileConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op on CUDA tensors. Never waits for the GPU. ``tiles`` as for ``decode_attention``."""
    num_requests, device = len(seq_lens), seq_lens.device
    gpu, capability, num_sms = device_facts(device)
    if latents:
        tile = latent_tiles(head_dim, q_bytes, cache_bytes, capability).decode
        splits = latent_splits(tile, num_requests, num_heads, num_sms)
    else:
        tiles = tiles or tile_config(head_dim, q_bytes, cache_bytes, capability, gpu)
        splits = decode_splits(tiles, num_requests, num_heads, num_sms)
    most, num_counted = most_splits(table_tokens), num_counters(1, num_heads, latents)
    tasks = torch.empty(1 + num_requests * most, TASK_COLUMNS, dtype=torch.int32, device=device)
    counters = torch.empty(num_requests * num_counted, dtype=torch.int32, device=device)
    with torch.cuda.device_of(seq_lens):
        plan_kernel[(num_requests,)](
            slot_mapping, table_rows, query_start_loc, seq_lens, tasks, counters, num_requests,
            WINDOW=window, SPLIT_TOKENS=splits.tokens, MOST_SPLITS=splits.most, ROWS=most, NUM_KV_HEADS=num_counted,
            BLOCK_R=max(16, triton.next_power_of_2(num_requests)), BLOCK_S=triton.next_power_of_2(most),
            BLOCK_K=triton.next_power_of_2(num_counted), num_warps=1,
        )  # fmt: skip
    return tasks, counters
