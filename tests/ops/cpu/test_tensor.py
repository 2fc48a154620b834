"""The memory of tensors that C++ kernels make."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compiled_llm.ops import native

ROOT = Path(__file__).parents[3]

_LAYERS = """
import ctypes
import torch
from compiled_llm.ops import native

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd a b c d e".split()]

glibc = ctypes.CDLL(None)
glibc.mallinfo2.restype = Info
glibc.mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD, as it is once large tensors were freed
glibc.mallopt(-1, 1 << 26)  # M_TRIM_THRESHOLD
kernels = native.load("rowwise_cpu")
inputs = {kib: torch.zeros(kib, 256) for kib in (1100, 1500, 2300, 4700)}
weight = torch.ones(256)

def made(kib):
    return kernels.run("add_rms_norm", inputs[kib], inputs[kib], weight, 1e-6)[0]

before = glibc.mallinfo2().arena
for _ in range(30):
    first, second, third = made(1100), made(2300), made(1100)
    fourth = made(4700)
    del second
    fifth = made(1500)
    del fourth
    sixth = made(1100)
    del first, third, fifth
print((glibc.mallinfo2().arena - before) / 2**20)
"""


def _kernels() -> native.Kernels:
    kernels = native.load("rowwise_cpu")
    if kernels is None:
        pytest.skip("no C++ compiler")
    return kernels


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 1000])
def test_tensors_begin_with_a_cache_line(rows: int) -> None:
    """Small ones, which torch makes, and large ones."""
    x = torch.ones(rows, 1024)
    made = _kernels().run("add_rms_norm", x, x, x[0], 1e-6)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in made)
    assert torch.equal(made[0], x + x)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_what_large_tensors_leave_is_used_again() -> None:
    """Layer after layer takes the same memory: 20 MiB, and 30 where each tensor leaves a piece too small."""
    _kernels()
    done = subprocess.run([sys.executable, "-c", _LAYERS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 25
