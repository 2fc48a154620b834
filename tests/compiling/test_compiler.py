"""The compiler's requirements: which torch is refused. And what is compiled where nothing may be kept."""

import os
import random
import subprocess
import sys

import pytest
import torch

from compiled_llm.compiling.compiler import check_torch, compile_ahead


def test_a_torch_that_cannot_compile_ahead_of_time_is_refused_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    check_torch(cpu, enforce_eager=False)
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    with pytest.raises(
        ValueError, match=r"torch 2\.13 or later, given torch 2\.12\.1\+cpu: pip install 'torch>=2\.13'"
    ):
        check_torch(cpu, enforce_eager=False)
    check_torch(cpu, enforce_eager=True)
    check_torch(torch.device("cuda"), enforce_eager=False)


def test_programs_with_the_same_seed_share_no_code() -> None:
    """Nor does compiling draw from a program's generator."""
    x = torch.ones(4)
    with torch._inductor.config.patch(fx_graph_cache=False), torch.no_grad():
        for function in (lambda x: x * 2, lambda x: x * 3):
            random.seed(0)
            ahead, _ = compile_ahead(function, "scaled", (x,))
            assert random.random() == random.Random(0).random()
            assert torch.equal(ahead.fn(x), function(x))


@pytest.mark.parametrize(
    "name",
    ["TORCHINDUCTOR_FORCE_DISABLE_CACHES", pytest.param("TORCHINDUCTOR_FX_GRAPH_CACHE", marks=pytest.mark.battery)],
)
def test_compiles_where_the_environment_disables_the_caches(name: str) -> None:
    script = """
import torch
from compiled_llm.compiling.compiler import compile_ahead
from compiled_llm.ops.torch_private import keeps_compiled_code
assert not keeps_compiled_code()
with torch.no_grad():
    print(compile_ahead(lambda x: x * 2, "double", (torch.ones(4),))[0].fn(torch.full((4,), 3.0)).tolist())
assert not keeps_compiled_code()
"""
    environment = {**os.environ, name: str(int("DISABLE" in name))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "[6.0, 6.0, 6.0, 6.0]\n", done.stderr
