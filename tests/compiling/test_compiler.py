"""The compiler's requirements: which torch is refused."""

import pytest
import torch

from compiled_llm.compiling.compiler import check_torch


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
