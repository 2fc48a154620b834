"""Copies of KV blocks that a step starts with: to host memory and back, and within the pool."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_llm.ops import swap
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, StateOutput, WindowOutput

_REHEARSAL_BYTES = 128 << 20  # more than swapping on a GPU stages at once

Caches = list[Tensor]  # all tensors of the KV cache that the same blocks, or slots, index
Layout = tuple[tuple[tuple[tuple[int, ...], torch.dtype], ...], ...]
Told = SchedulerOutput | WindowOutput | StateOutput


class SwapSpace:
    """Host memory for blocks, and for slots of layers with a state.

    Attributes:
        num_blocks: blocks that fit, each with what all layers keep of it.
        num_slots: slots that fit into host memory.
        num_tier_blocks, num_tier_slots: for what leaves the prefix cache, numbered after the others.
        layout: shape and dtype of a block in each tensor of each group.
        pools: ``[num_blocks, bytes of a block]`` uint8 for each group of layers; empty where it has no layer. The last
            is that of the slots.
    """

    def __init__(
        self,
        groups: Sequence[Caches],
        num_blocks: int,
        num_slots: int = 0,
        num_tier_blocks: int = 0,
        num_tier_slots: int = 0,
    ) -> None:
        """``groups``: of layers without a window, of those with each window, and of those with a state."""
        self.num_blocks, self.num_slots = num_blocks, num_slots
        self.num_tier_blocks, self.num_tier_slots = num_tier_blocks, num_tier_slots
        self.layout: Layout = tuple(tuple((tuple(cache.shape[1:]), cache.dtype) for cache in own) for own in groups)
        self.pools = self._make_pools(groups)

    def _make_pools(self, groups: Sequence[Caches]) -> list[Tensor]:
        return [
            swap.host_pool(caches, count) if caches else torch.empty(0)
            for caches, count in zip(groups, self.counts, strict=True)
        ]

    @property
    def counts(self) -> list[int]:
        """Rows of each pool."""
        blocks, slots = self.num_blocks + self.num_tier_blocks, self.num_slots + self.num_tier_slots
        return [blocks] * (len(self.layout) - 1) + [slots]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    @property
    def tier_nbytes(self) -> int:
        """Of these, those of the ``num_tier_blocks`` and ``num_tier_slots``."""
        return sum(pool[self.num_blocks :].nbytes for pool in self.pools[:-1]) + self.pools[-1][self.num_slots :].nbytes

    def copy(self, output: SchedulerOutput, groups: Sequence[Caches]) -> None:
        """Swap and copy blocks as the scheduler decided; on a GPU, in the order of its stream."""
        columns: tuple[Told, ...] = (output, *output.windows, output.states)
        for told, caches, pool in zip(columns, groups, self.pools, strict=True):
            if caches:
                _copy(told, caches, pool)

    def rehearse(self, groups: Sequence[Caches]) -> None:
        """On a GPU: swap out as much as is staged at once, so that torch's allocator holds that until it is emptied."""
        for caches, pool in zip(groups, self.pools, strict=True):
            if caches and caches[0].device.type == "cuda" and len(pool):
                count = min(len(pool), -(-_REHEARSAL_BYTES // swap.bytes_per_block(caches)))
                swap.swap_out(caches, pool, *swap_indices([(1, n + 1) for n in range(count)]))


def _copy(told: Told, caches: Caches, pool: Tensor) -> None:
    for pairs, copy in ((told.swapped_out, swap.swap_out), (told.swapped_in, swap.swap_in)):
        if pairs:
            copy(caches, pool, *swap_indices(pairs))
    if told.copies:
        sources, targets = torch.tensor(told.copies, dtype=torch.int64).unbind(1)
        swap.copy_blocks(caches, sources, targets)


def row_bytes(group: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> int:
    """Of a row that has blocks of these shapes and dtypes."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in group)


def swap_indices(pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Pairs of (device block, host block) as two index tensors ``[pairs]`` int64.

    Both pools count from 1, since block 0 on the device is the sink. The host has no sink.
    """
    indices = torch.tensor(pairs, dtype=torch.int64)
    return indices[:, 0].contiguous(), indices[:, 1] - 1
