"""RankGroup: a rank's place among the ranks, and the memory that their processes share.

The memory is all zeros at the start:

    bytes 0 to 8        0; or 1 + the rank that has failed (``abort``), which ends every wait with an error
    bytes 128 * (1 + r) how often rank r has met the others, an int64 on a cache line of its own; 64 bytes further how
                        many pieces it has begun; of ranks on GPUs 80 bytes further how many steps it has launched, and
                        88 how many meetings its GPU has come to, as far as it has looked
    from byte 16,384    buffers of one size: of pieces with even numbers, a rank after the other; then of odd ones

Ranks call the same ops in the same order. A rank writes a piece into its buffer, counts that it comes to the meeting,
waits until all ranks have counted theirs, and reads what they wrote. It comes back to a buffer two pieces later: by
then the others have come to the meeting between, so they have read this one. One wait a piece is enough; of a large sum
each rank adds up a section, and a second one follows before all copy the sections of the others.
"""

import time
from typing import NamedTuple

import torch
from torch import Tensor

MOST_RANKS = 64
_LINE, _HEADER = 128, 16384
_GPU = 80


class RankGroup(NamedTuple):
    """Tensors, so that one graph serves all ranks. On GPUs (``triton_exchange.py``) each rank has memory of its own."""

    place: Tensor  # [2] int64 on the CPU: rank, number of ranks; on N GPUs [1 + N]: rank, address of each one's memory
    memory: Tensor  # [bytes] uint8 on the CPU, the same bytes in all ranks; on a GPU the rank's own, which all reach

    @classmethod
    def of(cls, rank: int, size: int, memory: Tensor) -> "RankGroup":
        """``memory``: of at least ``bytes_for(size, 128)``, more to exchange more at once."""
        return cls(torch.tensor([rank, size]), memory)

    @classmethod
    def alone(cls) -> "RankGroup":
        """One rank, which exchanges nothing."""
        return cls.of(0, 1, torch.zeros(0, dtype=torch.uint8))


def bytes_for(size: int, piece: int) -> int:
    """Of memory for so many ranks, which exchange ``piece`` bytes a rank at once."""
    return _HEADER + 2 * size * -(-piece // _LINE) * _LINE


def abort(memory: Tensor, rank: int) -> None:
    """End every wait, now and later, with an error that names ``rank``: it has failed."""
    memory[:8].view(torch.int64).fill_(1 + rank)


def meetings(memory: Tensor, size: int) -> list[int]:
    """To how many each rank has come so far: who is behind the others keeps them waiting."""
    return [int(memory[_LINE * (1 + rank) :][:8].view(torch.int64)) for rank in range(size)]


def note_gpu(memory: Tensor, rank: int, launched: int, met: int) -> None:
    """Of a rank on a GPU, how many steps it has launched and how many meetings its GPU has come to."""
    memory[_LINE * (1 + rank) + _GPU :][:16].view(torch.int64).copy_(torch.tensor([launched, met]))


def gpu_counts(memory: Tensor, size: int) -> list[int]:
    """Of each rank the sum of what ``note_gpu`` has noted: who is behind the others keeps them waiting."""
    return [int(memory[_LINE * (1 + rank) + _GPU :][:16].view(torch.int64).sum()) for rank in range(size)]


def exchange(piece: Tensor, place: Tensor, memory: Tensor) -> list[Tensor]:
    """In plain torch: the pieces of all ranks, vectors of one size and dtype, as large as they may be.

    For processors that keep the order of writes, as x86 does; the C++ kernels ask for it.
    """
    rank, size = place.tolist()
    data = piece.contiguous().view(torch.uint8)
    counts = [memory[_LINE * (1 + other) :][:8].view(torch.int64) for other in range(size)]
    room = (memory.numel() - _HEADER) // (2 * size) // _LINE * _LINE
    if room <= 0:
        raise ValueError(
            f"memory for {size} ranks must have more than {bytes_for(size, _LINE) - 1} bytes, got {memory.numel()}"
        )
    pieces = [torch.empty_like(data) for _ in range(size)]
    for begin in range(0, data.numel(), room):
        part = data[begin : begin + room]
        number = int(counts[rank]) + 1
        first = _HEADER + number % 2 * size * room
        memory[first + rank * room :][: len(part)] = part
        counts[rank].fill_(number)
        while any(int(count) < number for count in counts):
            if failed := int(memory[:8].view(torch.int64)):
                raise RuntimeError(f"rank {failed - 1} has failed")
            time.sleep(0)
        for other in range(size):
            pieces[other][begin : begin + room] = memory[first + other * room :][: len(part)]
    return [bytes_of.view(piece.dtype) for bytes_of in pieces]
