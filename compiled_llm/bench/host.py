"""Host time of a step by part, in steady decoding, and how long the device idles between two steps.

    compiled-llm bench host
    compiled-llm bench host --requests 32,64,128,256,512 --waiting 0,10000 --context 512 --steps 300
    compiled-llm bench host --device cuda --output DIR

On a CPU the engine is a whole one with the bundled tokenizer, but for the model's step, which does nothing and leaves
the same tokens each time: all time is the host's. ``--waiting`` requests wait besides. On a GPU the step is that of
``--shape``, recorded in CUDA graphs without compiling, since the host does the same for a graph whatever is in it;
``--compiled`` compiles it. There each number of requests has two engines, one after the other: one with graphs beside
which inputs and tokens are copied (manual), and one with graphs that read and write memory of the host (pinned). The
two have to find the same tokens.

Parts are medians over the steps, in microseconds. ``prepare`` fills the step's buffers. ``collect`` has no waiting for
the device. ``other`` is what is left of ``Engine.step``: log, interrupts, queues. ``processor`` is the processor time
of a whole step, by the mean: it holds on a machine that others use too. ``idle`` is the time of a step in which no
kernel and no copy ran, ``gaps`` the longest ones with what came before and after, both under torch's profiler; ``wall``
is the time of a step without it.
"""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, integers
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.bench.harness import finish
from compiled_llm.bench.workloads import config_directory
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.checkpoint.shapes import SHAPES
from compiled_llm.compiling.cuda_graphs import graph_pool
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.models.config_file import read_config
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.system import hardware
from compiled_llm.worker import started_model
from compiled_llm.worker.profiler import kernels_of, profiled_events

PARTS = ("schedule", "prepare", "launch", "collect", "update", "outputs", "other")
WARM_STEPS = 24
PROFILED_STEPS = 16
BLOCK_SIZE = 16  # prompts differ by up to so many tokens: blocks are not full at the same step


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
        scheduler.update = self._update = Timed(scheduler.update)  # type: ignore[assignment,method-assign]
        runner.launch = self._launch = Timed(runner.launch)  # type: ignore[assignment,method-assign]
        runner.collect = self._collect = Timed(runner.collect)  # type: ignore[assignment,method-assign]

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
    chunk = max(512, 2 * num_requests)
    longest = args.context + BLOCK_SIZE + 2 * WARM_STEPS + args.steps + PROFILED_STEPS
    longest += 2 * num_requests * args.context // chunk  # while the prompts of the others are computed
    sizes: dict[str, Any] = {
        "bucket_sizes": (num_requests,),
        "token_bucket_sizes": (chunk,),
        "max_model_len": max(1024, longest),
        "num_kv_blocks": max(16, num_requests * (longest // BLOCK_SIZE + 3)),
        "progress": "off",
    }
    sizes |= {"load_format": "dummy", "device": args.device, "enforce_eager": not args.compiled}
    if args.device == "cpu":
        vocab_size = read_config(DEMO_MODEL).vocab_size
        with (
            config_directory("tiny", vocab_size=vocab_size) as directory,
            CompiledEngine(directory, tokenizer=str(DEMO_MODEL), dtype="float32", **sizes) as engine,
        ):
            leave_out_steps(engine)
            yield engine
        return
    if not args.compiled:
        started_model.graph_pool = lambda _, device, *others: graph_pool(graphs, device)
    layers = {} if args.layers is None else {"num_hidden_layers": args.layers}
    own: dict[str, Any] = {"cuda_graphs": graphs} if args.compiled else {}
    with config_directory(args.shape, **layers) as directory, CompiledEngine(directory, **own, **sizes) as engine:
        yield engine


def leave_out_steps(engine: CompiledEngine) -> None:
    """From now on the model's step does nothing; each row has another token, the same in each step."""
    steps = engine.own_runner.steps
    logits = {bucket: steps.run_step(bucket) for bucket in steps.buckets}
    steps.last_tokens.copy_(torch.arange(300, 300 + len(steps.last_tokens)))

    def run_step(bucket: Bucket) -> torch.Tensor:
        return logits[bucket]

    steps.run_step = run_step  # type: ignore[method-assign]


def measured(
    engine: CompiledEngine, args: argparse.Namespace, num_requests: int, kind: Any, num_waiting: int = 0
) -> dict[str, Any]:
    """Microseconds of a step with ``num_requests`` that decode and whose outputs are of ``kind``."""
    most = engine.runner.limits.max_model_len - args.context - BLOCK_SIZE
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, output_kind=kind)
    names = [f"{kind}-{n}" for n in range(num_requests + num_waiting)]
    for n, name in enumerate(names):
        length = args.context + n % BLOCK_SIZE if n < num_requests else 40
        prompt = [(7 * i + 13 * n) % 900 for i in range(length)]
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    while len(engine.scheduler.running) < num_requests or not all(
        request.output_token_ids for request in engine.scheduler.running
    ):
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    assert len(engine.scheduler.running) == num_requests, "all requests decode"
    gc.collect()
    gc.freeze()
    clocks = engine.clocks  # type: ignore[attr-defined]
    reads, processor, before = [], 0.0, time.perf_counter()
    for _ in range(args.steps):
        first, mark = clocks.read(), time.thread_time()
        engine.step()
        processor += time.thread_time() - mark
        reads.append((first, clocks.read()))
    wall = (time.perf_counter() - before) / args.steps
    gc.unfreeze()
    parts: list[list[float]] = []
    for first, last in reads:
        *own, waiting, whole = (b - a for a, b in zip(first, last, strict=True))
        parts.append([*own, whole - waiting - sum(own), whole - waiting])
    row: dict[str, Any] = {"requests": num_requests, "waiting": num_waiting, "outputs of": kind}
    medians = [statistics.median(column) * 1e6 for column in zip(*parts, strict=True)]
    row |= dict(zip((*PARTS, "host"), medians, strict=True))
    row["wall"] = wall * 1e6
    row["processor"] = processor / args.steps * 1e6  # on a GPU with what it takes to wait
    if engine.runner.device.type == "cuda":
        row |= idle(engine, wall)
    engine.abort(names)
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
    on_gpu = {"graphs": graphs} if args.device == "cuda" else {}
    if on_gpu:
        yield {"requests": num_requests, "graphs": graphs, "tokens": tokens_of(engine)}
    engine.clocks = Clocks(engine)  # type: ignore[attr-defined]
    for kind in kinds if graphs == "manual" else kinds[-1:]:
        for num_waiting in args.waiting:
            yield measured(engine, args, num_requests, kind, num_waiting) | on_gpu


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Host time of a step by part, and how long the device idles.")
    add = made.add_argument
    add("--device", default="cpu", help="cpu (the model's step does nothing) or cuda (default: cpu)")
    add("--requests", type=integers, default=(1, 32, 256), help="numbers that decode (default: 1,32,256)")
    add("--waiting", type=integers, default=(0,), help="numbers of requests that wait besides (default: 0)")
    add("--context", type=int, default=64, help="tokens of a prompt, about (default: 64)")
    add("--kinds", default="cumulative,final", help="output_kind of the requests (default: cumulative,final)")
    add("--steps", type=int, default=200, help="timed steps of each (default: 200)")
    add("--shape", choices=SHAPES, default="qwen3-0.6b", help="of the model on a GPU (default: qwen3-0.6b)")
    add("--layers", type=int, help="of that shape (default: its own)")
    add("--compiled", action="store_true", help="compile the steps of a GPU")
    add("--graphs", default="manual,pinned", help="values of cuda_graphs to compare on a GPU")
    add("--output", type=Path, metavar="DIR", help="write host.json there after each engine")
    tables.add_json_flag(made)
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    args = parser(program).parse_checked(None, arguments, requests=1, waiting=0, context=1, steps=1)
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    facts = {"results": rows, "machine": hardware.describe(torch.device(args.device))}
    kinds = args.graphs.split(",") if args.device == "cuda" else ["manual"]
    for size, graphs in itertools.product(args.requests, kinds):
        try:
            with started(args, size, graphs) as engine:
                rows += measure_all(engine, args, size, graphs)
        except Exception:  # of one kind of graphs, which says nothing of the others
            rows.append({"requests": size, "graphs": graphs, "error": traceback.format_exc()})
        if args.output is not None:
            (args.output / "host.json").write_text(json.dumps(facts) + "\n")
    for size in args.requests:
        found = [row["tokens"] for row in rows if "tokens" in row and row["requests"] == size]
        if len(found) > 1:
            print(f"{size} requests: the same tokens with all graphs: {all(tokens == found[0] for tokens in found)}")
    errors = [row for row in rows if "error" in row]
    for row in errors:
        print(f"{row['requests']} requests, {row.get('graphs')}: {row['error']}")
    if good := [row for row in rows if "host" in row]:
        print("microseconds a step")
        print(tables.text_table([{key: value for key, value in row.items() if key != "gaps"} for row in good]))
        for row in good:
            if row.get("gaps"):
                print(f"{row['requests']} requests, {row['outputs of']}, {row['graphs']}: longest gaps {row['gaps']}")
    finish("host", {"results": rows}, args.json, device=args.device)
    return 1 if errors else 0
