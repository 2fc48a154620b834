"""Functions of the C library that Python has no name for."""

import ctypes
import functools
from typing import Any


@functools.cache
def c_library() -> Any:
    """The process's own, with types of the arguments of what is called here and in ``worker/read_ahead.py``."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    library.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return library


def madvise(address: int, size: int, advice: int) -> int:
    """As ``mmap.madvise``, which would keep the interpreter's lock while a disk is read. 0, or -1 if it fails."""
    return c_library().madvise(address, size, advice)
