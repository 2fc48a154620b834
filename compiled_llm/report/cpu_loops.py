"""Loops that measure a CPU's limits (ops/limits_cpu.cpp), on torch's threads."""

import ctypes
import functools

import numpy as np

from compiled_llm.ops import native
from compiled_llm.ops.kernel_build import levels, op_library


class CpuLoops:
    """The loops. Each is named by an instruction set."""

    def __init__(self, library: ctypes.CDLL, best_isa: str) -> None:
        self._best = best_isa
        self._read, self._peak = library.read_seconds, library.run_peak
        self._read.restype = self._peak.restype = ctypes.c_double
        self._read.argtypes = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
        self._peak.argtypes = ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(ctypes.c_double)

    def supported(self, bfloat16: bool) -> list[str]:
        """Names of loops for ``run_peak``, best first. Without ``bfloat16``, of loops that multiply float32 alone."""
        sets = levels()
        names = sets[sets.index(self._best) :: -1]
        return [name for name in names if bfloat16 or name not in ("amx", "avx512_bf16", "neon_bf16")]

    def run_peak(self, name: str, rounds: int, threads: int) -> tuple[float, float]:
        """(operations, seconds) of ``rounds`` rounds of the instruction ``name`` on each of ``threads`` threads."""
        if name not in self.supported(True):
            raise ValueError(f"name must be one of {self.supported(True)}, which this CPU supports, given {name!r}")
        operations = ctypes.c_double()
        seconds = self._peak(name.encode(), rounds, threads, operations)
        return operations.value, seconds

    def read_seconds(self, array: np.ndarray, threads: int) -> float:
        """Seconds to read an array of one dimension once, each of ``threads`` threads a run of its own."""
        if array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(f"array must have one dimension and be contiguous, got strides {array.strides}")
        if array.ctypes.data % 64:
            raise ValueError("array must begin at a multiple of 64 bytes")
        return self._read(self._best.encode(), array.ctypes.data, array.nbytes, threads)


@functools.cache
def load() -> CpuLoops | None:
    """The loops, built if need be; None without a compiler. Raises as ``native.open_library``."""
    best, library = native.best_isa(), native.open_library(op_library("limits_cpu"))
    return None if best is None or library is None else CpuLoops(library, best)
