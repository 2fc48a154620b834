"""Compiling side by side: a start gives what its cache lacks to other processes, one for each core."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from compiled_llm.child_process import with_package
from compiled_llm.compiling.cache import CompileCache, Fields, code_settings
from compiled_llm.compiling.messages import Built, Job, receive, send
from compiled_llm.ops.user_warnings import at_callers_line, warn
from compiled_llm.progress import StartProgress
from compiled_llm.resources import granted_cores

_SECONDS_A_PROCESS = 8.0  # about, for its imports, and for the header that all C++ of a machine shares


def build_missing(
    cache: CompileCache, jobs: Sequence[Job], num_workers: int | None, progress: StartProgress
) -> dict[str, float]:
    """Compile what ``cache`` does not hold, side by side in other processes, and store it there.

    What fails to compile there is left to this process, with a warning.

    Args:
        num_workers: how many processes; None for one on each core where that is faster, 0 to leave all to this process.

    Returns what is left to this process: name -> about how many seconds it takes.
    """
    missing: list[tuple[Job, Fields, str]] = []
    for job in jobs:
        key = cache.key_of(job.name, job.recipe(), job.args)
        found = cache.find(key)
        if isinstance(found, str):
            missing.append((job, key, found))
    workers = _useful_workers(len(missing)) if num_workers is None else num_workers
    missing.sort(key=lambda item: -item[0].seconds)  # a long one that comes last would keep one core busy
    left = {job.name: job.seconds for job, _, _ in missing}
    if not missing or workers == 0:
        return left
    workers = min(workers, len(missing))
    thread = threading.local()
    processes: list[subprocess.Popen] = []

    def build(item: tuple[Job, Fields, str]) -> None:
        job, key, reason = item
        started = time.perf_counter()
        stage.begin(job.name)
        if not hasattr(thread, "process"):
            thread.process = _start_process()
            processes.append(thread.process)
        built = _built_by(thread.process, job)
        if thread.process.poll() is not None:
            del thread.process  # another one takes the next job
        if built.error:
            warn(f"{job.name} could not be compiled beside others: {built.error}")
        else:
            cache.store(key, built.payload, built.facts)
            cache.built[job.name] = (reason, time.perf_counter() - started)
        stage.finish(job.name)

    title = f"compiling graphs in {workers} processes"
    seconds = _SECONDS_A_PROCESS + sum(left.values()) / workers
    shown = progress.stage(title, left, seconds=seconds, found=len(jobs) - len(missing))
    try:
        with shown as stage, ThreadPoolExecutor(workers) as pool:
            list(pool.map(at_callers_line(build), missing))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return {name: seconds for name, seconds in left.items() if name not in cache.built}


def _built_by(process: subprocess.Popen, job: Job) -> Built:
    """What a process makes of a job; waits for it."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        send(process.stdin, (job, code_settings()))
        return receive(process.stdout)
    except (EOFError, OSError) as error:
        process.kill()
        process.wait()
        return Built(b"", {}, f"the process that compiled it ended: {error!r}")


def _start_process() -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "compiled_llm.compiling.build_worker"],  # -P: no module of the working directory
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=with_package(os.environ),
    )


def _useful_workers(num_jobs: int) -> int:
    """Processes that save time: one for each core. A single job is as fast in this process, which has torch loaded."""
    workers = min(granted_cores(), num_jobs)
    return workers if workers > 1 else 0
