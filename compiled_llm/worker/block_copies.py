"""Copies of KV blocks that a step starts with: to host memory and back, and within the pool."""

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_llm.models.inputs import KVCache
from compiled_llm.models.weights import tensors
from compiled_llm.ops import swap
from compiled_llm.scheduling.scheduler_output import SchedulerOutput


def copy_blocks(output: SchedulerOutput, kv_cache: KVCache, swap_space: Tensor) -> None:
    """Swap and copy blocks as the scheduler decided; on a GPU, in the order of its stream.

    Args:
        swap_space: ``[host blocks, bytes of a block]`` uint8, in host memory.
    """
    if not output.swapped_out and not output.swapped_in and not output.copies:
        return
    caches = tensors(kv_cache)
    for pairs, copy in ((output.swapped_out, swap.swap_out), (output.swapped_in, swap.swap_in)):
        if pairs:
            copy(caches, swap_space, *swap_indices(pairs))
    if output.copies:
        sources, targets = torch.tensor(output.copies, dtype=torch.int64).unbind(1)
        swap.copy_blocks(caches, sources, targets)


def swap_indices(pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Pairs of (device block, host block) as two index tensors ``[pairs]`` int64.

    Both pools count from 1, since block 0 on the device is the sink. The host has no sink.
    """
    indices = torch.tensor(pairs, dtype=torch.int64)
    return indices[:, 0].contiguous(), indices[:, 1] - 1
