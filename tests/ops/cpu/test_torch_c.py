"""The functions of torch that C++ kernels call, and their types of 16 bits, against torch's own."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from compiled_llm.ops import native

ROOT = Path(__file__).parents[3]


def test_functions_are_declared_as_torch_declares_them() -> None:
    """Two declarations of one C function that differ are an error of the compiler."""
    compiler = native.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, "-fsyntax-only", "-std=c++20", "-x", "c++", *(f"-isystem{path}" for path in include_paths())]
    command += ["-include", "torch/csrc/inductor/aoti_torch/c/shim.h", "-include", "torch/csrc/stable/c/shim.h"]
    ours = ["-include", str(ROOT / "ops" / "cpu" / "torch_c.h")]
    done = subprocess.run([*command, *ours, os.devnull], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    changed = ["-Daoti_torch_get_dim=aoti_torch_get_sizes"]  # for both: which differ in their second argument
    assert subprocess.run([*command, *ours, *changed, os.devnull], capture_output=True).returncode != 0


@pytest.mark.battery
def test_float16_is_that_of_torch() -> None:
    """Every number, and sums of any two, rounded to it by the portable kernels."""
    kernels = native.load("rowwise_cpu")
    if kernels is None:
        pytest.skip("no C++ compiler")
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = halves[halves.isfinite()]
    generator = torch.Generator().manual_seed(0)
    others = [torch.zeros_like(finite), *(finite[torch.randperm(len(finite), generator=generator)] for _ in range(4))]
    for other in others:
        total, _ = kernels.run("add_rms_norm", finite[None], other[None], finite, 1e-6, isa="portable")
        assert torch.equal(total[0], (finite.float() + other.float()).half())
    for special in (float("inf"), float("-inf"), float("nan")):
        x = torch.full((1, 16), special, dtype=torch.float16)
        total, _ = kernels.run("add_rms_norm", x, torch.zeros_like(x), x[0], 1e-6, isa="portable")
        assert torch.equal(total.isnan(), x.isnan())
        assert torch.equal(total.nan_to_num(1), x.nan_to_num(1))
