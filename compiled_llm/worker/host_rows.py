"""Rows of host memory, in which blocks lie as one process without ranks has them, also where ranks share the rows.

A row has a block of all cache tensors, one after the other. Ranks with files, or with other engines to give blocks to,
have rows in common: each copies its heads to where the whole model's tensor has them. So what a block is to others does
not depend on how many ranks computed it. Only states lie rank after rank: their channels are not cut in one piece.
"""

import itertools
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.sharding import Shard
from compiled_llm.step.kv_cache import block_tensors
from compiled_llm.worker.rank_start import map_memory

Shaped = tuple[tuple[int, ...], torch.dtype]  # of a block in one cache tensor


class GroupRows(NamedTuple):
    """Rows of a group of cache tensors.

    Attributes:
        tensors: shape and dtype of a block in each tensor of all ranks.
        starts: bytes of a row before this process's part of each.
        row_bytes: of a row.
    """

    tensors: tuple[Shaped, ...]
    starts: tuple[int, ...]
    row_bytes: int


def own_rows(groups: Iterable[Sequence[Tensor]]) -> tuple[GroupRows, ...]:
    """Of a process that has all of each block."""
    return tuple(_rows(own, own) for own in map(_shaped, groups))


def shared_rows(
    groups: Sequence[Sequence[Tensor]],
    model_config: ModelConfig,
    dtypes: Sequence[torch.dtype],
    windows: Sequence[int],
    block_size: int,
    shard: Shard,
) -> tuple[GroupRows, ...]:
    """Of rows that ranks share.

    Args:
        groups: the rank's own tensors: of layers without a window, with what a network that drafts keeps, which each
            rank has whole; of those with each of ``windows``; of those with a state.
        model_config: the whole model's; dtypes: of each layer's cache.
    """
    *blocks, states = map(_shaped, groups)
    whole = block_tensors(model_config, dtypes, windows, block_size)
    found = []
    for own, of_model in zip(blocks, whole, strict=True):
        found.append(_rows(own, [*of_model, *own[len(of_model) :]], shard))
    return *found, _rows(states, [((shard.size, *shape), dtype) for shape, dtype in states], shard)


def map_pools(descriptor: int, sizes: Iterable[tuple[int, int]]) -> list[Tensor]:
    """Pools ``[rows, bytes]`` uint8 of these sizes, in memory that has this descriptor, which is closed.

    Whoever maps it first with these sizes gives it its own. Pools without rows or bytes are empty.
    """
    sizes = list(sizes)
    starts = list(
        itertools.accumulate((-(-math.prod(one) // mmap.PAGESIZE) * mmap.PAGESIZE for one in sizes), initial=0)
    )
    os.ftruncate(descriptor, max(starts[-1], mmap.PAGESIZE))
    memory = map_memory(descriptor)
    parts = (memory[start : start + math.prod(one)] for one, start in zip(sizes, starts[:-1], strict=True))
    return [part.view(one) if len(part) else torch.empty(0) for part, one in zip(parts, sizes, strict=True)]


def _shaped(caches: Sequence[Tensor]) -> list[Shaped]:
    return [(tuple(cache.shape[1:]), cache.dtype) for cache in caches]


def _rows(own: Sequence[Shaped], whole: Sequence[Shaped], shard: Shard | None = None) -> GroupRows:
    starts, row_bytes = [], 0
    for part, tensor in zip(own, whole, strict=True):
        num_parts = _num_bytes(tensor) // _num_bytes(part)
        number = 0 if shard is None else shard.rank * num_parts // shard.size  # ranks may have the same part
        starts.append(row_bytes + number * _num_bytes(part))
        row_bytes += _num_bytes(tensor)
    return GroupRows(tuple(whole), tuple(starts), row_bytes)


def _num_bytes(tensor: Shaped) -> int:
    return math.prod(tensor[0]) * tensor[1].itemsize
