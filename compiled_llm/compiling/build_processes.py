"""Processes that compile for this one (build_worker.py), started ahead where it is clear that they will be needed.

Jobs go one way, compiled code the other.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, NamedTuple, cast

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

    Args:
        target: the GPU that it compiles for; None for this CPU.
        niceness: how much higher than this process's, up to 19: that leaves the cores to others that want them.
    """

    def __init__(self, target: GpuTarget | None = None, niceness: int = 0) -> None:
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
            process_group=0,  # Ctrl-C on a terminal is for the program that asks
        )
        if niceness:
            with contextlib.suppress(ProcessLookupError):  # it has ended already, as its first job will say
                own = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PROCESS, self._process.pid, min(19, own + niceness))

    def build(self, job: Job, settings: Mapping[str, Any] | None = None) -> Built:
        """What it makes of a job; waits for it. ``settings``: ``code_settings()`` of the code; None: as they are."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            send(self._process.stdin, (job, code_settings() if settings is None else settings))
            return receive(self._process.stdout)
        except (EOFError, OSError, ValueError) as error:  # the last where another thread has ended it
            self.end()
            return Built(b"", {}, f"the process that compiled it ended: {error!r}")

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """End it, and the C++ compilers that it has started."""
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what could not be sent
                cast(IO[bytes], stream).close()


class BuildProcesses:
    """Those of one start, which end with ``close``, or with this object where the start fails before.

    ``target``, ``niceness``: as of ``BuildProcess``.
    """

    def __init__(self, target: GpuTarget | None = None, niceness: int = 0) -> None:
        self._target, self._niceness = target, niceness
        self._all: list[BuildProcess] = []
        self._idle: list[BuildProcess] = []
        self._lock = threading.RLock()  # garbage may be collected within, and an engine that is dropped closes this
        self._finalizer = weakref.finalize(self, _end, self._all, os.getpid())

    def start(self, count: int) -> None:
        """Start so many, for jobs to come."""
        for _ in range(count):
            self._idle.append(self._start())

    def ages(self) -> list[float]:
        """For how many seconds each has run."""
        return [time.monotonic() - process.started for process in self._all]

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def build(self, job: Job, settings: Mapping[str, Any] | None = None) -> Built:
        """Give a job to one that is idle, or to a new one. May be called from several threads."""
        with self._lock:
            if self.closed:
                return Built(b"", {}, "the engine was closed")
            process = self._idle.pop() if self._idle else self._start()
        built = process.build(job, settings)
        if not process.has_ended:
            with self._lock:
                self._idle.append(process)
        return built

    def close(self) -> None:
        with self._lock:
            self._finalizer()

    def _start(self) -> BuildProcess:
        self._all.append(process := BuildProcess(self._target, self._niceness))
        return process


def _end(processes: Iterable[BuildProcess], owner: int) -> None:
    """A fork of the process ``owner``, which started them, leaves them alone."""
    if os.getpid() == owner:
        for process in processes:
            process.end()
