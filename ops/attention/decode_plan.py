"""What the programs of a decode's attention on a GPU work on: reference, schema, registration.

A decode has one query a request. Which request and which of its keys a program takes follows from lengths that only the
device knows, and is the same in all layers of a kind: so it is found once a step, by one launch before the layers.

The result is ``tasks``, int32 ``[1 + R * most_splits, TASK_COLUMNS]``, and ``counters``, int32 ``[R * K]``, zeros. The
first row of ``tasks`` begins with the number of tasks, which follow:

    row, table row, begin, end, split, number of splits, slot

That is: attend with query ``row`` over the keys from ``begin`` to ``end`` of the request whose blocks are in
``table_row`` of the block table; they are one of the splits of its keys. ``slot`` is where the new key and value go
if these are among them, else -1. Rows without a request have one task without keys: their output is zero.

Splits are of the keys that the cache has, and the last one has the new key besides: else that would be a split of its
own where those before it are full. They are alike, of ``Splits.tokens`` or up to half as many more: a few keys beyond
would be a split that costs as much as a long one, and is joined (on an H200, 32 requests of 1,034 keys: 46 us for 38).
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.ops.attention.latent_tiles import latent_splits, latent_tiles
from compiled_llm.ops.attention.tiles import SPLIT_GRAIN, TASK_COLUMNS, Splits, decode_splits, most_splits, tile_config
from compiled_llm.ops.library import define_op, on_gpu


class DecodePlan(NamedTuple):
    """Of the layers that have the same window and block table."""

    block_table: Tensor  # [A, M] int32: of all requests, or of those of the step
    tasks: Tensor
    counters: Tensor  # attention counts in them, and leaves zeros


def decode_plan(
    slot_mapping: Tensor, block_table: Tensor, table_rows: Tensor | None, query_start_loc: Tensor, seq_lens: Tensor, *,
    block_size: int, window: int, num_heads: int, head_dim: int, q_bytes: int, cache_bytes: int, latents: bool = False,
) -> DecodePlan:  # fmt: skip
    """Letters as in ``paged_attention``; T is R, and no request has more than one row.

    Args:
        block_table: ``[A, M]`` int32, contiguous.
        table_rows: ``[R]`` int32, where the requests' rows of ``block_table`` are; None: in their order.
        num_heads: of keys, the most that a layer has; of queries if keys are latents.
        head_dim, q_bytes, cache_bytes: of the layers (of an element, the last two); by them splits are chosen.
        latents: for latent attention, whose splits follow from sizes of their own and which counts nothing.
    """
    tasks, counters = torch.ops.compiled_llm.decode_plan(
        slot_mapping, table_rows, query_start_loc, seq_lens, block_table.shape[1] * block_size,
        window, num_heads, head_dim, q_bytes, cache_bytes, latents,
    )  # fmt: skip
    return DecodePlan(block_table, tasks, counters)


def splits_of(keys: int, splits: Splits) -> tuple[int, int]:
    """Keys of a split, and their number, for a request with so many visible keys; the last has the new one besides."""
    old = max(keys - 1, 0)
    slack = splits.tokens // (2 * SPLIT_GRAIN) * SPLIT_GRAIN
    count = min(max(1, -(-(old - slack) // splits.tokens)), splits.most)
    size = max(1, -(-old // (count * SPLIT_GRAIN))) * SPLIT_GRAIN
    return size, max(1, -(-old // size))


def decode_plan_reference(
    slot_mapping: Tensor, table_rows: Tensor | None, query_start_loc: Tensor, seq_lens: Tensor, table_tokens: int,
    window: int, num_heads: int, head_dim: int, q_bytes: int, cache_bytes: int, latents: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op in plain torch, with the splits of a GPU with one SM."""
    if latents:
        tile = latent_tiles(head_dim, q_bytes, cache_bytes, (9, 0)).decode
        splits = latent_splits(tile, len(seq_lens), num_heads, num_sms=1)
    else:
        tiles = tile_config(head_dim, q_bytes, cache_bytes, (9, 0))
        splits = decode_splits(tiles, len(seq_lens), num_heads, num_sms=1)
    tasks = planned(slot_mapping, table_rows, query_start_loc, seq_lens, table_tokens, window, splits)
    return tasks, seq_lens.new_zeros(num_counters(len(seq_lens), num_heads, latents))


def num_counters(num_requests: int, num_heads: int, latents: bool) -> int:
    return num_requests * (1 if latents else num_heads)


def planned(
    slot_mapping: Tensor, table_rows: Tensor | None, query_start_loc: Tensor, seq_lens: Tensor, table_tokens: int,
    window: int, splits: Splits,
) -> Tensor:  # fmt: skip
    """The tasks of a plan with these splits, in plain torch."""
    num_requests = len(seq_lens)
    starts, lengths, slots = query_start_loc.tolist(), seq_lens.tolist(), slot_mapping.tolist()
    places = list(range(num_requests)) if table_rows is None else table_rows.tolist()
    tasks, without_row = [], starts[-1]
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        row, seq_len = start, lengths[request]
        if start == end:
            row, seq_len, without_row = without_row, 0, without_row + 1
        first = max(seq_len - window, 0) if window else 0
        size, count = splits_of(seq_len - first, splits)
        for split in range(count):
            begin = first + split * size
            slot = slots[row] if seq_len and split == count - 1 else -1
            end = seq_len if split == count - 1 else begin + size
            tasks.append([row, places[request], begin, end, split, count, slot, 0])
    filled = torch.zeros(1 + num_requests * most_splits(table_tokens), TASK_COLUMNS, dtype=torch.int32)
    filled[0, 0] = len(tasks)
    filled[1 : 1 + len(tasks)] = torch.tensor(tasks, dtype=torch.int32)
    return filled.to(seq_lens.device)


def _fake(
    slot_mapping, table_rows, query_start_loc, seq_lens: Tensor, table_tokens: int, window, num_heads: int,
    head_dim, q_bytes, cache_bytes, latents: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = 1 + len(seq_lens) * most_splits(table_tokens)
    return seq_lens.new_empty(rows, TASK_COLUMNS), seq_lens.new_empty(num_counters(len(seq_lens), num_heads, latents))


define_op(
    "decode_plan(Tensor slot_mapping, Tensor? table_rows, Tensor query_start_loc, Tensor seq_lens, int table_tokens, "
    "int window, int num_heads, int head_dim, int q_bytes, int cache_bytes, bool latents) -> (Tensor, Tensor)",
    reference=decode_plan_reference,
    fake=_fake,
    gpu=on_gpu("attention.triton_decode_plan:decode_plan"),
)
