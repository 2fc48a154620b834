"""What counts as out of memory."""

import pytest
import torch

from compiled_llm.engine.faults import is_out_of_memory


def test_what_torch_raises_on_a_cpu() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: out of memory"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert is_out_of_memory(RuntimeError(f"{type(error).__name__}: {error}")), "as it comes from a worker process"


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError("no"), KeyError("memory")],
)
def test_not_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)
