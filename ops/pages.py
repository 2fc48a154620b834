"""Which pages the memory of a CPU's tensors comes in, after it was reserved and before or while it is written.

A huge page is zeroed as a whole when its first byte is written: 2 MiB, of which a first answer may write some hundred
bytes. On a virtual machine whose host has to find the memory, that takes 4 ms. Most layers of a KV cache share pages
(``step/kv_cache.py``); those of 8 bits, latents and states have their own.
"""

import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from compiled_llm.ops.c_library import madvise

_HUGE_PAGE = 2 << 20
_COLLAPSE = 25  # of madvise, from Linux 6.1 on; Python has no name for it
_PIECE = 16 * _HUGE_PAGE  # which takes up to 0.1 s
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use_small_pages(tensors: Iterable[Tensor]) -> None:
    """What of ``tensors``, which ``native.huge_zeros`` made, is not written yet comes in small pages from now on."""
    _advise(tensors, "MADV_NOHUGEPAGE")


def use_huge_pages(tensors: Iterable[Tensor]) -> None:
    """What is not written yet comes in huge pages again."""
    _advise(tensors, "MADV_HUGEPAGE")


class Collapsing:
    """A thread that makes huge pages of what was written to ``tensors`` in small ones, where the system has any.

    Others may read and write it meanwhile: they wait at most while one page is copied. Without the interpreter's lock.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._ended = threading.Event()
        arguments = list(tensors), self._ended
        self._thread = threading.Thread(target=_collapse, args=arguments, name="huge pages", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave the rest as it is, and wait for the thread, which then holds no tensor any more."""
        self._ended.set()
        self._thread.join()


def _collapse(tensors: Sequence[Tensor], ended: threading.Event) -> None:
    try:
        setting = _SETTING.read_text()
    except OSError:  # no such setting, or a container that hides it
        return
    if "[never]" in setting:  # which this advice would not heed
        return
    for address, size in _mapped(tensors):
        for start in range(0, size, _PIECE):
            if ended.is_set():
                return
            madvise(address + start, min(_PIECE, size - start), _COLLAPSE)


def _advise(tensors: Iterable[Tensor], advice: str) -> None:
    """Where the system has no such advice, all stays as it is."""
    number = getattr(mmap, advice, None)
    if number is not None:
        for address, size in _mapped(tensors):
            madvise(address, size, number)


def _mapped(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """Addresses and sizes of the memory of those on a CPU, of a huge page and more: smaller ones share pages."""
    for rows in memory_of(tensor for tensor in tensors if tensor.device.type == "cpu"):
        size = rows.nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        if size >= _HUGE_PAGE:
            yield rows.address, size


class Rows(NamedTuple):
    """Memory of so many rows, each of ``row_bytes``."""

    address: int
    row_bytes: int
    num_rows: int

    @property
    def nbytes(self) -> int:
        return self.row_bytes * self.num_rows


def memory_of(tensors: Iterable[Tensor]) -> list[Rows]:
    """Where ``tensors`` lie, each ``[num_rows, ...]`` of contiguous rows.

    Those that ``huge_zeros_in_rows`` made together are one.
    """
    found: list[Rows] = []
    for tensor in sorted(tensors, key=Tensor.data_ptr):
        own = Rows(tensor.data_ptr(), tensor.stride(0) * tensor.itemsize, len(tensor))
        is_within = found and found[-1][1:] == own[1:] and own.address < found[-1].address + own.row_bytes
        if not is_within:
            found.append(own)
    return found
