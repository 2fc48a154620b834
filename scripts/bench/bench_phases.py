"""The classic study of inference, on any model that the engine runs, compared with ``transformers.generate``.

    python scripts/bench/bench_phases.py                           # Qwen3-0.6B's shape, random weights, bfloat16
    python scripts/bench/bench_phases.py --model DIR --part phases steps --output study

Parts (default: all; each prints a table, and ``--output DIR`` gets a picture of each and ``phases.json``):

    phases     prefill against decode: time to the first token and time of a decoded token, over prompt lengths
    steps      the time of each single decode step of one generation
    batch      batch size against throughput and against the time of a token
    batching   static against continuous batching: the same requests of mixed lengths, in the same number of places
    intensity  FLOPs, bytes and seconds of these steps under the machine's roofline; runs ``phases`` and ``batch`` too
    memory     KV bytes of a token, and how many requests fit into a given memory; an engine confirms a small case

Both sides run in one process, on the same device, with the same number of threads. They take turns ``--repeats``
times, and medians are shown (``batching``, which is long, runs once). A ratio is the time of transformers divided by
that of the row. Prompts are random tokens, decoding is greedy to exact lengths, the engine's prefix cache is off. With
random weights each side has its own, of the same shape. No time includes compiling. The last line is JSON.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_hf
import bench_phases_plots
import tables
import torch
import workloads
from bench_phases_sides import Engine, Served, Transformers, in_static_batches, step_seconds, ttft
from workloads import Requests, WorkloadRequest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm import hardware as machine
from compiled_llm.command_line import FlagParser, check_least
from compiled_llm.config import EngineConfig
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_file import read_config
from compiled_llm.report import machine_limits
from compiled_llm.report.roofline import ModelWork, StepWork
from compiled_llm.step import kv_cache
from compiled_llm.worker.device import resolve_device
from compiled_llm.worker.loader import model_directory

Row = dict[str, Any]
PROMPT_LENS, REQUEST_LENS = (32, 128, 512, 2048), (256, 1024, 4096, 16384)
MIXED_LEN = 512 + 128  # of workloads.mixed, at most
WARM_UP_LEN, LAST_STEPS = 9, 8
CHECKED_REQUESTS = 4
LEAST = dict.fromkeys(("prompt_lens", "batch_sizes", "request_lens", "bucket_sizes", "token_bucket_sizes"), 1)
LEAST |= {"prompt_len": 1, "output_len": 3, "decode_steps": 2, "num_requests": 1, "seats": 1, "repeats": 1}
LEAST["kv_memory"] = 2**-10


@dataclasses.dataclass
class Study:
    """What all parts use. ``results``: of the parts that have run, by name."""

    args: argparse.Namespace
    config: ModelConfig
    engine_arguments: dict[str, str]
    device: torch.device
    engine: Engine
    peer: Transformers
    limits: machine_limits.MachineLimits | None
    warm_up: dict[str, Served] = dataclasses.field(default_factory=dict)
    results: dict[str, Row] = dataclasses.field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.args.dtype)

    def requests(self, count: int, prompt_len: int, output_len: int) -> Requests:
        """Requests with random prompts; the same arguments give the same prompts."""
        rng = random.Random(self.args.seed)
        prompts = [workloads.random_tokens(rng, self.config.vocab_size, prompt_len) for _ in range(count)]
        return [WorkloadRequest(prompt, output_len) for prompt in prompts]

    def in_turns(self, requests: Requests) -> dict[str, list[Served]]:
        """Both sides serve the requests, ``--repeats`` times: all runs of each, by its name."""
        runs: dict[str, list[Served]] = {"engine": [], "transformers": []}
        for _, side in itertools.product(range(self.args.repeats), (self.engine, self.peer)):
            runs[side.name].append(side.run(requests))
        return runs


def compare(rows: list[Row], key: str, time_name: str) -> None:
    """Adds ``<time_name>_ratio``: the time of transformers over the row's own, where ``key`` is the same."""
    theirs = {row[key]: row[f"{time_name}_ms"] for row in rows if row["side"] == "transformers"}
    for row in rows:
        row[f"{time_name}_ratio"] = theirs[row[key]] / row[f"{time_name}_ms"]


# -- The parts: each returns plain data, with the rows of its table


def phases(study: Study) -> Row:
    """One request of each prompt length. ``prefill_share``: of the time of a request with ``--output-len`` tokens."""
    args, rows = study.args, []
    for prompt_len in args.prompt_lens:
        runs = study.in_turns(study.requests(1, prompt_len, args.decode_steps + 1))
        for side, served in runs.items():
            first, token = ttft(served), statistics.median(step_seconds(served))
            row = {"prompt_len": prompt_len, "side": side, "ttft_ms": first * 1e3, "token_ms": token * 1e3}
            row["prefill_tokens_per_s"] = prompt_len / first
            row["prefill_share"] = first / (first + (args.output_len - 1) * token)
            rows.append(row)
    compare(rows, "prompt_len", "ttft")
    compare(rows, "prompt_len", "token")
    return {"output_len": args.output_len, "rows": rows}


def steps(study: Study) -> Row:
    """Each decode step of one generation. ``us_per_context_token``: by how much a step's time grows with the context.

    ``first_ever_ms``: the first step that the side ran at all, in its warm-up.
    """
    args, rows, series = study.args, [], {}
    for side, served in study.in_turns(study.requests(1, args.prompt_len, args.output_len)).items():
        times = [seconds * 1e3 for seconds in step_seconds(served)]
        median = statistics.median(times)
        # An interruption counts as a step of at most twice the median.
        slope = statistics.linear_regression(range(len(times)), [min(t, 2 * median) for t in times]).slope
        first_ever = [seconds * 1e3 for seconds in step_seconds([study.warm_up[side]])]
        row = {"side": side, "first_ever_ms": first_ever[0], "first_ms": times[0], "median_ms": median}
        row |= {"last_ms": statistics.median(times[-LAST_STEPS:]), "max_ms": max(times)}
        rows.append(row | {"us_per_context_token": slope * 1e3})
        series[side] = {"first_ever_ms": first_ever, "ms": times}
    return {"prompt_len": args.prompt_len, "series": series, "rows": rows}


def batch(study: Study) -> Row:
    """Equal requests, for each batch size: the steps in which all of them decode."""
    args, rows = study.args, []
    for size in args.batch_sizes:
        # The engine computes the prompts in chunks; requests whose prompt is done decode meanwhile.
        chunks = -(-size * args.prompt_len // study.engine.limits.max_num_batched_tokens)
        runs = study.in_turns(study.requests(size, args.prompt_len, args.decode_steps + chunks + 1))
        for side, served in runs.items():
            token = statistics.median(step_seconds(served))
            row = {"batch": size, "side": side, "token_ms": token * 1e3, "tokens_per_s": size / token}
            rows.append(row | {"tokens_per_s_each": 1 / token, "all_first_tokens_ms": ttft(served) * 1e3})
    compare(rows, "batch", "token")
    return {"prompt_len": args.prompt_len, "bucket_sizes": study.engine.limits.decode_bucket_sizes, "rows": rows}


def batching(study: Study) -> Row:
    """The requests of W2, at most ``--seats`` at once. ``useful_rows``: share of row-steps that gave a needed token.

    All requests are submitted at the start. A static batch answers when its last request is done.
    """
    args = study.args
    requests = workloads.mixed(study.config.vocab_size, args.seed, num_requests=args.num_requests)
    ways = {
        "transformers, static": in_static_batches(study.peer, requests, args.seats),
        "engine, static": in_static_batches(study.engine, requests, args.seats),
        "engine, continuous": study.engine.run(requests, args.seats),
    }
    wanted, rows, timelines = sum(request.output_len for request in requests), [], {}
    for way, served in ways.items():
        seconds = max(times[-1] for times in served.token_times)
        row: Row = {"way": way, "seconds": seconds, "tokens_per_s": wanted / seconds}
        row["mean_ttft_s"] = statistics.mean(times[0] for times in served.token_times)
        row["mean_answer_s"] = statistics.mean(times[-1] for times in served.token_times)
        row |= {"row_steps": served.row_steps, "useful_rows": wanted / served.row_steps}
        rows.append(row)
        timelines[way] = [
            {"start": start, "first": times[0], "wanted": times[request.output_len - 1], "end": times[-1]}
            for start, times, request in zip(served.starts, served.token_times, requests, strict=True)
        ]
    for row in rows:
        row["seconds_ratio"] = rows[0]["seconds"] / row["seconds"]
    return {"num_requests": len(requests), "seats": args.seats, "timelines_s": timelines, "rows": rows}


def intensity(study: Study) -> Row:
    """Minimum FLOPs and bytes of the steps of ``phases`` and ``batch``, divided by their seconds.

    ``of_limit``: their seconds at the machine's limits, divided by the seconds taken.
    """
    dtype, args = study.dtype, study.args
    kv_bytes = kv_cache.bytes_per_layer(study.config, [dtype] * study.config.num_layers)
    model, limits = ModelWork.of(study.config, dtype, kv_bytes), study.limits
    assert limits is not None, "start() measured them for this part"
    measured = [("prefill", row["prompt_len"], row, row["ttft_ms"]) for row in study.results["phases"]["rows"]]
    measured += [("decode", row["batch"], row, row["token_ms"]) for row in study.results["batch"]["rows"]]
    rows = []
    for phase, size, source, ms in measured:
        context = args.prompt_len + args.decode_steps // 2
        work = StepWork.of([(0, size)] if phase == "prefill" else [(context, 1)] * size, model.windows)
        flops, moved = model.flops(work), model.bytes(work)
        row = {"phase": phase, "size": size, "side": source["side"], "gflop": flops / 1e9, "mb": moved / 1e6}
        row |= {"flop_per_byte": flops / moved, "ms": ms, "gflop_per_s": flops / ms / 1e6, "gb_per_s": moved / ms / 1e6}
        row["of_limit"] = model.seconds(work, limits.read_bytes_per_second, limits.flops_per_second) / (ms / 1e3)
        rows.append(row)
    ridge = limits.flops_per_second / limits.read_bytes_per_second
    return {"limits": dataclasses.asdict(limits), "ridge_flop_per_byte": ridge, "rows": rows}


def memory(study: Study) -> Row:
    """KV bytes of a token for each cache dtype, and requests of given lengths that fit into ``--kv-memory`` GiB.

    ``transformers`` is measured: what the cache holds after a generation. The checks: a pool that is as large as some
    short requests in the model's dtype is offered two requests more than fit, and runs as many at once as computed.
    """
    args, config, block_size = study.args, study.config, study.engine.limits.block_size
    rows: list[Row] = []
    for name in ("auto", "int8", "fp8"):
        dtypes = kv_cache.layer_dtypes(EngineConfig(kv_cache_dtype=name), study.dtype, config.num_layers)
        label = args.dtype if name == "auto" else name
        rows.append({"kv_cache": label, "bytes_per_token": kv_cache.bytes_per_token(config, dtypes)})
    cache = study.peer.generate(study.requests(1, block_size, 2))[1]
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    rows.append({"kv_cache": "transformers", "bytes_per_token": held // cache.get_seq_length()})
    capacity = int(args.kv_memory * 2**30)
    for row, length in itertools.product(rows, args.request_lens):
        taken = -(-length // block_size) * block_size if row["kv_cache"] != "transformers" else length
        row[f"fit_{length}"] = capacity // (taken * row["bytes_per_token"])
    study.engine.engine.close()  # its memory is free for the engines of the checks
    limit = CHECKED_REQUESTS * rows[0]["bytes_per_token"]
    checks = [admitted(study, "auto", rows[0], limit), admitted(study, "int8", rows[1], limit)]
    print(f"\nmemory, checked by engines\n{tables.text_table(checks)}")
    return {"kv_memory_bytes": capacity, "request_lens": args.request_lens, "checks": checks, "rows": rows}


def admitted(study: Study, kv_cache_dtype: str, row: Row, limit: int) -> Row:
    """Requests of a block of prompt and a block of output in a pool of ``limit`` bytes for each of their tokens."""
    block_size, computed = study.engine.limits.block_size, limit // row["bytes_per_token"]
    pool_bytes = computed * 2 * block_size * row["bytes_per_token"]
    with CompiledEngine(
        **study.engine_arguments,
        dtype=study.args.dtype,
        device=study.args.device,
        max_model_len=2 * block_size,
        bucket_sizes=(computed + 2,),
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory_bytes=pool_bytes,
        enable_prefix_caching=False,
        enforce_eager=True,
    ) as engine:
        for number, request in enumerate(study.requests(computed + 2, block_size, block_size)):
            params = SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
            engine.add_request(str(number), request.prompt_token_ids, params)
        peak = 0
        while engine.has_unfinished_requests():
            engine.step()
            peak = max(peak, engine.stats().num_running)
        stats = engine.stats()
    result = {"kv_cache": row["kv_cache"], "pool_bytes": pool_bytes, "computed": computed, "peak_running": peak}
    return result | {"num_preemptions": stats.num_preemptions, "num_finished": stats.num_finished}


PARTS: dict[str, Callable[[Study], Row]] = {
    "phases": phases,
    "steps": steps,
    "batch": batch,
    "batching": batching,
    "intensity": intensity,
    "memory": memory,  # the last: it closes the engine
}


def make_parser() -> argparse.ArgumentParser:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    integers = workloads.integers
    workloads.add_model_arguments(parser)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="(default: all)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="for phases.json and pictures; needs matplotlib")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--bucket-sizes", type=integers, default=(1, 8, 32))
    parser.add_argument("--token-bucket-sizes", type=integers, default=(32, 128, 512))
    parser.add_argument(
        "--enforce-eager", action="store_true", help="an engine that compiles nothing, for a quick test"
    )
    parser.add_argument("--prompt-lens", type=integers, help="of phases (default: those of 32,128,512,2048 that fit)")
    parser.add_argument("--batch-sizes", type=integers, default=(1, 2, 4, 8, 16, 32), help="of batch")
    parser.add_argument("--prompt-len", type=int, default=128, help="of steps and batch (default: 128)")
    parser.add_argument("--output-len", type=int, default=128, help="of steps, and of phases' request (default: 128)")
    parser.add_argument("--decode-steps", type=int, default=16, help="timed for each point of phases and batch")
    parser.add_argument("--num-requests", type=int, default=16, help="of batching (default: 16)")
    parser.add_argument("--seats", type=int, default=8, help="of batching (default: 8)")
    parser.add_argument("--kv-memory", type=float, default=4.0, metavar="GiB", help="of memory (default: 4)")
    parser.add_argument("--request-lens", type=integers, help="of memory (default: those of 256..16384 that fit)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side (default: 3); batching runs once")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def longest_request(args: argparse.Namespace) -> int:
    """Tokens, prompt and output, of the longest request of the parts that run."""
    chunks = -(-max(args.batch_sizes) * args.prompt_len // max(args.token_bucket_sizes))
    lengths = {
        "phases": max(args.prompt_lens) + args.decode_steps + 1,
        "steps": args.prompt_len + args.output_len,
        "batch": args.prompt_len + args.decode_steps + chunks + 1,
        "batching": MIXED_LEN,
    }
    return max(lengths.get(part, 0) for part in args.part)


def check(args: argparse.Namespace, config: ModelConfig) -> None:
    """Fills in what depends on the model. ``ValueError`` for what cannot be measured."""
    most = config.max_position_embeddings
    room = most - args.decode_steps - 1
    args.prompt_lens = args.prompt_lens or tuple(n for n in PROMPT_LENS if n <= room) or (room,)
    args.request_lens = args.request_lens or tuple(n for n in REQUEST_LENS if n <= most) or (most,)
    needed = {"phases", "batch"} if "intensity" in args.part else set()
    args.part = [name for name in PARTS if name in needed.union(args.part)]
    check_least(args, **LEAST)
    for name, size in (("--batch-sizes", max(args.batch_sizes)), ("--seats", args.seats)):
        if size > max(args.bucket_sizes):
            raise ValueError(f"{name} must be at most {max(args.bucket_sizes)} (of --bucket-sizes), given {size}")
    if longest_request(args) > most:
        raise ValueError(
            f"the longest request must fit in the model's {most} tokens, given {longest_request(args)}: lower the "
            f"lengths, or leave parts out with --part (batching needs {MIXED_LEN})"
        )
    if args.output and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--output needs matplotlib: pip install matplotlib, or compiled-llm[plot]")


def start(args: argparse.Namespace, engine_arguments: dict[str, str]) -> Study:
    """Both sides, warmed up. ``ValueError`` where the arguments, the model or the memory do not allow it."""
    directory = model_directory(engine_arguments["model"])
    config = read_config(directory)
    check(args, config)
    device, random_weights = resolve_device(args.device), engine_arguments["load_format"] == "dummy"
    # Both before the engine, whose KV pool takes the rest of a GPU's memory. The limits change within hours.
    limits = None
    if "intensity" in args.part:
        limits = machine_limits.measured(device, getattr(torch, args.dtype), remeasure=True)
    peer = Transformers(bench_hf.load(directory, args.dtype, device, args.seed, random_weights=random_weights))
    engine = CompiledEngine(
        **engine_arguments,
        dtype=args.dtype,
        device=args.device,
        # A power of two, so that other lengths use the same compiled code.
        max_model_len=min(config.max_position_embeddings, max(1024, 1 << (longest_request(args) - 1).bit_length())),
        bucket_sizes=args.bucket_sizes,
        token_bucket_sizes=args.token_bucket_sizes,
        enable_prefix_caching=False,
        enforce_eager=args.enforce_eager,
        seed=args.seed,
    )
    study = Study(args, config, engine_arguments, device, Engine(engine), peer, limits)
    for side in (study.engine, study.peer):
        study.warm_up[side.name] = side.run(study.requests(1, min(args.prompt_len, WARM_UP_LEN), WARM_UP_LEN))
    return study


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    with workloads.model_of(args) as engine_arguments:
        try:
            study = start(args, engine_arguments)
            if args.output:
                args.output.mkdir(parents=True, exist_ok=True)
        except (ValueError, OSError) as error:
            parser.error(str(error))
        facts = machine.describe(study.device)
        report = study.engine.engine.compile_report()
        print(f"{facts.get('gpu', facts['cpu'])}, {facts['cpu_threads']} threads, {args.dtype}")
        print(report if study.limits is None else f"{report}\nlimits: {study.limits}")
        record = {"benchmark": "phases", "model": args.model or args.shape, "dtype": args.dtype}
        record |= {"repeats": args.repeats, "graph_breaks": report.graph_breaks, "parts": study.results}
        record["machine"] = facts
        for name in args.part:
            study.results[name] = PARTS[name](study)
            print(f"\n{name}\n{tables.text_table(study.results[name]['rows'])}", flush=True)
            if args.output:  # after each part: a run that is cut off keeps what was done
                (args.output / "phases.json").write_text(json.dumps(record) + "\n")
                bench_phases_plots.draw(name, record, args.output)
        study.engine.engine.close()
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
