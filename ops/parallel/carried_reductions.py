"""Sums and joins over ranks on GPUs that do not reach each other's memory: NCCL carries pieces, and ranks add them.

NCCL's own sums are in orders that depend on sizes and links. So it only moves bytes here, by torch.distributed's group
of all processes, and each rank adds in the order of ranks: the bits are those of the kernels that read each other's
memory. Small tensors go whole to all. Of large ones of more than two ranks each rank gets its section from all, and
gives its sum to all: each then moves as many bytes as in a ring.

A group of such ranks has a ``memory`` without bytes. All here works within a CUDA graph.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed
from torch import Tensor

ONE_SHOT_BYTES = 1 << 21  # of all ranks, as in triton_reductions.py

Join = Callable[[Sequence[Tensor]], Tensor]  # one shape of all ranks -> float32, in an order that is always the same


def carried_sum(x: Tensor, size: int, dtype: torch.dtype, join: Join) -> Tensor:
    """``join`` of the ``x`` of all ``size`` ranks, in ``dtype``."""
    if size == 2 or size * x.nbytes <= ONE_SHOT_BYTES:
        return join(_of_all_ranks(x, size)).to(dtype)
    section = -(-x.numel() // size)
    padded = torch.nn.functional.pad(x.flatten(), (0, size * section - x.numel()))
    pieces = torch.empty_like(padded)
    torch.distributed.all_to_all_single(pieces, padded)
    own = join(pieces.view(size, section).unbind()).to(dtype)
    return torch.cat(_of_all_ranks(own, size))[: x.numel()].view(x.shape)


def carried_join(x: Tensor, size: int) -> Tensor:
    """The columns of the ``x`` ``[T, n]`` of all ranks, side by side."""
    return torch.cat([piece.view(x.dtype).view(x.shape) for piece in _of_all_ranks(x.view(torch.uint8), size)], dim=1)


def in_order(pieces: Sequence[Tensor]) -> Tensor:
    """The sum in the order of ranks, in float32."""
    total = pieces[0].float()
    for piece in pieces[1:]:
        total = total + piece.float()
    return total


def _of_all_ranks(x: Tensor, size: int) -> list[Tensor]:
    pieces = [torch.empty_like(x) for _ in range(size)]
    torch.distributed.all_gather(pieces, x)
    return pieces
