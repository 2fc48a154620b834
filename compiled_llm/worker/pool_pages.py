"""Memory for blocks of a KV pool on a CPU, asked for before they are written.

A system gives memory as it is first written. In a virtual machine a page that was never used comes from the host:
measured at 0.3 to 0.6 GB/s, where one that it had before takes a fortieth of that. A prompt of 2,048 tokens of
Qwen3-0.6B's size writes 235 MB, so it took 0.4 s longer. While an engine has nothing to do it asks for what its next
requests will write, so that these need not wait.
"""

import itertools
import mmap
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from compiled_llm.ops.c_library import madvise
from compiled_llm.system.resources import free_memory

AHEAD_BYTES = 512 << 20  # of blocks that no request has had
_POPULATE_WRITE = 23  # of madvise, from Linux 5.14 on: contents stay as they are
_HUGE_PAGE = 2 << 20


class Rows(NamedTuple):
    """Memory of so many rows, each of ``row_bytes``."""

    address: int
    row_bytes: int
    num_rows: int

    @property
    def nbytes(self) -> int:
        return self.row_bytes * self.num_rows


class PoolPages:
    """What a pool has of the system's memory.

    Args:
        tensors: of the KV cache: their first dimension is blocks, of which layers with a window have fewer.
        ahead_bytes: most bytes of blocks that it has and no request had. A pool may be much larger than what is used.
    """

    def __init__(self, tensors: Sequence[Tensor], ahead_bytes: int = AHEAD_BYTES) -> None:
        self._tensors = tensors  # which keep the memory
        self._memory = [rows for rows in _memory_of(tensors) if rows.nbytes >= mmap.PAGESIZE]
        self._most = max((rows.num_rows for rows in self._memory), default=0)
        sizes = [rows.row_bytes for rows in self._memory]
        self._ahead_bytes = ahead_bytes
        self._ahead = ahead_bytes // max(1, sum(sizes))
        # Blocks, of which each piece of memory has about a page, or those of one block.
        self._step = max(1, _HUGE_PAGE // max(sizes, default=1))
        self._asked = 0  # all blocks below
        self._pieces: deque[tuple[int, int]] = deque()  # addresses and sizes, of the blocks before

    def ask(self, used: int) -> bool:
        """Ask for the next piece, some 2 MiB, which takes 4 ms where the host has to give it.

        Args:
            used: all blocks that requests have had are below.

        Returns:
            Whether there was one. Another may be due once more blocks are used.
        """
        if not self._pieces:
            if self._asked >= min(self._most, used + self._ahead) or free_memory() < 2 * self._ahead_bytes:
                return False
            self._pieces.extend(itertools.chain.from_iterable(map(self._pieces_of, self._memory)))
            self._asked += self._step
        address, size = self._pieces.popleft()
        if madvise(address, size, _POPULATE_WRITE) != 0:  # an older kernel
            self._pieces.clear()
            self._most = 0
            return False
        return True

    def _pieces_of(self, rows: Rows) -> Iterator[tuple[int, int]]:
        """The whole pages that have the next blocks of some memory, in pieces of up to 2 MiB; none behind its last."""
        end = rows.address + min(self._asked + self._step, rows.num_rows) * rows.row_bytes
        first = (rows.address + self._asked * rows.row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        for start in range(first, end, _HUGE_PAGE):
            yield start, min(_HUGE_PAGE, end - start)


def _memory_of(tensors: Iterable[Tensor]) -> list[Rows]:
    """Where ``tensors`` lie, each ``[num_rows, ...]`` of contiguous rows.

    Those that ``native.huge_zeros_in_rows`` made together are one.
    """
    found: list[Rows] = []
    for tensor in sorted(tensors, key=Tensor.data_ptr):
        own = Rows(tensor.data_ptr(), tensor.stride(0) * tensor.itemsize, len(tensor))
        is_within = found and found[-1][1:] == own[1:] and own.address < found[-1].address + own.row_bytes
        if not is_within:
            found.append(own)
    return found
