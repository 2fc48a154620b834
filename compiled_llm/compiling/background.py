"""Compiling while the engine serves: what the cache holds is loaded, and other processes compile the rest.

What another engine compiles at that time is waited for: replicas of one server need the same. Threads wait for all.
What is finished lies in a queue, from which the engine takes it between two steps: so a step waits for nothing, and
asks with no lock.
"""

import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from compiled_llm.compiling.build_processes import BuildProcesses, Built, Job
from compiled_llm.compiling.cache import CompileCache
from compiled_llm.compiling.keys import Fields, code_settings
from compiled_llm.compiling.ready_code import load_ready


class Finished(NamedTuple):
    """A job that has ended.

    Attributes:
        call: the compiled function; None where there is an ``error``.
        facts: about the code.
        cache: "hit" or "miss", and the ``reason``, as in ``GraphReport``.
        seconds: what finding or compiling it took.
        error: why it could not be compiled; empty if it was.
    """

    job: Job
    call: Callable | None
    facts: Fields
    cache: str
    reason: str
    seconds: float
    error: str = ""


class BackgroundBuilds:
    """Loads or compiles ``jobs``, in their order, from ``begin`` on until all are ``finished`` or ``close``.

    It is made where torch's settings are the engine's: they go into the code.

    Args:
        num_workers: processes that compile at the same time.
        processes: none is started yet.
        head_start: seconds, after which it begins by itself.

    Attributes:
        finished: what has ended, and was not taken yet.
    """

    def __init__(
        self,
        cache: CompileCache,
        jobs: Sequence[Job],
        num_workers: int,
        processes: BuildProcesses,
        head_start: float = 0.0,
    ) -> None:
        self.finished: deque[Finished] = deque()
        # Not an Event, whose lock is no re-entrant one: garbage may be collected within, and that may end this.
        self._may_begin: queue.SimpleQueue[None] = queue.SimpleQueue()
        # The threads know nothing of this object, so an engine that is dropped ends them as one that is closed.
        threads: list[threading.Thread] = []
        arguments = cache, deque(jobs), num_workers, processes, code_settings(), self.finished, threads
        self._finalizer = weakref.finalize(self, _end, processes, threads, self._may_begin)
        _start(threads, _find, self._may_begin, head_start, *arguments)

    def begin(self) -> None:
        """Do not wait for the end of the head start."""
        self._may_begin.put(None)

    def close(self) -> None:
        """End the processes, also in the middle of a job, and wait for the threads: a second where one loads code."""
        self._finalizer()


def _start(threads: list[threading.Thread], work: Callable, *arguments: Any) -> None:
    threads.append(threading.Thread(target=work, args=arguments, name=f"graphs {len(threads)}", daemon=True))
    threads[-1].start()


def _end(processes: BuildProcesses, threads: Sequence[threading.Thread], may_begin: queue.SimpleQueue) -> None:
    """A thread that is in torch when the interpreter ends would end the process by a signal."""
    processes.close()
    may_begin.put(None)
    for thread in threads:  # the first one adds the others before it ends
        if thread is not threading.current_thread():
            thread.join()


def _find(
    may_begin: queue.SimpleQueue,
    head_start: float,
    cache: CompileCache,
    jobs: deque[Job],
    num_workers: int,
    processes: BuildProcesses,
    settings: Fields,
    finished: deque[Finished],
    threads: list[threading.Thread],
) -> None:
    """Load what is on disk, and start the threads that have the rest compiled."""
    with contextlib.suppress(queue.Empty):
        may_begin.get(timeout=head_start)
    missing: deque[tuple[Job, str]] = deque()
    while jobs and not processes.closed:
        job, started = jobs.popleft(), time.perf_counter()
        found = _load(cache, job)
        if isinstance(found, str):
            missing.append((job, found))
        else:
            finished.append(Finished(job, *found, "hit", "", time.perf_counter() - started))
    for _ in range(min(num_workers, len(missing))):
        _start(threads, _compile, cache, missing, processes, settings, finished)


def _compile(
    cache: CompileCache,
    missing: deque[tuple[Job, str]],
    processes: BuildProcesses,
    settings: Fields,
    finished: deque[Finished],
) -> None:
    """Take jobs until none is left, and have each compiled."""
    while not processes.closed:
        try:
            job, reason = missing.popleft()
        except IndexError:
            return
        started, outcome = time.perf_counter(), "hit"
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(Exception):  # of a recipe: the process that compiles it says what is wrong
                key = cache.key_of(job.name, job.recipe(), job.args, job.depends)
                stack.enter_context(cache.building(key, lambda: processes.closed))
            found = _load(cache, job)  # another engine may have compiled it meanwhile
            if isinstance(found, str):
                outcome, built = "miss", processes.build(job, settings)
                found = built.error or _load(cache, job, built)
        seconds = time.perf_counter() - started
        if isinstance(found, str):
            finished.append(Finished(job, None, {}, "miss", reason, seconds, found))
        else:
            finished.append(Finished(job, *found, outcome, reason if outcome == "miss" else "", seconds))


def _load(cache: CompileCache, job: Job, built: Built | None = None) -> tuple[Callable, Fields] | str:
    """The compiled function and facts about it; or why there is none. ``built``: is stored before."""
    try:
        function = job.recipe()
        key = cache.key_of(job.name, function, job.args, job.depends)
        if built is not None:
            cache.store(key, built.payload, built.facts)
        found = cache.find(key)
        return found if isinstance(found, str) else (load_ready(found.payload, function.__globals__), found.facts)
    except Exception as error:  # whatever it is: the job is compiled anew, or the next step says it
        return f"the code does not load: {type(error).__name__}: {error}"
