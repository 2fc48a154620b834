"""What the engine says of requests that failed: a warning where all of a call did, and whether memory ran out."""

from collections.abc import Sequence

from compiled_llm.api.outputs import RequestOutput
from compiled_llm.ops.user_warnings import warn
from compiled_llm.scheduling.worker import WorkerFailedError as WorkerFailedError

_MAX_REASONS = 3
_MAX_CHARACTERS = 500  # of a reason


class RequestsFailedWarning(UserWarning):
    """All requests of one call ended with ``finish_reason="error"``; says why, and what to do."""


def warn_if_all_failed(outputs: Sequence[RequestOutput]) -> None:
    """One warning for the whole call if each of ``outputs`` is an error."""
    completions = [completion for output in outputs for completion in output.outputs]
    if not completions or any(completion.finish_reason != "error" for completion in completions):
        return
    reasons = list(dict.fromkeys(f"{completion.stop_reason!s:.{_MAX_CHARACTERS}}" for completion in completions))
    whole = "the request" if len(outputs) == 1 else f"all {len(outputs)} requests"
    if len(reasons) > _MAX_REASONS:
        reasons[_MAX_REASONS:] = [f"and {len(reasons) - _MAX_REASONS} other reasons"]
    warn(f"{whole} of this call failed: {'; '.join(reasons)}", RequestsFailedWarning)


# How memory that could not be had is told by Python, CUDA, torch's allocator for CPUs, C++ and the system.
_OUT_OF_MEMORY = (
    "memoryerror",
    "outofmemoryerror",
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out: Python's, torch's on any device, or one of a worker process.

    Only Python and torch's CUDA have types for it, and what comes from another process has lost its type.
    """
    text = f"{type(error).__name__}: {error}".lower()
    return isinstance(error, MemoryError) or any(part in text for part in _OUT_OF_MEMORY)
