"""torch without its shapes is imported sooner, and has them before anything asks."""

import importlib.util
import subprocess
import sys

import pytest

PROGRAM = """
import gc, sys
from compiled_llm.system.quick_start import quick_start
shapes = "torch._meta_registrations"
with quick_start():
    import torch
    assert not gc.isenabled()
    assert shapes not in sys.modules and not hasattr(torch, "_meta_registrations")
    torch.get_default_device()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).sum() == 8
assert gc.isenabled() and gc.get_freeze_count() > 10_000
assert shapes not in sys.modules, "something that a start asks for has them imported"
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    table = torch.empty(5, 3).normal_()
    assert torch.nn.functional.embedding(torch.zeros(2, dtype=torch.int64), table).shape == (2, 3)
assert shapes in sys.modules
"""

TRITON = """
from compiled_llm.system.quick_start import quick_start
with quick_start():
    import triton
"""


def test_what_was_left_out_is_there_before_something_else_of_torch_is_imported() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=200)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_tritons_library_tells_of_no_leaks_at_the_end() -> None:
    ended = subprocess.run([sys.executable, "-c", TRITON], check=True, timeout=200, capture_output=True, text=True)
    assert "nanobind" not in ended.stderr
