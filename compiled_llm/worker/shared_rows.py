"""Rows of host memory that ranks share: a block in them has the bytes that one process without ranks gives it.

Each rank copies its heads to where the whole model's tensors have them. So what a block is, on disk and to other
engines, does not depend on how many ranks computed it, and one process gives, takes, writes and reads all of it.
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
from compiled_llm.models.sharding import Shard, rank_config
from compiled_llm.ops import swap
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.step.kv_cache import BlockTensor, block_tensors
from compiled_llm.worker.block_copies import Caches, Layout, SwapSpace, Told, row_bytes
from compiled_llm.worker.rank_start import map_memory


class Piece(NamedTuple):
    """Neighbouring bytes of a rank's part of a block: in its cache tensor of this number, and in a row."""

    tensor: int
    offset: int
    start: int
    size: int


class SharedSwapSpace(SwapSpace):
    """A rank's ``SwapSpace`` whose pools are those of all ranks, in memory that has this descriptor, which is closed.

    Args:
        groups: the rank's tensors; the last of the first are those of a network that drafts, which each rank has whole.
        model_config: the whole model's; dtypes: of each layer's cache; windows: of the groups that have one.
        counts: as of a ``SwapSpace``.

    Attributes:
        layout: of blocks that have the heads of all ranks.
    """

    def __init__(
        self,
        groups: Sequence[Caches],
        counts: Sequence[int],
        model_config: ModelConfig,
        dtypes: Sequence[torch.dtype],
        windows: Sequence[int],
        block_size: int,
        shard: Shard,
        descriptor: int,
    ) -> None:
        self._descriptor, self._num_ranks, of_blocks = descriptor, shard.size, (dtypes, windows, block_size)
        whole = block_tensors(model_config, *of_blocks)
        own = block_tensors(rank_config(model_config, shard), *of_blocks)
        alike = [BlockTensor(tuple(one.shape[1:]), one.dtype, (one[0].numel(),)) for one in groups[0][len(own[0]) :]]
        whole[0] += alike
        own[0] += alike
        self._pieces = [_pieces(*pair, shard) for pair in zip(own, whole, strict=True)]
        self._whole: Layout = tuple(tuple((one.shape, one.dtype) for one in group) for group in whole)
        super().__init__(groups, *counts)

    def _make_pools(self, groups: Sequence[Caches]) -> list[Tensor]:
        self.layout = self._whole
        return map_pools(self._descriptor, self.layout, self.counts)

    @property
    def nbytes(self) -> int:
        """A rank's share."""
        return super().nbytes // self._num_ranks

    @property
    def tier_nbytes(self) -> int:
        """The same of tiers."""
        return super().tier_nbytes // self._num_ranks

    def copy(self, output: SchedulerOutput, groups: Sequence[Caches]) -> None:
        """Swap the rank's parts of blocks, and copy blocks, as the scheduler decided."""
        columns: tuple[Told, ...] = (output, *output.windows, output.states)
        for told, caches, pool, pieces in zip(columns, groups, self.pools, self._pieces, strict=True):
            if not caches:
                continue
            blocks = [cache.view(len(cache), -1).view(torch.uint8).numpy() for cache in caches]
            for (tensor, offset, start, size), rows in zip(pieces, itertools.repeat(pool.numpy())):
                for block, row in told.swapped_out:
                    rows[row - 1, start : start + size] = blocks[tensor][block, offset : offset + size]
                for block, row in told.swapped_in:
                    blocks[tensor][block, offset : offset + size] = rows[row - 1, start : start + size]
            if told.copies:
                swap.copy_blocks(caches, *torch.tensor(told.copies, dtype=torch.int64).unbind(1))


def map_pools(descriptor: int, layout: Layout, counts: Iterable[int]) -> list[Tensor]:
    """Pools of so many rows for each group of ``layout``, in memory that has this descriptor, which is closed.

    Whoever maps it first gives the memory its size. Pools without rows or bytes are empty.
    """
    sizes = [(count, row_bytes(group)) for group, count in zip(layout, counts, strict=True)]
    whole_pages = (-(-math.prod(size) // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)
    starts = list(itertools.accumulate(whole_pages, initial=0))
    os.ftruncate(descriptor, max(starts[-1], mmap.PAGESIZE))
    memory = map_memory(descriptor)
    parts = (memory[start : start + math.prod(size)] for size, start in zip(sizes, starts[:-1], strict=True))
    return [part.view(size) if len(part) else torch.empty(0) for part, size in zip(parts, sizes, strict=True)]


def _pieces(own: Sequence[BlockTensor], whole: Sequence[BlockTensor], shard: Shard) -> list[Piece]:
    """Of all tensors of a group, where a rank has its parts, and where a row has them."""
    found, offset, start = list[Piece](), 0, 0
    for number, (part, tensor) in enumerate(zip(own, whole, strict=True)):
        offset, size = 0, part.dtype.itemsize
        for _ in range(math.prod(part.shape) // sum(part.runs)):
            for own_run, run in zip(part.runs, tensor.runs, strict=True):
                # Where there are more ranks than heads, several have the same.
                first = shard.rank * (run // own_run) // shard.size * own_run
                found.append(Piece(number, offset, start + first * size, own_run * size))
                offset, start = offset + own_run * size, start + run * size
    return found
