"""Host time of a step by part, in steady decoding, and how long the device idles between two steps.

    python scripts/bench/bench_host.py
    python scripts/bench/bench_host.py --device cuda --output DIR

On a CPU the engine is a whole one, but for the model's step, which does nothing and leaves the same tokens each time:
all time is the host's. On a GPU the step is that of ``--shape``, recorded in CUDA graphs without compiling, since the
host does the same for a graph whatever is in it; ``--compiled`` compiles it. There each number of requests has an
engine in a process of its own, which start at the same time and are measured one after another: one with graphs beside
which inputs and tokens are copied (manual), and one with graphs that read and write memory of the host (pinned). The
two have to find the same tokens.

Parts are medians over the steps, in microseconds. ``collect`` has no waiting for the device. ``other`` is what is left
of ``Engine.step``: log, interrupts, queues. ``processor`` is the processor time of a whole step, by the mean: it holds
on a machine that others use too. ``idle`` is the time of a step in which no kernel and no copy ran, ``gaps`` the
longest ones with what came before and after, both under torch's profiler; ``wall`` is the time of a step without it.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import own_checkout
import tables
import torch
from workloads import SHAPES

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api.command_line import FlagParser
from compiled_llm.compiling.cuda_graphs import graph_pool
from compiled_llm.ops.pinned import on_device
from compiled_llm.ops.torch_settings import own_settings
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.system import hardware as machine
from compiled_llm.worker import runner as runner_module
from compiled_llm.worker.device import device_context
from compiled_llm.worker.profiler import kernels_of, profiled_events

PARTS = ("schedule", "prepare", "launch", "collect", "update", "outputs", "other")
PROMPT_LEN = 64  # and up to 15 more: blocks are not full at the same step
WARM_STEPS = 24
PROFILED_STEPS = 16
BLOCK_SIZE = 16


@dataclasses.dataclass
class Timed:
    """A function that counts the seconds it takes."""

    function: Callable
    seconds: float = 0.0

    def __call__(self, *args: Any) -> Any:
        started = time.perf_counter()
        result = self.function(*args)
        self.seconds += time.perf_counter() - started
        return result


class Clocks:
    """Seconds of each part of ``engine.step()`` since the engine was made."""

    def __init__(self, engine: CompiledEngine) -> None:
        self._engine, scheduler, runner = engine, engine.scheduler, engine.runner
        scheduler.schedule = self._schedule = Timed(scheduler.schedule)  # type: ignore[method-assign]
        scheduler.update = self._update = Timed(scheduler.update)  # type: ignore[method-assign]
        runner.launch = self._launch = Timed(runner.launch)  # type: ignore[method-assign]
        runner.collect = self._collect = Timed(runner.collect)  # type: ignore[method-assign]

    def read(self) -> tuple[float, ...]:
        """Those of ``PARTS`` but the last, then waiting for the device, and the time."""
        times, counts = self._engine.runner.times, self._engine._core.counts
        # On a CPU the device works while steps are launched.
        waiting = times.execute_seconds - times.launch_seconds if self._engine.runner.device.type == "cuda" else 0.0
        launch = self._launch.seconds - times.prepare_seconds
        collect = self._collect.seconds - waiting
        own = self._schedule.seconds, times.prepare_seconds, launch, collect, self._update.seconds
        return *own, counts.output_seconds, waiting, time.perf_counter()


@contextlib.contextmanager
def started(args: argparse.Namespace, num_requests: int, graphs: str = "manual") -> Iterator[CompiledEngine]:
    """An engine whose largest bucket has ``num_requests``; on a CPU its model's step does nothing."""
    most_tokens = PROMPT_LEN + BLOCK_SIZE + 2 * WARM_STEPS + args.steps + PROFILED_STEPS + num_requests // 4
    sizes: dict[str, Any] = {
        "bucket_sizes": (num_requests,),
        "token_bucket_sizes": (max(512, 2 * num_requests),),
        "max_model_len": 1024,
        "num_kv_blocks": max(16, num_requests * (most_tokens // BLOCK_SIZE + 3)),
        "progress": "off",
    }
    if args.device == "cpu":
        with CompiledEngine(device="cpu", enforce_eager=True, dtype="float32", **sizes) as engine:
            leave_out_steps(engine)
            yield engine
        return
    if not args.compiled:
        runner_module.graph_pool = lambda _, device, *others: graph_pool(graphs, device)
    shape = SHAPES[args.shape]
    with tempfile.TemporaryDirectory(prefix="compiled-llm-") as directory:
        Path(directory, "config.json").write_text(
            json.dumps(shape | {"num_hidden_layers": args.layers or shape["num_hidden_layers"]})
        )
        own = {"model": directory, "load_format": "dummy", "device": args.device, "enforce_eager": not args.compiled}
        own |= {"cuda_graphs": graphs} if args.compiled else {}
        with CompiledEngine(**own, **sizes) as engine:
            yield engine


def leave_out_steps(engine: CompiledEngine) -> None:
    """From now on the model's step does nothing; each row has another token, the same in each step."""
    steps = engine.runner.steps
    logits = {bucket: steps.run_step(bucket) for bucket in steps.buckets}
    steps.last_tokens.copy_(torch.arange(300, 300 + len(steps.last_tokens)))

    def run_step(bucket: Bucket) -> torch.Tensor:
        return logits[bucket]

    steps.run_step = run_step  # type: ignore[method-assign]


def measured(engine: CompiledEngine, num_requests: int, kind: str, num_steps: int) -> dict[str, Any]:
    """Microseconds of a step with ``num_requests`` that decode and whose outputs are of ``kind``."""
    most = engine.runner.limits.max_model_len - PROMPT_LEN - BLOCK_SIZE
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, output_kind=kind)
    for n in range(num_requests):
        prompt = [(7 * i + 13 * n) % 900 for i in range(PROMPT_LEN + n % BLOCK_SIZE)]
        engine.add_request(f"{kind}-{n}", {"prompt_token_ids": prompt}, params)
    for _ in range(num_requests + WARM_STEPS):
        engine.step()
        if all(request.output_token_ids for request in engine.scheduler.running):
            break
    for _ in range(WARM_STEPS):
        engine.step()
    assert len(engine.scheduler.running) == num_requests, "all requests decode"
    gc.collect()
    gc.freeze()
    clocks = engine.clocks  # type: ignore[attr-defined]
    reads, processor, before = [], 0.0, time.perf_counter()
    for _ in range(num_steps):
        first, mark = clocks.read(), time.thread_time()
        engine.step()
        processor += time.thread_time() - mark
        reads.append((first, clocks.read()))
    wall = (time.perf_counter() - before) / num_steps
    gc.unfreeze()
    parts: list[list[float]] = []
    for first, last in reads:
        *own, waiting, whole = (b - a for a, b in zip(first, last, strict=True))
        parts.append([*own, whole - waiting - sum(own), whole - waiting])
    row: dict[str, Any] = {"requests": num_requests, "outputs of": kind}
    medians = [statistics.median(column) * 1e6 for column in zip(*parts, strict=True)]
    row |= dict(zip((*PARTS, "host"), medians, strict=True))
    row["wall"] = wall * 1e6
    row["processor"] = processor / num_steps * 1e6  # on a GPU with what it takes to wait
    if engine.runner.device.type == "cuda":
        row |= idle(engine, wall)
    engine.abort([f"{kind}-{n}" for n in range(num_requests)])
    while engine.has_unfinished_requests():
        engine.step()
    return row


def idle(engine: CompiledEngine, wall: float, num_steps: int = PROFILED_STEPS) -> dict[str, Any]:
    """Microseconds of a step in which the device works on nothing, by torch's profiler.

    ``idle_wall``: the time of a step without the profiler, less the time in which its kernels and copies ran under it.
    """

    def run() -> None:
        for _ in range(num_steps):
            engine.step()

    events = kernels_of(profiled_events(run, on_gpu=True))
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    return idle_of(spans, num_steps, wall * 1e6)


def idle_of(spans: list[tuple[float, float, str]], num_steps: int, wall: float) -> dict[str, Any]:
    """The same of (start, end, name) of all that ran, in the order of their starts; all in microseconds."""
    if len(spans) < 2:
        return {"idle": None, "idle_wall": None, "launches": 0, "gaps": ""}
    gaps, busy, last, last_name = list[tuple[float, str]](), 0.0, spans[0][0], "start"
    for start, end, name in spans:
        gaps.append((start - last, f"{last_name[:24]} > {name[:24]}"))
        busy += max(0.0, end - max(start, last))
        if end > last:
            last, last_name = end, name
    by_place: dict[str, list[float]] = {}
    for gap, place in gaps[1:]:
        by_place.setdefault(place, []).append(max(0.0, gap))
    per_step = {place: sum(found) / num_steps for place, found in by_place.items()}
    # Gaps that come once a step are those around copies and the graph; the others are between its kernels.
    once = {
        place: per_step[place]
        for place, found in by_place.items()
        if num_steps // 2 <= len(found) <= num_steps * 3 // 2
    }
    longest = sorted(once.items(), key=lambda item: -item[1])[:4]
    return {
        "idle": sum(per_step.values()),
        "idle_wall": wall - busy / num_steps,
        "busy": busy / num_steps,
        "launches": round(len(spans) / num_steps, 1),
        "gaps": "; ".join(f"{place} {gap:.1f}" for place, gap in longest),
    }


def call_costs(engine: CompiledEngine, num_calls: int = 200) -> dict[str, float]:
    """Microseconds that the host takes for single calls of which a step on a GPU is made."""
    runner, device = engine.runner, engine.runner.device
    bucket = runner.steps.buckets[0]
    pageable = torch.zeros(48, dtype=torch.int32)
    pinned, large = (torch.zeros(size, dtype=torch.int32, pin_memory=True) for size in (1 << 10, 1 << 18))
    on_gpu, large_on_gpu, places = pinned.to(device), large.to(device), torch.arange(16, device=device)
    first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    plain = torch.cuda.Event()
    for event in (first, second, plain):
        event.record()

    def settings() -> None:
        with own_settings(runner.num_threads):
            pass

    def context() -> None:
        with device_context(device):
            pass

    calls: dict[str, Callable[[], object]] = {
        "own settings": settings,
        "device context": context,
        "new timing event, recorded": lambda: torch.cuda.Event(enable_timing=True).record(),
        "timing event recorded": first.record,
        "plain event recorded": plain.record,
        "elapsed time": lambda: first.elapsed_time(second),
        "event waited for": plain.synchronize,
        "pin 192 bytes": pageable.pin_memory,
        "pin and send 192 bytes": lambda: on_device(pageable, device),
        "send 4 KB": lambda: on_gpu.copy_(pinned, non_blocking=True),
        "send 1 MB": lambda: large_on_gpu.copy_(large, non_blocking=True),
        "read 4 KB": lambda: pinned.copy_(on_gpu, non_blocking=True),
        "index_copy_": lambda: on_gpu.index_copy_(0, places, on_gpu[:16]),
        "small kernel": lambda: on_gpu.add_(1),
    }
    found = {}
    for name, call in calls.items():
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(num_calls):
            call()
        found[name] = (time.perf_counter() - started) / num_calls * 1e6
    torch.cuda.synchronize()
    found["replay of a step"] = (
        statistics.median(_seconds(lambda: runner.steps.run_step(bucket)) for _ in range(30)) * 1e6
    )
    return found


def _seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def tokens_of(engine: CompiledEngine) -> list[list[int]]:
    """Greedy and sampled ones, of prompts that are as long as blocks or a little longer."""
    prompts = [{"prompt_token_ids": [(5 * n + i) % 900 for i in range(30 + n)]} for n in range(6)]
    of_all: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    params = [SamplingParams(temperature=n % 2, presence_penalty=float(n > 3), seed=n, **of_all) for n in range(6)]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def measure_all(
    engine: CompiledEngine, args: argparse.Namespace, num_requests: int, graphs: str = "manual"
) -> Iterator[dict[str, Any]]:
    kinds = args.kinds.split(",")
    if args.device == "cuda":
        yield {"requests": num_requests, "graphs": graphs, "tokens": tokens_of(engine)}
    if args.device == "cuda" and num_requests == 1 and graphs == "manual":
        try:
            yield {"requests": num_requests, "calls": call_costs(engine)}
        except Exception:
            yield {"requests": num_requests, "error": traceback.format_exc()}
    engine.clocks = Clocks(engine)  # type: ignore[attr-defined]
    for kind in kinds if graphs == "manual" else kinds[-1:]:
        row = measured(engine, num_requests, kind, args.steps)
        yield row | {"graphs": graphs} if args.device == "cuda" else row


def serve(connection: Connection, args: argparse.Namespace, num_requests: int, graphs: str) -> None:
    """In a process of its own: start an engine, say so, wait for a turn, and send rows, then None."""
    try:
        with started(args, num_requests, graphs) as engine:
            connection.send("ready")
            connection.recv()
            for row in measure_all(engine, args, num_requests, graphs):
                connection.send(row)
    except Exception:
        connection.send({"requests": num_requests, "graphs": graphs, "error": traceback.format_exc()})
    connection.send(None)


def in_processes(args: argparse.Namespace, sizes: list[int]) -> Iterator[dict[str, Any]]:
    """The rows of all sizes and kinds of graphs; the engines start at the same time."""
    context = multiprocessing.get_context("spawn")
    ends, cases = [], [(size, graphs) for size in sizes for graphs in args.graphs.split(",")]
    for case in cases:
        own_end, other_end = context.Pipe()
        process = context.Process(target=serve, args=(other_end, args, *case), daemon=True)
        process.start()
        other_end.close()
        ends.append((own_end, process))
    before, answers = time.perf_counter(), list[Any]()
    for own_end, _ in ends:
        left = max(0.0, args.patience - (time.perf_counter() - before))
        answers.append(own_end.recv() if own_end.poll(left) else None)
    print(f"engines ready after {time.perf_counter() - before:.1f} s", flush=True)
    for (own_end, process), (size, graphs), answer in zip(ends, cases, answers, strict=True):
        with contextlib.suppress(EOFError, BrokenPipeError):
            if answer is None:
                yield {"requests": size, "graphs": graphs, "error": f"not ready after {args.patience:.0f} s"}
            elif isinstance(answer, dict):
                yield answer
            else:
                own_end.send("go")
                yield from iter(own_end.recv, None)
        process.kill()
        process.join()


def in_this_process(args: argparse.Namespace, sizes: list[int]) -> Iterator[dict[str, Any]]:
    for size in sizes:
        with started(args, size) as engine:
            yield from measure_all(engine, args, size)


def main() -> int:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu (the model's step does nothing) or cuda (default: cpu)")
    parser.add_argument("--requests", default="1,32,256", help="numbers of requests that decode")
    parser.add_argument("--kinds", default="cumulative,final", help="output_kind of the requests")
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="of the model on a GPU")
    parser.add_argument("--layers", type=int, help="of that shape (default: its own)")
    parser.add_argument("--compiled", action="store_true", help="compile the steps of a GPU")
    parser.add_argument("--graphs", default="manual,pinned", help="values of cuda_graphs to compare on a GPU")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that engines may take to start")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write host.json there")
    args = parser.parse_args()
    sizes = [int(size) for size in args.requests.split(",")]
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    result = {"results": rows, "machine": machine.describe(torch.device(args.device))}
    for row in (in_this_process if args.device == "cpu" else in_processes)(args, sizes):
        rows.append(row)
        if args.output is not None:
            (args.output / "host.json").write_text(json.dumps(result) + "\n")
    good = [row for row in rows if "host" in row]
    for size in sizes:
        found = [row["tokens"] for row in rows if "tokens" in row and row["requests"] == size]
        if len(found) > 1:
            print(f"{size} requests: the same tokens with all graphs: {all(tokens == found[0] for tokens in found)}")
    for row in rows:
        if "error" in row:
            print(f"{row['requests']} requests, {row.get('graphs')}: {row['error']}")
        if "calls" in row:
            print("calls: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["calls"].items()))
    if good:
        print("microseconds a step")
        print(tables.text_table([{key: value for key, value in row.items() if key != "gaps"} for row in good]))
        for row in good:
            if row.get("gaps"):
                print(f"{row['requests']} requests, {row['outputs of']}, {row['graphs']}: longest gaps {row['gaps']}")
    tables.finish(result, None)
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
