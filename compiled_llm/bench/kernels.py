"""Every kernel of a decode step on a GPU, as it ran: how long each took, and the gap before it.

    compiled-llm bench kernels --shape qwen3-0.6b --batch-size 32 --context 1024
    compiled-llm bench kernels --shape qwen3-8b --batch-size 1 --prompts 2048 8192 --json kernels.json

Requests of ``--context`` random tokens are served until all of them decode. Then their step is repeated with the same
inputs, and each figure is the median of ``--repeats``: ``step_us``, of steps back to back without a profiler, by the
device's clock; and under torch's profiler each kernel. The table has a line for each name: launches in a step,
microseconds of all of them, of one, and of the gaps before them. JSON has the launches in their order too, under the
names of the estimates in gpu_step. ``--prompts`` does the same for the last step of a prompt of so many
tokens, and times the whole prompt from submission to its first token. On a CPU the tables are of ops instead.

Exit status: 0; 1 if the profile has no launch; 2 without a CUDA GPU, or for bad arguments.
"""

import argparse
import contextlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler_util import FunctionEvent

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.bench.harness import DTYPES, finish, has_gpu, seconds_of
from compiled_llm.bench.program_turns import wait_for_turn
from compiled_llm.bench.workloads import config_directory, random_tokens
from compiled_llm.checkpoint.shapes import SHAPES
from compiled_llm.compiling.cuda_graphs import begin_step_of_trees
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.worker.profiler import kernels_of, kind_of, profiled_events

_CHUNK = 2048  # tokens of prompts in a step


class Launch(NamedTuple):
    """A kernel of a step, or on a CPU an op. Microseconds; ``gap_us`` of the first is 0."""

    name: str
    us: float
    gap_us: float


def launches(events: Iterable[FunctionEvent], on_gpu: bool) -> list[Launch]:
    """Those of one profiled step, in their order."""
    ran = kernels_of(events) if on_gpu else [event for event in events if not event.cpu_children]
    ran.sort(key=lambda event: event.time_range.start)
    found, end = [], None
    for event in ran:
        span = event.time_range
        found.append(Launch(event.name, span.elapsed_us(), 0.0 if end is None else max(0.0, span.start - end)))
        end = span.end if end is None else max(end, span.end)
    return found


def medians(steps: list[list[Launch]]) -> list[Launch]:
    """Of each launch, over several profiles of the same step.

    Raises:
        RuntimeError: the profiles differ in their launches.
    """
    names = [[launch.name for launch in step] for step in steps]
    if any(other != names[0] for other in names):
        raise RuntimeError(f"the repeats of a step have other kernels: {sorted({len(step) for step in steps})} of them")
    columns = zip(*steps, strict=True)
    return [
        Launch(column[0].name, *(statistics.median(one[field] for one in column) for field in (1, 2)))
        for column in columns
    ]


def by_name(step: list[Launch]) -> list[dict[str, Any]]:
    """A row for each name, the longest first."""
    groups: dict[str, list[Launch]] = {}
    for launch in step:
        groups.setdefault(launch.name, []).append(launch)
    rows = [
        {
            "name": name,
            "work": kind_of(name) or "everything else",
            "count": len(group),
            "us": sum(launch.us for launch in group),
            "us_each": statistics.median(launch.us for launch in group),
            "gap_us": sum(launch.gap_us for launch in group),
        }
        for name, group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def room(batch_size: int, context: int) -> int:
    """Tokens that a request generates at most: it goes on while the prompts of the others are computed."""
    return 16 + 2 * -(-batch_size * context // _CHUNK)


def decoding(engine: CompiledEngine, batch_size: int, context: int) -> tuple[Bucket, float]:
    """Serve until ``batch_size`` requests of ``context`` tokens decode, all in one step: its bucket, and their keys."""
    params = SamplingParams(temperature=0, max_tokens=room(batch_size, context), ignore_eos=True)
    rng = random.Random(0)
    for number in range(batch_size):
        engine.add_request(str(number), random_tokens(rng, engine.model_config.vocab_size, context), params)
    known: dict[str, int] = {}
    while len(known) < batch_size or min(known.values()) < 2:
        for output in engine.step():
            assert not output.finished, "a request ended before all others decoded: room() is too small"
            known[output.request_id] = len(output.outputs[0].token_ids)
    bucket = next(bucket for bucket in engine.own_runner.steps.buckets if bucket.kind == "decode")
    return bucket, context + statistics.mean(known.values())


def step_of(engine: CompiledEngine, bucket: Bucket) -> Callable[[], object]:
    """The model's part of the step that the bucket's buffers hold."""
    steps = engine.own_runner.steps

    def step() -> None:
        if steps.uses_trees:
            begin_step_of_trees()
        steps.run_step(bucket)

    return step


def profiled(engine: CompiledEngine, bucket: Bucket, repeats: int) -> list[Launch]:
    step, on_gpu = step_of(engine, bucket), engine.runner.device.type == "cuda"
    found = [launches(profiled_events(step, on_gpu), on_gpu) for _ in range(repeats + 1)]
    return medians(found[1:])  # the first one warms the profiler up


def step_us(engine: CompiledEngine, bucket: Bucket, repeats: int) -> float:
    """Microseconds of a step, of several back to back: the device's, or the host's on a CPU."""
    step, device = step_of(engine, bucket), engine.runner.device
    if device.type == "cpu":
        return statistics.median(seconds_of(step) for _ in range(repeats)) * 1e6
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 3)]
    for event in events:
        event.record()
        step()
    torch.cuda.synchronize(device)
    spans = [before.elapsed_time(after) for before, after in itertools.pairwise(events[2:])]
    return statistics.median(spans) * 1e3


def tokens_of_first(engine: CompiledEngine) -> list[int]:
    """Serve all requests to their ends: what the first of them generated, the same for all kinds of CUDA graphs."""
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        tokens = next((list(o.outputs[0].token_ids) for o in engine.step() if o.request_id == "0"), tokens)
    return tokens


def prompt(engine: CompiledEngine, length: int, repeats: int) -> tuple[Bucket, list[float]]:
    """Serve prompts of ``length`` tokens: the bucket of the last step, and milliseconds to each one's first token."""
    rng, params = random.Random(0), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    times = []
    for number in range(repeats + 1):
        tokens = random_tokens(rng, engine.model_config.vocab_size, length)
        started = time.perf_counter()
        engine.add_request(f"prompt-{number}", tokens, params)
        while engine.has_unfinished_requests():
            engine.step()
        times.append((time.perf_counter() - started) * 1e3)
    return next(bucket for bucket in engine.own_runner.steps.buckets if bucket.kind != "decode"), times[1:]


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Every kernel of a decode step on a GPU, as it ran.")
    add = made.add_argument
    add("--shape", choices=SHAPES, default="qwen3-0.6b", help="random weights (default: qwen3-0.6b)")
    add("--model", type=Path, metavar="DIR", help="a checkpoint in the place of --shape")
    add("--dtype", default="auto", choices=DTYPES, help="(default: the model's)")
    add("--batch-size", type=int, default=32, help="requests that decode (default: 32)")
    add("--context", type=int, default=1024, help="tokens of each request (default: 1024)")
    add("--repeats", type=int, default=9, help="of which the median is taken (default: 9)")
    add("--device", default="cuda", help="(default: cuda)")
    add("--kv-cache-dtype", default="auto", choices=("auto", "int8", "fp8"), help="(default: auto)")
    kinds = ("auto", "manual", "programmatic", "trees")
    add("--cuda-graphs", default="auto", choices=kinds, help="(default: auto)")
    add("--enforce-eager", action="store_true", help="compile nothing")
    add("--exact", action="store_true", help="the engine's argument of that name")
    add("--layers", type=int, help="so many layers of the shape (default: all)")
    add("--prompts", type=int, nargs="+", metavar="TOKENS", help="also prompts of so many tokens")
    tables.add_json_flag(made)
    return made


def check_arguments(args: argparse.Namespace) -> None:
    if args.layers is not None and (args.model or args.layers < 1):
        raise ValueError(f"--layers must be at least 1, for a --shape, given {args.layers}")


@contextlib.contextmanager
def engine_of(program: str, args: argparse.Namespace) -> Iterator[CompiledEngine]:
    """One decode bucket, and one for prompts: what is compiled is what runs."""
    layers = {} if args.layers is None else {"num_hidden_layers": args.layers}
    with config_directory(args.shape, **layers) as directory, errors_end(program):
        most = args.context + room(args.batch_size, args.context)
        length = max([most, *(tokens + 1 for tokens in args.prompts or [])])
        names = ("dtype", "device", "kv_cache_dtype", "cuda_graphs", "enforce_eager", "exact")
        with CompiledEngine(
            str(args.model or directory),
            load_format="auto" if args.model else "dummy",
            bucket_sizes=(args.batch_size,),
            token_bucket_sizes=(max(_CHUNK, args.batch_size),),
            max_model_len=length,
            num_kv_blocks=max(args.batch_size * -(-most // 16), -(-length // 16)),
            enable_prefix_caching=False,
            **{name: getattr(args, name) for name in names},
        ) as engine:
            yield engine


def figures_of(step: list[Launch], whole_us: float) -> dict[str, Any]:
    busy, gaps = sum(launch.us for launch in step), sum(launch.gap_us for launch in step)
    return {"launches": len(step), "step_us": whole_us, "busy_us": busy, "gap_us": gaps, "kernels": by_name(step)}


def show(title: str, step: list[Launch], figures: dict[str, Any]) -> None:
    print(title)
    print(tables.text_table([row | {"name": row["name"][:70]} for row in figures["kernels"]]))
    parts = f"{figures['busy_us']:.1f} us in them and {figures['gap_us']:.1f} us between them"
    print(f"{len(step)} launches, {parts}; a step without the profiler: {figures['step_us']:.1f} us", flush=True)


def measured_prompt(engine: CompiledEngine, length: int, repeats: int, title: str) -> dict[str, Any]:
    bucket, times = prompt(engine, length, min(repeats, 5))
    step = profiled(engine, bucket, min(repeats, 5))
    found = {"tokens": length, "first_token_ms": statistics.median(times), "first_token_ms_of_each": times}
    found |= figures_of(step, step_us(engine, bucket, min(repeats, 5)))
    show(f"{title}, the last step of a prompt of {length} tokens, {bucket.name}", step, found)
    print(f"first token after {found['first_token_ms']:.2f} ms")
    return found | in_order(step)


def result_of(args: argparse.Namespace, dtype: str, figures: dict[str, Any]) -> dict[str, Any]:
    names = ("batch_size", "context", "kv_cache_dtype", "layers", "cuda_graphs", "exact")
    asked = {name: getattr(args, name) for name in names}
    return {"shape": str(args.model or args.shape), "dtype": dtype} | asked | figures


def in_order(step: list[Launch]) -> dict[str, Any]:
    return {"in_order": [launch._asdict() for launch in step]}


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    least = {"batch_size": 1, "context": 1, "repeats": 1, "prompts": 1}
    args = parser(program).parse_checked(check_arguments, arguments, **least)
    if not has_gpu(program, args.device):
        return 2
    with engine_of(program, args) as engine:
        wait_for_turn()
        dtype, device = str(engine.runner.dtype)[6:], engine.runner.device
        title = f"{args.model or args.shape}, {dtype}"
        bucket, keys = decoding(engine, args.batch_size, args.context)
        whole_us, step = step_us(engine, bucket, 3 * args.repeats), profiled(engine, bucket, args.repeats)
        if not step:
            print(f"{program}: error: the profile of the step has no launch: nothing was measured", file=sys.stderr)
            return 1
        figures = figures_of(step, whole_us)
        show(f"{title}, {args.batch_size} requests of {keys:.0f} keys, the mean", step, figures)
        figures["tokens"] = tokens_of_first(engine)
        prompts = [measured_prompt(engine, length, args.repeats, title) for length in args.prompts or []]
    result = result_of(args, dtype, {"mean_keys": keys} | figures)
    finish("kernels", result, args.json, device=device, details=in_order(step) | {"prompts": prompts})
    return 0
