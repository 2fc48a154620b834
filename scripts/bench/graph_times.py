"""The time of a launch among others on a GPU, as in a decode: the slope between two captured graphs."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

DISTINCT = 256 << 20  # bytes that the launches of the shorter graph read, at least: several times the L2 cache
LEAST_ROUNDS = 3

Run = Callable[[int], Any]  # of which copy of what it reads


def launches_for(nbytes: int) -> int:
    """Of the shorter graph, where a launch reads ``nbytes``."""
    return 4 if nbytes > DISTINCT else max(16, DISTINCT // nbytes)


def slopes(
    runs: dict[str, Run],
    launches: int,
    seconds: float,
    left_out: dict[str, str],
    statistic: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """Seconds of a launch of each: ``statistic`` of rounds in turns, for ``seconds`` of all, but three rounds at least.

    What cannot be captured gets its reason in ``left_out``.

    A graph has ``launches`` of them, another twice as many: so what a graph's start takes falls out. Each has run once
    before.
    """
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]] = {}
    times: dict[str, list[float]] = {name: [] for name in runs}
    pool = torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for name, run in runs.items():
            try:
                graphs[name] = _captured(run, launches, pool), _captured(run, 2 * launches, pool)
            except Exception as error:  # in foreign code, of any version: no reason to stop
                left_out[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        end, rounds = time.perf_counter() + seconds, 0
        while rounds <= LEAST_ROUNDS or time.perf_counter() < end:
            for name, (short, long) in graphs.items():
                difference = _seconds(long) - _seconds(short)
                if rounds:  # the first one warms up
                    times[name].append(difference / launches)
            rounds += 1
    return {name: statistic(times[name]) for name in graphs}


def _captured(run: Run, launches: int, pool: Any) -> torch.cuda.CUDAGraph:
    """Without ``torch.cuda.graph``, which empties the allocator's cache each time."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        for copy in range(launches):
            run(copy)
    finally:
        graph.capture_end()
    return graph


def _seconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
