"""The time that one batch of requests takes from start to end, as ``vllm bench latency`` measures it.

    python scripts/bench/bench_latency.py --input-len 128 --output-len 128 --batch-size 1
    python scripts/bench/bench_latency.py --model DIR --batch-size 8 --output-json latency.json

All requests have random tokens, are submitted at once and generate exactly ``--output-len`` tokens; the end-of-text
token is ignored. ``--num-iters`` runs are timed, after ``--num-iters-warmup`` others. All runs have the same prompts,
so prefix caching is off by default. ``--output-json`` has vLLM's keys, in seconds: ``avg_latency``, ``std_latency``,
``latencies`` and ``percentiles``; also the TTFT and TPOT of each run, means over its requests. ``--report`` writes the
engine's report on the timed runs. ``--backend hf`` is transformers.generate on the same requests. The last line is
JSON. Exit status: 0, or 2 for bad arguments.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any

import own_checkout
import bench_arguments as arguments
import bench_hf
import bench_results as results
import tables
from tqdm import tqdm
from workloads import Requests, WorkloadRequest, engine_parser, random_tokens

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.system import hardware as machine
from compiled_llm.worker.device import resolve_device

PERCENTILES = (10, 25, 50, 75, 90, 99)


def parse_arguments() -> argparse.Namespace:
    parser = engine_parser(__doc__)
    parser.set_defaults(enable_prefix_caching=False)
    arguments.add_backend_flag(parser)
    parser.add_argument("--input-len", type=int, default=32, help="tokens of each prompt (default: 32)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens to generate for each (default: 128)")
    parser.add_argument("--batch-size", type=int, default=8, help="requests submitted at once (default: 8)")
    parser.add_argument("--n", type=int, default=1, help="continuations of each prompt: only 1 is served")
    parser.add_argument("--num-iters-warmup", type=int, default=2, help="runs before the timed ones (default: 2)")
    parser.add_argument("--num-iters", type=int, default=10, help="timed runs (default: 10)")
    tables.add_json_flag(parser, "--output-json")
    results.add_report_flag(parser)
    arguments.add_sampling_flags(parser)
    least = {"input_len": 1, "output_len": 1, "batch_size": 1, "num_iters": 1, "num_iters_warmup": 0}
    return parser.parse_checked(lambda args: check_arguments(args, parser), **least)


def check_arguments(args: argparse.Namespace, parser: FlagParser) -> None:
    """``ValueError`` for bad arguments; checked before a model is loaded."""
    arguments.check_sampling(args)
    if args.n != 1:
        raise ValueError(f"--n must be 1, given {args.n}: several continuations of a prompt are not served yet")
    tables.check_target("--output-json", args.output_json)
    results.check_report(args.report)
    arguments.check_backend(args, parser)


def run(engine: CompiledEngine, requests: Requests, params: list[SamplingParams]) -> dict[str, float | None]:
    """Seconds of one run of the batch, and the mean TTFT and TPOT of its requests."""
    seconds, outputs = results.generate(engine, requests, params)
    tpots = results.tpots(outputs)
    return {
        "latency": seconds,
        "ttft": statistics.mean(map(results.ttft, outputs)),
        "tpot": statistics.mean(tpots) if tpots else None,
    }


def run_hf(hf: Any, requests: Requests) -> dict[str, float | None]:
    """The same for transformers."""
    times = [seconds for seconds, _ in bench_hf.timed_tokens(hf, requests)]
    tpot = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
    return {"latency": times[-1], "ttft": times[0], "tpot": tpot}


def measure(
    run: Callable[[], dict[str, Any]], args: argparse.Namespace, after_warm_up: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Figures of the timed runs: vLLM's keys, and ours. ``run``: one run, with its figures in seconds."""
    for _ in tqdm(range(args.num_iters_warmup), desc="warm-up", disable=None):
        run()
    after_warm_up()
    runs = [run() for _ in tqdm(range(args.num_iters), desc="runs", disable=None)]
    latencies = [one["latency"] for one in runs]
    tpots = [one["tpot"] for one in runs if one["tpot"] is not None]
    return {
        "avg_latency": statistics.mean(latencies),
        "std_latency": statistics.pstdev(latencies),
        "latencies": latencies,
        "percentiles": results.percentiles(latencies, PERCENTILES),
        "ttfts": [one["ttft"] for one in runs],
        "tpots": [one["tpot"] for one in runs],
        "median_ttft_ms": statistics.median(one["ttft"] for one in runs) * 1e3,
        "median_tpot_ms": statistics.median(tpots) * 1e3 if tpots else None,
        "decode_tokens_per_second": args.batch_size / statistics.median(tpots) if tpots else None,
    }


def requests_of(args: argparse.Namespace, model: arguments.Model) -> Requests:
    rng, vocab_size = random.Random(args.seed), model.model_config.vocab_size
    prompts = [random_tokens(rng, vocab_size, args.input_len) for _ in range(args.batch_size)]
    return [WorkloadRequest(prompt, args.output_len) for prompt in prompts]


def bench_engine(args: argparse.Namespace) -> dict[str, Any]:
    model, requests, engine, start_seconds = arguments.start_engine("bench_latency", args, requests_of)
    params, before = arguments.sampling_of(args, requests), engine.stats()

    def after_warm_up() -> None:
        nonlocal before
        engine.reset_report()
        before = engine.stats()

    with engine:
        results.prepare_report(engine, args.report)
        measured = measure(lambda: run(engine, requests, params), args, after_warm_up)
        measured["steps"] = results.steps_between(before, engine.stats())
        results.write_report(engine, args.report)
        return {"model": model.name, **measured, "engine": results.engine_facts(engine, start_seconds)}


def bench_hf_model(args: argparse.Namespace) -> dict[str, Any]:
    with errors_end("bench_latency"), arguments.described_model(args) as model:
        requests = requests_of(args, model)
        hf, facts = arguments.load_hf(model, requests, args)
    return {"model": model.name, **measure(lambda: run_hf(hf, requests), args), "engine": facts}


def main() -> int:
    args = parse_arguments()
    measured = bench_hf_model(args) if args.backend == "hf" else bench_engine(args)
    result = {"benchmark": "latency", "backend": args.backend}
    result |= {name: getattr(args, name) for name in ("input_len", "output_len", "batch_size")}
    result |= measured | {"machine": machine.describe(resolve_device(args.device))}
    rows = {"latency, mean": f"{measured['avg_latency']:.4f} s, std {measured['std_latency']:.4f} s"}
    rows |= {f"latency, p{p}": f"{value:.4f} s" for p, value in measured["percentiles"].items()}
    rows["TTFT, median of runs"] = f"{measured['median_ttft_ms']:.1f} ms"
    if measured["median_tpot_ms"] is not None:
        speed = f"{measured['decode_tokens_per_second']:.1f} decoded tokens/s"
        rows["TPOT, median of runs"] = f"{measured['median_tpot_ms']:.2f} ms; {speed}"
    if args.backend != "hf":
        rows["steps"] = results.steps_line(measured["steps"])
        rows["compiled"] = results.compiled_line(measured["engine"])
    sizes = f"{args.batch_size} requests, {args.input_len} tokens in, {args.output_len} out"
    tables.print_table(f"{args.backend}, {measured['model']}, {measured['engine']['dtype']}: {sizes}", rows)
    tables.finish(result, args.output_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
