"""Which pages the memory of a CPU's tensors comes in, after it was reserved and before or while it is written.

A huge page is zeroed as a whole when its first byte is written: 2 MiB for each tensor of a KV cache, of which a first
answer writes some hundred bytes. On a virtual machine whose host has to find the memory, that took 4 ms a tensor.
"""

import mmap
from collections.abc import Iterable

from torch import Tensor

from compiled_llm.ops.c_library import madvise

_HUGE_PAGE = 2 << 20
_COLLAPSE = 25  # of madvise, from Linux 6.1 on; Python has no name for it


def use_small_pages(tensors: Iterable[Tensor]) -> None:
    """What of ``tensors``, which ``native.huge_zeros`` made, is not written yet comes in small pages from now on."""
    _advise(tensors, "MADV_NOHUGEPAGE")


def use_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Memory of ``tensors`` comes in huge pages again, and what was written becomes such.

    Others may read and write it meanwhile: they wait at most while one page is copied. Without the interpreter's lock.
    """
    tensors = list(tensors)
    _advise(tensors, "MADV_HUGEPAGE")
    _advise(tensors, _COLLAPSE)


def _advise(tensors: Iterable[Tensor], advice: str | int) -> None:
    """Of tensors of a huge page and more. Where the system has no such advice, all stays as it is."""
    number = getattr(mmap, advice, None) if isinstance(advice, str) else advice
    if number is None:
        return
    for tensor in tensors:
        size = tensor.nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        if tensor.device.type == "cpu" and size >= _HUGE_PAGE:
            madvise(tensor.data_ptr(), size, number)
