"""What all benchmarks share: timing in turns, a table for people, and a line of JSON for programs.

A machine's speed changes while it is measured. So what is compared runs in turns, round after round, and a ratio is the
median of the ratios within a round. On a GPU the time of a launch is the slope between two captured graphs, as in a
step: what a graph's start takes falls out.
"""

import argparse
import itertools
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from compiled_llm.api import tables
from compiled_llm.bench.program_turns import wait_for_turn
from compiled_llm.ops import native
from compiled_llm.system import hardware

DTYPES = ("auto", "float32", "bfloat16", "float16")  # of --dtype, for engines
TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
STATISTICS: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "min": min}
LEAST_ROUNDS = 5
LEAST_LAUNCHES = 4  # of a graph
CACHED_BYTES = 256 << 20  # more than a processor's or a GPU's caches hold
BATCH_SECONDS = 5e-3  # of calls that are timed together on a CPU

MOST_PROCESSES = 8  # that compile side by side: each has a case's tensors

Name = TypeVar("Name", bound=Hashable)
Value = TypeVar("Value")
Case = TypeVar("Case")
Run = Callable[[int], object]  # a call, given the number of the copy that it reads
Row = dict[str, Any]


class WrongResultError(Exception):
    """What is timed does not compute what it should: its times mean nothing."""


# ---- time ---------------------------------------------------------------------------------------------------------


def in_turns(
    runs: Mapping[Name, Callable[[], Value]], *, rounds: int = 10**9, seconds: float = 10**9, warm_up: int = 1
) -> dict[Name, list[Value]]:
    """What every run gave in every round.

    Args:
        rounds, seconds: it ends after so many rounds, or after so many seconds and ``LEAST_ROUNDS``.
        warm_up: rounds before, which do not count.

    The order is another one each time, and every second round's is that of the round before, backwards.
    """
    found: dict[Name, list[Value]] = {name: [] for name in runs}
    order, shuffle, end = list(runs), random.Random(0).shuffle, 0.0
    for number in range(-warm_up, rounds):
        if number == 0:
            end = time.perf_counter() + seconds
        if number >= LEAST_ROUNDS and time.perf_counter() > end:
            break
        if number % 2:
            order.reverse()
        else:
            shuffle(order)
        for name in order:
            value = runs[name]()
            if number >= 0:
                found[name].append(value)
    return found


def median_ratio(above: Iterable[float], below: Iterable[float]) -> float:
    """The median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def seconds_of(run: Callable[[], object], device: str = "cpu") -> float:
    """Of one call, with what it starts on the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def call_seconds(
    runs: Mapping[Name, Run],
    copies: int,
    device: str,
    *,
    seconds: float,
    rounds: int = 10**9,
    left_out: dict[Any, str] | None = None,
) -> dict[Name, list[float]]:
    """Seconds of a call of each run, in every round, over ``copies`` of what it reads, one after the other.

    On a CPU a figure is the mean of as many calls as take ``BATCH_SECONDS``. On a GPU it is the slope between a graph
    of ``LEAST_LAUNCHES`` or more and one of twice as many; what cannot be captured gets its reason in ``left_out``.
    """
    if device == "cpu":
        batches = {name: _batch(run, copies) for name, run in runs.items()}
        return in_turns(batches, rounds=rounds, seconds=seconds)
    launches = max(LEAST_LAUNCHES, copies)
    graphs: dict[Name, tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]] = {}
    pool = torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for name, run in runs.items():
            try:
                graphs[name] = _captured(run, launches, copies, pool), _captured(run, 2 * launches, copies, pool)
            except Exception as error:  # in foreign code, of any version: no reason to stop
                if left_out is None:
                    raise
                left_out[name] = reason_of(error)

        def slope(short: torch.cuda.CUDAGraph, long: torch.cuda.CUDAGraph) -> float:
            return (_graph_seconds(long) - _graph_seconds(short)) / launches

        slopes = {name: lambda pair=pair: slope(*pair) for name, pair in graphs.items()}
        return in_turns(slopes, rounds=rounds, seconds=seconds)


def copies_of(nbytes: int, most: int = 64) -> int:
    """How many copies of what a call reads are more than caches hold."""
    return min(most, -(-CACHED_BYTES // nbytes))


def _batch(run: Run, copies: int) -> Callable[[], float]:
    numbers = itertools.cycle(range(copies))
    run(next(numbers))
    once = seconds_of(lambda: run(next(numbers)))
    calls = max(1, min(copies, int(BATCH_SECONDS / once)))
    return lambda: seconds_of(lambda: [run(next(numbers)) for _ in range(calls)]) / calls


def _captured(run: Run, launches: int, copies: int, pool: Any) -> torch.cuda.CUDAGraph:
    """Without ``torch.cuda.graph``, which empties the allocator's cache each time."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        for number in range(launches):
            run(number % copies)
    finally:
        graph.capture_end()
    return graph


def _graph_seconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def limit_runs(device: str, dtype: torch.dtype, matmul_size: int | None = None) -> dict[str, tuple[Run, float]]:
    """Calls that reach the machine's limits, with the bytes or operations of one.

    "memory" is a sum over a large tensor on a CPU, a copy on a GPU (read and written); "matmul" a large product.
    """
    size = matmul_size or (8192 if device == "cuda" else 1536)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    large = zeros([CACHED_BYTES // 4], torch.float32, device).fill_(1)
    other = torch.empty_like(large) if device == "cuda" else large
    read: Run = (lambda copy: other.copy_(large)) if device == "cuda" else (lambda copy: large.sum())
    moved = (2.0 if device == "cuda" else 1.0) * large.nbytes
    return {"memory": (read, moved), "matmul": (lambda copy: torch.matmul(a, b), 2.0 * size**3)}


def zeros(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A zeroed tensor where the engine would have it: in huge pages on a CPU."""
    return native.zeros_on(torch.device(device), shape, dtype)


def prepared(job: Callable[[Any], object], todo: Mapping[str, Any], processes: int, seconds: float) -> list[str]:
    """Runs ``job`` for all values of ``todo`` in processes of their own, so that kernels lie compiled on disk.

    Returns:
        What failed, and why. What is not done in ``seconds`` is compiled when it is run.
    """
    end, failed = time.monotonic() + seconds, []
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # whose end stops what still runs
        results = [(name, pool.apply_async(job, (given,))) for name, given in todo.items()]
        for name, result in results:
            try:
                result.get(max(0.0, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                break
            except Exception as error:
                failed.append(f"{name}: {reason_of(error)}")
    return failed


def add_case_flags(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Of benchmarks whose cases are timed one after the other. ``seconds``: of a case by default."""
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    add("--dtype", choices=TORCH_DTYPES, default="bfloat16", help="the model's")
    add("--seconds", type=float, default=seconds, help=f"for each case, without its preparation (default: {seconds:g})")
    add("--limit", type=float, default=1e9, metavar="SECONDS", help="for all cases; the first are the most wanted")
    add("--compile-seconds", type=float, default=120, metavar="SECONDS", help="on a GPU (default: 120)")
    add("--statistic", choices=STATISTICS, default="median", help="min on a machine that others use")
    add("--threads", type=int, default=torch.get_num_threads(), help="of torch, on the CPU")
    tables.add_json_flag(parser)


def run_cases(
    args: argparse.Namespace,
    cases: Mapping[str, Case],
    compiles: Callable[[tuple[Case, argparse.Namespace]], object],
    measure: Callable[[Case], list[Row]],
) -> Iterator[list[Row]]:
    """The rows of each case for which ``--limit`` leaves time; a row's ``left_out`` is said.

    Args:
        compiles: runs a case once; on a GPU for all of them in processes of their own, before any is measured.
    """
    if args.device == "cuda":
        processes = max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) - 1))
        todo = {name: (case, args) for name, case in cases.items()}
        for reason in prepared(compiles, todo, processes, args.compile_seconds):
            print(f"not compiled: {reason}", flush=True)
    wait_for_turn()
    end, said = time.perf_counter() + args.limit, set[str]()
    with torch.inference_mode():
        for name, case in cases.items():
            if time.perf_counter() > end:
                print(f"{name}: left out, no time", flush=True)
                continue
            try:
                rows = measure(case)
            except WrongResultError as error:
                raise WrongResultError(f"{name}: {error}") from error
            yield rows
            for reason in [f"{way} is left out: {why}" for way, why in rows[0]["left_out"].items()]:
                if reason not in said:
                    print(f"    {reason}", flush=True)
                said.add(reason)


def reason_of(error: Exception) -> str:
    """An error of foreign code in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# ---- the result -----------------------------------------------------------------------------------------------------


def has_gpu(program: str, device: str) -> bool:
    """Whether ``device`` is there; says so if it is not."""
    if device == "cuda" and not torch.cuda.is_available():
        print(f"{program}: no CUDA GPU here (torch.cuda.is_available() is False)", file=sys.stderr)
        return False
    return True


def finish(
    benchmark: str,
    result: Mapping[str, Any],
    path: Path | None,
    *,
    device: torch.device | str = "cpu",
    details: Mapping[str, Any] | None = None,
) -> None:
    """Print the result, and on what machine it was measured, as one line of JSON; write it to ``path`` with details."""
    machine = hardware.describe(torch.device(device))
    tables.finish({"benchmark": benchmark, **result, "machine": machine}, path, details)
