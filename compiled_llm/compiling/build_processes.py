"""Processes that compile for this one (build_worker.py), started ahead where it is clear that they will be needed.

Jobs go one way, compiled code the other.
"""

import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, NamedTuple

from torch import Tensor

from compiled_llm.compiling.argument_specs import TensorSpec, spec_of
from compiled_llm.compiling.gpu_properties import GpuTarget
from compiled_llm.compiling.keys import code_settings
from compiled_llm.system.child_process import with_package


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
        payload: what ``load_ready`` takes; empty if there is an error.
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


class BuildProcess:
    """One process. It imports the compiler at once, which takes seconds, and then waits for jobs.

    ``target``: the GPU that it compiles for; None for this CPU.
    """

    def __init__(self, target: GpuTarget | None = None) -> None:
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "compiled_llm.compiling.build_worker",
                *([] if target is None else [target.as_text()]),
            ],  # -P: no module of the working directory
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=with_package(os.environ),
        )

    def build(self, job: Job) -> Built:
        """What it makes of a job; waits for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            send(self._process.stdin, (job, code_settings()))
            return receive(self._process.stdout)
        except (EOFError, OSError) as error:
            self.end()
            return Built(b"", {}, f"the process that compiled it ended: {error!r}")

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


class BuildProcesses:
    """Those of one start, which end with ``close``, or with this object where the start fails before.

    ``target``: as of ``BuildProcess``.
    """

    def __init__(self, target: GpuTarget | None = None) -> None:
        self._target = target
        self._all: list[BuildProcess] = []
        self._idle: list[BuildProcess] = []
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _end, self._all, os.getpid())

    def start(self, count: int) -> None:
        """Start so many, for jobs to come."""
        for _ in range(count):
            self._idle.append(self._start())

    def ages(self) -> list[float]:
        """For how many seconds each has run."""
        return [time.monotonic() - process.started for process in self._all]

    def build(self, job: Job) -> Built:
        """Give a job to one that is idle, or to a new one. May be called from several threads."""
        with self._lock:
            process = self._idle.pop() if self._idle else self._start()
        built = process.build(job)
        if not process.has_ended:
            with self._lock:
                self._idle.append(process)
        return built

    def close(self) -> None:
        self._finalizer()

    def _start(self) -> BuildProcess:
        self._all.append(process := BuildProcess(self._target))
        return process


def _end(processes: Iterable[BuildProcess], owner: int) -> None:
    """A fork of the process ``owner``, which started them, leaves them alone."""
    if os.getpid() == owner:
        for process in processes:
            process.end()
