"""The kinds of faults that end requests, as the engine counts them."""

# How memory that could not be had is told by Python, CUDA, torch's allocator for CPUs, C++ and the system.
_TEXTS = (
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
    return isinstance(error, MemoryError) or any(part in text for part in _TEXTS)
