"""A call whose requests all failed warns once, with the reasons; and what counts as out of memory."""

import warnings

import pytest
import torch

from compiled_llm.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from compiled_llm.engine.failures import RequestsFailedWarning, is_out_of_memory, warn_if_all_failed


def output(*reasons: str | None) -> RequestOutput:
    """With a completion for each: a failed one, or None for one that is well."""
    completions = [
        CompletionOutput(index, "", [], finish_reason="stop" if reason is None else "error", stop_reason=reason)
        for index, reason in enumerate(reasons)
    ]
    return RequestOutput("me", "a", [1], completions, finished=True, metrics=RequestMetrics(0.0))


@pytest.mark.parametrize(
    "outputs", [[], [output(None)], [output("bad"), output(None)], [output("bad", None)], [output(None, None)]]
)
def test_nothing_is_said_unless_all_failed(outputs: list[RequestOutput]) -> None:
    warn_if_all_failed(outputs)  # a warning would be an error here


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([output("bad")], "the request of this call failed: bad"),
        ([output("bad"), output("bad")], "all 2 requests of this call failed: bad"),
        ([output("bad", "bad")], "the request of this call failed: bad"),
        ([output("bad"), output("worse")], "all 2 requests of this call failed: bad; worse"),
        (
            [output(f"bad {n}") for n in range(10)],
            "all 10 requests of this call failed: bad 0; bad 1; bad 2; and 7 other reasons",
        ),
        ([output("x" * 10**6)], f"the request of this call failed: {'x' * 500}"),
    ],
)
def test_one_warning_with_the_reasons(outputs: list[RequestOutput], message: str) -> None:
    with pytest.warns(RequestsFailedWarning) as caught:
        warn_if_all_failed(outputs)
    (warning,) = caught
    assert str(warning.message) == message
    assert warning.filename == __file__


def test_it_can_be_silenced_by_its_class() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", RequestsFailedWarning)
        warn_if_all_failed([output("bad")])


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
