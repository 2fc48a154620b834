"""The time that one batch of requests takes from start to end, as ``vllm bench latency`` measures it.

    python scripts/bench/bench_latency.py --input-len 128 --output-len 128 --batch-size 1
    python scripts/bench/bench_latency.py --model DIR --batch-size 8 --output-json latency.json

All requests have random tokens, are submitted at once and generate exactly ``--output-len`` tokens; the end-of-text
token is ignored. ``--num-iters`` runs are timed, after ``--num-iters-warmup`` others. All runs have the same prompts,
so prefix caching is off by default. ``--output-json`` has vLLM's keys, in seconds: ``avg_latency``, ``std_latency``,
``latencies`` and ``percentiles``; also the TTFT and TPOT of each run, means over its requests. ``--report`` writes the
engine's report on the timed runs. The last line is JSON. Exit status: 0, or 2 for bad arguments."""

import argparse
import random
import statistics
import sys
from typing import Any

import bench_arguments as arguments
import bench_results as results
import tables
from tqdm import tqdm
from workloads import Requests, WorkloadRequest, random_tokens

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm import hardware as machine

PERCENTILES = (10, 25, 50, 75, 90, 99)


def parse_arguments() -> argparse.Namespace:
    parser = arguments.bench_parser((__doc__ or "").split("\n")[0])
    parser.set_defaults(enable_prefix_caching=False)
    parser.add_argument("--input-len", type=int, default=32, help="tokens of each prompt (default: 32)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens to generate for each (default: 128)")
    parser.add_argument("--batch-size", type=int, default=8, help="requests submitted at once (default: 8)")
    parser.add_argument("--n", type=int, default=1, help="continuations of each prompt: only 1 is served")
    parser.add_argument("--num-iters-warmup", type=int, default=2, help="runs before the timed ones (default: 2)")
    parser.add_argument("--num-iters", type=int, default=10, help="timed runs (default: 10)")
    tables.add_json_flag(parser, "--output-json")
    results.add_report_flag(parser)
    arguments.add_sampling_flags(parser)
    return parser.parse_checked(
        check_arguments, input_len=1, output_len=1, batch_size=1, num_iters=1, num_iters_warmup=0
    )


def check_arguments(args: argparse.Namespace) -> None:
    """``ValueError`` for bad arguments; checked before a model is loaded."""
    arguments.check_sampling(args)
    if args.n != 1:
        raise ValueError(f"--n must be 1, given {args.n}: several continuations of a prompt are not served yet")
    tables.check_target("--output-json", args.output_json)
    results.check_report(args.report)


def run(engine: CompiledEngine, requests: Requests, params: list[SamplingParams]) -> dict[str, float | None]:
    """Seconds of one run of the batch, and the mean TTFT and TPOT of its requests."""
    seconds, outputs = results.generate(engine, requests, params)
    tpots = results.tpots(outputs)
    return {
        "latency": seconds,
        "ttft": statistics.mean(map(results.ttft, outputs)),
        "tpot": statistics.mean(tpots) if tpots else None,
    }


def measure(engine: CompiledEngine, requests: Requests, args: argparse.Namespace) -> dict[str, Any]:
    """vLLM's keys, and ours."""
    params = arguments.sampling_of(args, requests)
    for _ in tqdm(range(args.num_iters_warmup), desc="warm-up", disable=None):
        run(engine, requests, params)
    engine.reset_report()
    before = engine.stats()
    runs = [run(engine, requests, params) for _ in tqdm(range(args.num_iters), desc="runs", disable=None)]
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
        "steps": results.steps_between(before, engine.stats()),
    }


def requests_of(args: argparse.Namespace, model: arguments.Model) -> Requests:
    rng, vocab_size = random.Random(args.seed), model.model_config.vocab_size
    return [
        WorkloadRequest(random_tokens(rng, vocab_size, args.input_len), args.output_len) for _ in range(args.batch_size)
    ]


def main() -> int:
    args = parse_arguments()
    model, requests, engine, start_seconds = arguments.start_engine("bench_latency", args, requests_of)
    with engine:
        results.prepare_report(engine, args.report)
        measured = measure(engine, requests, args)
        results.write_report(engine, args.report)
        facts = results.engine_facts(engine, start_seconds)
    result = {"benchmark": "latency", "model": model.name}
    result |= {name: getattr(args, name) for name in ("input_len", "output_len", "batch_size")}
    result |= {**measured, "engine": facts, "machine": machine.describe(engine.runner.device)}
    rows = {"latency, mean": f"{measured['avg_latency']:.4f} s, std {measured['std_latency']:.4f} s"}
    rows |= {f"latency, p{p}": f"{value:.4f} s" for p, value in measured["percentiles"].items()}
    rows["TTFT, median of runs"] = f"{measured['median_ttft_ms']:.1f} ms"
    if measured["median_tpot_ms"] is not None:
        rows["TPOT, median of runs"] = (
            f"{measured['median_tpot_ms']:.2f} ms; {measured['decode_tokens_per_second']:.1f} decoded tokens/s"
        )
    rows |= {"steps": results.steps_line(measured["steps"]), "compiled": results.compiled_line(facts)}
    sizes = f"{args.batch_size} requests, {args.input_len} tokens in, {args.output_len} out"
    tables.print_table(f"{model.name}, {facts['dtype']}: {sizes}", rows)
    tables.finish(result, args.output_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
