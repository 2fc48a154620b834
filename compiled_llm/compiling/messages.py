"""What a start and the processes that compile for it send each other: jobs one way, compiled code the other."""

import pickle
from collections.abc import Callable, Mapping
from typing import IO, Any, NamedTuple

from torch import Tensor

from compiled_llm.compiling.argument_specs import TensorSpec, spec_of


class Job(NamedTuple):
    """A function to compile.

    Attributes:
        name: of the compiled function.
        recipe: can be pickled, and returns the function in any process.
        args: like those that the function is called with; of tensors, their specs count.
        threads: torch's number of threads, which goes into the code.
        weight: about how long it takes beside others.
        depends: of its key, as ``CompileCache.key_of`` takes it.
        sizes: its dynamic sizes by name, in all combinations that it will be called with, as far as kernels depend on
            them.
    """

    name: str
    recipe: Callable[[], Any]
    args: tuple
    threads: int
    weight: float
    depends: Mapping[str, Any]
    sizes: tuple[Mapping[str, int], ...] = ()


class Built(NamedTuple):
    """A compiled job.

    Attributes:
        payload: what ``compiler.from_bytes`` takes; empty if there is an error.
        facts: about the code, JSON values.
        error: why it could not be compiled; empty if it was.
    """

    payload: bytes
    facts: dict[str, Any]
    error: str


class _Pickler(pickle.Pickler):
    """Tensors go as their specs: code depends on nothing else of them. A tensor that occurs twice stays one."""

    def reducer_override(self, obj: Any) -> Any:
        return (TensorSpec.make, (spec_of(obj),)) if isinstance(obj, Tensor) else NotImplemented


def send(stream: IO[bytes], message: Any) -> None:
    """Write one message to another process of this program."""
    _Pickler(stream).dump(message)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read one message of another process of this program. ``EOFError`` when it has ended."""
    try:
        return pickle.load(stream)
    except pickle.UnpicklingError as error:
        raise EOFError(f"part of a message is missing: {error}") from error
