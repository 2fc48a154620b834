"""Compiling side by side: a start gives what its cache lacks to other processes, one for each core."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from compiled_llm.compiling.build_processes import BuildProcesses, Job
from compiled_llm.compiling.cache import CompileCache
from compiled_llm.compiling.costs import Cost
from compiled_llm.compiling.forecast import expected_cost, expected_start, finish_times
from compiled_llm.compiling.keys import Fields
from compiled_llm.ops.user_warnings import at_callers_line, warn
from compiled_llm.system.progress import StartProgress
from compiled_llm.system.resources import granted_cores

Missing = list[tuple[Job, Fields, str]]  # what is to be compiled: its key, and why it is not there


def build_missing(
    cache: CompileCache,
    jobs: Sequence[Job],
    num_workers: int | None,
    progress: StartProgress,
    processes: BuildProcesses | None = None,
    *,
    needs_process: bool = False,
) -> dict[str, Cost | None]:
    """Compile what ``cache`` does not hold, side by side in other processes, and store it there.

    What fails to compile there is left to this process, with a warning.

    Args:
        num_workers: how many processes; None for one on each core where that is faster, 0 to leave all to this process.
        processes: that were started ahead; all have ended when this returns.
        needs_process: whether this process could not keep what it compiles itself, as that for a GPU.

    Returns what is left to this process: name -> what it should cost, None where that is not known.
    """
    processes = processes or BuildProcesses()
    try:
        missing: Missing = []
        for job in jobs:
            key = cache.key_of(job.name, job.recipe(), job.args, job.depends)
            found = cache.find(key)
            if isinstance(found, str):
                missing.append((job, key, found))
        if num_workers is None:
            workers = (_workers_for_gpu if needs_process else useful_workers)(len(missing))
        else:
            workers = num_workers
        workers = min(max(workers, len(processes.ages())), len(missing))
        costs = {job.name: expected_cost(cache, key) for job, key, _ in missing}
        if workers:
            _build(cache, missing, costs, workers, processes, progress, len(jobs) - len(missing))
    finally:
        processes.close()
    return {name: cost for name, cost in costs.items() if name not in cache.built}


def _build(
    cache: CompileCache,
    missing: Missing,
    costs: dict[str, Cost | None],
    workers: int,
    processes: BuildProcesses,
    progress: StartProgress,
    found: int,
) -> None:
    """``found``: how many functions were on disk."""

    def build(item: tuple[Job, Fields, str]) -> None:
        job, key, reason = item
        started = time.perf_counter()
        stage.begin(job.name)
        built = processes.build(job)
        if built.error:
            warn(f"{job.name} could not be compiled beside others: {built.error}")
        else:
            cache.store(key, built.payload, built.facts)
            cache.built[job.name] = (reason, time.perf_counter() - started)
        stage.finish(job.name)

    # A long one that comes last would keep one core busy.
    missing = sorted(missing, key=lambda item: _length(item[0], costs), reverse=True)
    known = {job.name: cost for job, _, _ in missing if (cost := costs[job.name]) is not None}
    plan = None
    if len(known) == len(missing):
        ages = (processes.ages() + [0.0] * workers)[:workers]
        begin = [max(0.0, expected_start(cache) - age) for age in ages]
        plan = finish_times(known, granted_cores(), begin)
    weights = {job.name: _length(job, costs) for job, _, _ in missing}
    title = f"compiling graphs in {workers} processes"
    shown = progress.stage(title, weights, plan=plan, foreseen=plan is not None, found=found)
    with shown as stage, ThreadPoolExecutor(workers) as pool:
        list(pool.map(at_callers_line(build), missing))


def _length(job: Job, costs: dict[str, Cost | None]) -> float:
    """How long a job takes beside the others."""
    cost = costs[job.name]
    return job.weight if cost is None or None in costs.values() else cost.own + cost.cpp


def useful_workers(num_jobs: int) -> int:
    """Processes that save time: one for each core. A single job is as fast in this process, which has torch loaded."""
    workers = min(granted_cores(), num_jobs)
    return workers if workers > 1 else 0


def _workers_for_gpu(num_jobs: int) -> int:
    """One at least. The steps of all buckets take as long: a few more than there are cores go all together."""
    cores = granted_cores()
    return num_jobs if num_jobs <= 2 * cores else cores
