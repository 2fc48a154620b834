"""The time that one batch of requests takes from start to end, as ``vllm bench latency`` measures it.

    compiled-llm bench latency --input-len 128 --output-len 128 --batch-size 1
    compiled-llm bench latency --model DIR --batch-size 8 --output-json latency.json

All requests have random tokens, are submitted at once and generate exactly ``--output-len`` tokens; the end-of-text
token is ignored. ``--num-iters`` runs are timed, after ``--num-iters-warmup`` others. All runs have the same prompts,
so prefix caching is off by default. ``--output-json`` has vLLM's keys, in seconds: ``avg_latency``, ``std_latency``,
``latencies`` and ``percentiles``; also the TTFT and TPOT of each run, means over its requests. ``--report`` writes the
engine's report on the timed runs. ``--backend hf`` is transformers.generate on the same requests. The last line is
JSON. Exit status: 0, or 2 for bad arguments.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser
from compiled_llm.bench import serving
from compiled_llm.bench.harness import finish
from compiled_llm.bench.workloads import Requests, Timing, batch
from compiled_llm.checkpoint.shapes import engine_parser

PERCENTILES = (10, 25, 50, 75, 90, 99)
_LEAST = {"input_len": 1, "output_len": 1, "batch_size": 1, "num_iters": 1, "num_iters_warmup": 0}


def parser(program: str) -> FlagParser:
    made = engine_parser(program, "The time that one batch of requests takes from start to end.")
    made.set_defaults(enable_prefix_caching=False)
    made.add_argument("--input-len", type=int, default=32, help="tokens of each prompt (default: 32)")
    made.add_argument("--output-len", type=int, default=128, help="tokens to generate for each (default: 128)")
    made.add_argument("--batch-size", type=int, default=8, help="requests submitted at once (default: 8)")
    made.add_argument("--n", type=int, default=1, help="continuations of each prompt: only 1 is served")
    made.add_argument("--num-iters-warmup", type=int, default=2, help="runs before the timed ones (default: 2)")
    made.add_argument("--num-iters", type=int, default=10, help="timed runs (default: 10)")
    serving.add_backend_flags(made)
    serving.add_engine_flags(made)
    return made


def check_arguments(args: argparse.Namespace, flags: FlagParser) -> None:
    if args.n != 1:
        raise ValueError(f"--n must be 1, given {args.n}: several continuations of a prompt are not served yet")
    serving.check_serving(args, flags)


def requests_of(args: argparse.Namespace, model: serving.Model) -> Requests:
    sizes = {"count": args.batch_size, "input_len": args.input_len, "output_len": args.output_len}
    return batch(model.model_config.vocab_size, args.seed, **sizes)


def figures_of(runs: Sequence[Timing], batch_size: int) -> dict[str, Any]:
    """vLLM's keys, and ours."""
    latencies, ttfts = [one.seconds for one in runs], [statistics.mean(one.ttfts) for one in runs]
    tpots = [statistics.mean(one.tpots) if one.tpots else None for one in runs]
    tpot = statistics.median(one for one in tpots if one is not None) if any(tpots) else None
    return {
        "avg_latency": statistics.mean(latencies),
        "std_latency": statistics.pstdev(latencies),
        "latencies": latencies,
        "percentiles": serving.percentiles(latencies, PERCENTILES),
        "ttfts": ttfts,
        "tpots": tpots,
        "median_ttft_ms": statistics.median(ttfts) * 1e3,
        "median_tpot_ms": tpot and tpot * 1e3,
        "decode_tokens_per_second": tpot and batch_size / tpot,
    }


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    flags = parser(program)
    args = flags.parse_checked(lambda args: check_arguments(args, flags), arguments, **_LEAST)
    with serving.started(program, args, requests_of) as (backend, start_seconds):
        for _ in tqdm(range(args.num_iters_warmup), desc="warm-up", disable=None):
            backend.run(backend.requests)
        backend.begin()
        runs = [backend.run(backend.requests) for _ in tqdm(range(args.num_iters), desc="runs", disable=None)]
        result = {name: getattr(args, name) for name in ("backend", "input_len", "output_len", "batch_size")}
        result |= {"model": backend.name} | figures_of(runs, args.batch_size) | backend.figures(start_seconds)
    rows = {"latency, mean": f"{result['avg_latency']:.4f} s, std {result['std_latency']:.4f} s"}
    rows |= {f"latency, p{p}": f"{value:.4f} s" for p, value in result["percentiles"].items()}
    rows["TTFT, median of runs"] = f"{result['median_ttft_ms']:.1f} ms"
    if result["median_tpot_ms"] is not None:
        speed = f"{result['decode_tokens_per_second']:.1f} decoded tokens/s"
        rows["TPOT, median of runs"] = f"{result['median_tpot_ms']:.2f} ms; {speed}"
    sizes = f"{args.batch_size} requests, {args.input_len} tokens in, {args.output_len} out"
    tables.print_table(serving.title(result, sizes), rows | serving.engine_rows(result))
    finish("latency", result, args.output_json, device=backend.device)
    return 0
