"""How long a decode's and a prefill's attention takes on a GPU, by itself, beside torch's own.

    python3 scripts/bench/probe_attention.py --output FOLDER            # a minute on 16 cores and a GPU of Hopper
    python3 scripts/bench/probe_attention.py --output FOLDER --dry-run  # in Triton's interpreter, results alone

Processes compile, run and check all launches first, side by side. Then each is timed, in microseconds a launch:

    hot   50 launches in a graph, back to back
    cold  as in a step: 208 MB are read before each launch; the time of a graph that only reads is subtracted

Both are slopes between a short and a long graph. The percentage is the time that the bytes of keys and values need at
4.43 TB/s, over the cold time. ``engine`` is the op of a step: it turns queries and keys, writes the cache and attends.
``cudnn`` and ``flash`` are backends of F.scaled_dot_product_attention on keys that are contiguous already.
"""

import argparse
import json
import multiprocessing
import os
import queue
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import own_checkout
import torch
from probe_attention_steps import CACHES, Decode, Prefill
from turns import wait_for_turn

from compiled_llm.api.command_line import FlagParser

_ = own_checkout
READ_LIMIT = 4.43e12  # bytes a second that one NVIDIA H200 was seen to read
LENGTHS = {
    "1x64": [64], "1x384": [384], "1x1k": [1025], "1x8k": [8193], "1x32k": [32769],
    "8x1k": [1025] * 8, "32x1k": [1025] * 32, "256x1k": [1025] * 256,
    "32x8k": [8193] * 32, "skewed": [32769] + [1025] * 31,
}  # fmt: skip
DRY_LENGTHS = {"1x64": [64], "1x130": [130], "2x70": [70, 33]}

PREFILLS = ((2048, 0), (2048, 6144), (8192, 0))


class Job(NamedTuple):
    """What is checked and timed."""

    kind: str  # "decode", "sdpa", "prefill" or "sdpa prefill"
    case: str
    cache: str
    heads: int
    normed: bool
    name: str

    @property
    def key(self) -> str:
        return f"{self.kind} {self.case} {self.cache} h{self.heads}{' norms' if self.normed else ''}: {self.name}"


def jobs(args: argparse.Namespace) -> list[Job]:
    """The most wanted first: the last ones are left out where time is short."""
    found: list[Job] = []
    lengths = DRY_LENGTHS if args.dry_run else LENGTHS

    def add(case: str, cache: str, heads: int, names: tuple[str, ...], kind: str = "decode") -> None:
        if case in lengths or "prefill" in kind:
            found.extend(Job(kind, case, cache, heads, heads == 16 and kind == "decode", name) for name in names)

    for case in DRY_LENGTHS if args.dry_run else ():
        for cache, heads in (("bf16", 16), ("bf16", 32), ("int8", 32), ("fp8", 16)):
            add(case, cache, heads, ("engine",))
    if args.dry_run:
        return found
    for cache in CACHES:
        for case in LENGTHS:
            add(case, cache, 32, ("engine",))
    for cache in CACHES:
        for case in ("1x1k", "32x1k"):
            add(case, cache, 16, ("engine",))
    for tokens, context in PREFILLS:
        add(f"{tokens}+{context}", "bf16", 32, ("engine",), "prefill")
        if not context:
            add(f"{tokens}+{context}", "bf16", 32, ("cudnn", "flash"), "sdpa prefill")
    for case in LENGTHS:
        if case != "skewed":
            add(case, "bf16", 32, ("cudnn", "flash"), "sdpa")
    return found


class Steps:
    """The steps of jobs, each made once."""

    def __init__(self, args: argparse.Namespace, keeps: bool) -> None:
        self._keeps = keeps  # else the last one alone
        self._lengths = DRY_LENGTHS if args.dry_run else LENGTHS
        self._device = "cpu" if args.dry_run else "cuda"
        self._made: dict[tuple[Any, ...], Any] = {}

    def of(self, job: Job) -> tuple[Any, Any]:
        """A job's step, and what it runs."""
        if "prefill" in job.kind:
            tokens, context = map(int, job.case.split("+"))
            step = self._once(Prefill, tokens, context, job.heads, self._device)
            return step, step.sdpa(job.name) if "sdpa" in job.kind else step.engine()
        step = self._once(Decode, tuple(self._lengths[job.case]), job.cache, job.heads, job.normed, self._device)
        if job.kind == "sdpa":
            return step, step.sdpa(job.name)
        return step, step.engine()

    def _once(self, kind: type, *arguments: Any) -> Any:
        key = (kind, *arguments)
        if key not in self._made:
            if not self._keeps:
                self._made.clear()
                torch.cuda.empty_cache()
            self._made[key] = kind(*arguments)
        return self._made[key]


def check_jobs(args: argparse.Namespace, wanted: Any, results: Any) -> None:
    """In a process of its own: compile, run and check until there is nothing left to do or the GPU gives an error."""
    torch.set_num_threads(1)
    steps = Steps(args, False)
    while (job := wanted.get()) is not None:
        start, result = time.perf_counter(), {}
        try:
            step, run = steps.of(job)
            result = {"checked": {}} if "sdpa" in job.kind and run() is not None else {"checked": step.check(run)}
            if not args.dry_run:
                torch.cuda.synchronize()
        except Exception as error:
            result = {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
            result["trace"] = traceback.format_exc()[-2000:]
        results.put((job, result | {"seconds": time.perf_counter() - start}))
        if "CUDA error" in result.get("failed", ""):
            results.close()
            results.join_thread()
            os._exit(1)


def checked(args: argparse.Namespace, wanted: list[Job], end: float) -> dict[Job, dict[str, Any]]:
    """What processes say of each job, until the time ``end``. A process that the GPU has stopped is replaced."""
    context = multiprocessing.get_context("fork")  # torch is imported, CUDA not yet started
    to_do, done, found = context.Queue(), context.Queue(), {}
    for job in wanted:
        to_do.put(job)
    for _ in range(args.processes):
        to_do.put(None)

    def start() -> multiprocessing.process.BaseProcess:
        worker = context.Process(target=check_jobs, args=(args, to_do, done), daemon=True)
        worker.start()
        return worker

    workers = [start() for _ in range(args.processes)]
    while len(found) < len(wanted) and time.perf_counter() < end:
        workers = [start() if worker.exitcode == 1 else worker for worker in workers]
        try:
            job, result = done.get(timeout=1)
        except queue.Empty:
            continue
        found[job] = result
        record(args, {"job": job.key, **result})
    for worker in workers:
        worker.terminate()
    return found


def record(args: argparse.Namespace, line: dict[str, Any]) -> None:
    with (args.output / "attention.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


class Timer:
    """Times launches in graphs of two lengths, so that what a graph takes by itself is not counted."""

    def __init__(self) -> None:
        self._data = torch.randn(52_000_000, device="cuda")
        self._stream = torch.cuda.Stream()
        self._data.sum()
        torch.cuda.synchronize()
        self._reading = self._slope([self._graph(None, count, True) for count in (20, 4)], 16)

    def _graph(self, run: Any, count: int, cold: bool) -> torch.cuda.CUDAGraph:
        # torch.cuda.graph would collect garbage first, a quarter of a second each time.
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin()
            try:
                for _ in range(count):
                    if cold:
                        self._data.sum()
                    if run is not None:
                        run()
            finally:
                graph.capture_end()
        return graph

    def _slope(self, graphs: list[torch.cuda.CUDAGraph], launches: int, replays: int = 9) -> float:
        """Microseconds a launch: the median over replays of the long and the short graph in turns."""
        differences = []
        for _ in range(replays):
            taken = []
            for graph in graphs:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                taken.append(start.elapsed_time(end))
            differences.append((taken[0] - taken[1]) / launches * 1e3)
        return statistics.median(differences[2:])

    def times(self, run: Any, long: bool) -> dict[str, float]:
        run()
        torch.cuda.synchronize()
        counts = (6, 2) if long else (50, 10)
        hot = self._slope([self._graph(run, count, False) for count in counts], counts[0] - counts[1])
        if long:
            return {"hot": hot}
        both = self._slope([self._graph(run, count, True) for count in (20, 4)], 16)
        return {"hot": hot, "cold": both - self._reading, "reading": self._reading}


def timed(args: argparse.Namespace, wanted: list[Job], end: float) -> list[dict[str, Any]]:
    rows = []
    steps, timer = Steps(args, True), Timer()
    for job in wanted:
        if time.perf_counter() > end:
            record(args, {"job": job.key, "left_out": "no time"})
            continue
        try:
            step, run = steps.of(job)
            times = timer.times(run, "prefill" in job.kind)
        except Exception as error:
            record(args, {"job": job.key, "failed": f"{type(error).__name__}: {error}"[:500]})
            continue
        row = {"job": job.key, **job._asdict(), "us": times}
        if "prefill" in job.kind:
            row["tflop_per_s"] = step.flops / times["hot"] / 1e6
        else:
            row |= {"gb_per_s": step.bytes / times["cold"] / 1e3}
            row["of_limit"] = step.bytes / times["cold"] * 1e6 / READ_LIMIT
        rows.append(row)
        record(args, row)
    return rows


def main() -> int:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with TRITON_INTERPRET=1")
    parser.add_argument("--compile-seconds", type=float, default=45, help="to compile and check (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30, help="to measure (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=min(15, os.cpu_count() or 1))
    parser.add_argument("--only", default="", help="jobs that have this in their names")
    args = parser.parse_args()
    start = time.perf_counter()
    args.output.mkdir(parents=True, exist_ok=True)
    wanted = [job for job in jobs(args) if args.only in job.key]
    found = checked(args, wanted, start + args.compile_seconds)
    good = [job for job in wanted if "checked" in found.get(job, {})]
    print(f"{len(good)} of {len(wanted)} right after {time.perf_counter() - start:.0f} s", flush=True)
    wait_for_turn()
    rows = [] if args.dry_run else timed(args, good, time.perf_counter() + args.seconds)
    for row in rows:
        us = row["us"]
        rate = f"{row['tflop_per_s']:6.0f} TFLOP/s" if "tflop_per_s" in row else f"{row['of_limit']:6.0%}"
        print(f"{row['job']:66} hot {us['hot']:8.2f} cold {us.get('cold', 0):8.2f} {rate}")
    for job in wanted:
        if job not in good:
            print(f"{job.key}: {found.get(job, {}).get('failed', 'not done in time')[:150]}")
    print(f"all: {time.perf_counter() - start:.0f} s")
    return 0 if len(good) == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
