"""BlockTables: the block tables of all running requests on a GPU, which get no more than what changes."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compiled_llm.api.config import EngineLimits
from compiled_llm.ops.pinned import on_device
from compiled_llm.ops.torch_private import mark_static_address
from compiled_llm.scheduling.block_pool import SINK_BLOCK

_ALIGNMENT = 16  # entries: Inductor copies inputs that are not aligned to 16 bytes

# (which table, its row, the first entry, the entries from there on)
TableChange = tuple[int, int, int, Sequence[int]]


class BlockTables:
    """A table for the pool and one for each window, with the rows of ``RequestRows``. Steps pick their rows in them.

    A step's table is some megabytes where requests may be long, and from step to step hardly any of it changes.

    Attributes:
        tensors: ``[max_num_seqs + 1, M]`` int32 each, at fixed addresses.
        all: one after the other, ``[N]`` int32.
        padding_row: the last row, of padding requests: all sink.
    """

    def __init__(self, limits: EngineLimits, device: torch.device, num_windows: int) -> None:
        self.padding_row = limits.max_num_seqs
        shape = limits.max_num_seqs + 1, limits.blocks_per_request
        entries = math.prod(shape)
        self._width, self._stride = shape[1], -(-entries // _ALIGNMENT) * _ALIGNMENT
        self.all = torch.full(((1 + num_windows) * self._stride,), SINK_BLOCK, dtype=torch.int32, device=device)
        self.tensors = tuple(table[:entries].view(shape) for table in self.all.split(self._stride))
        for tensor in self.tensors:
            mark_static_address(tensor)

    @property
    def nbytes(self) -> int:
        return self.all.nbytes

    def pack(self, changes: Sequence[TableChange]) -> tuple[np.ndarray, np.ndarray]:
        """``changes``, none of which meets another, as places in all tables, [N] int64, and entries, [N] int32."""
        starts = [table * self._stride + row * self._width + start for table, row, start, _ in changes]
        counts = np.array([len(entries) for *_, entries in changes], dtype=np.int64)
        firsts = counts.cumsum() - counts
        places = np.arange(counts.sum()) + np.repeat(np.array(starts, dtype=np.int64) - firsts, counts)
        return places, np.concatenate([np.asarray(entries, dtype=np.int32) for *_, entries in changes])

    def write(self, places: Tensor, entries: Tensor) -> None:
        """Write on the device what ``pack`` gave and is there by now, in the order of its stream: one kernel."""
        self.all.index_copy_(0, places, entries)

    def send(self, places: np.ndarray, entries: np.ndarray) -> None:
        """Write entries that the host has: one copy more."""
        # They travel as one: int64 of all, then int32 of all.
        total = len(places)
        packed = np.empty(3 * total, dtype=np.int32)
        packed[: 2 * total].view(np.int64)[:] = places
        packed[2 * total :] = entries
        sent: Tensor = on_device(torch.from_numpy(packed), self.all.device)
        self.write(sent[: 2 * total].view(torch.int64), sent[2 * total :])
