"""How fast many requests are served that are all submitted at once, as ``vllm bench throughput`` measures it.

    python scripts/bench/bench_throughput.py --workload W2          # Qwen3-0.6B's shape, random weights, bfloat16
    python scripts/bench/bench_throughput.py --model DIR --random-input-len 128 --random-output-len 64 --num-prompts 100
    python scripts/bench/bench_throughput.py --backend hf --hf-max-batch-size 32 --workload W2

Every request generates exactly ``output_len`` tokens; the end-of-text token is ignored. The times include neither
compiling nor encoding. A short warm-up precedes the first run, and the prefix cache is emptied before each run.
``--backend hf`` is transformers.generate: ``--hf-max-batch-size`` requests at a time in the order given, padded to the
longest prompt and run until the longest output is done; only the requested tokens count. ``--output-json`` has vLLM's
keys: ``elapsed_time`` (seconds, the median of ``--repeats`` runs), ``num_requests``, ``total_num_tokens``,
``requests_per_second`` and ``tokens_per_second`` (prompt and output together). ``--report`` writes the engine's report
on the last run. The last line is JSON. Exit status: 0, or 2 for bad arguments.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import own_checkout
import bench_arguments as arguments
import bench_hf
import bench_results as results
import tables
from workloads import Requests, engine_parser

from compiled_llm import CompiledEngine
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.system import hardware as machine
from compiled_llm.worker.device import resolve_device

_PERCENTILES = (50, 99)


def parse_arguments() -> argparse.Namespace:
    parser = engine_parser(__doc__)
    arguments.add_backend_flag(parser)
    parser.add_argument("--hf-max-batch-size", type=int, help="most requests in a batch of --backend hf")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs; the result is their median (default: 3)")
    tables.add_json_flag(parser, "--output-json")
    results.add_report_flag(parser)
    arguments.add_request_flags(parser)
    arguments.add_sampling_flags(parser)
    return parser.parse_checked(lambda args: check_arguments(args, parser), repeats=1, hf_max_batch_size=1)


def check_arguments(args: argparse.Namespace, parser: FlagParser) -> None:
    """``ValueError`` for bad arguments; checked before a model is loaded."""
    arguments.check_sampling(args)
    tables.check_target("--output-json", args.output_json)
    results.check_report(args.report)
    if args.backend != "hf" and args.hf_max_batch_size is not None:
        raise ValueError(f"--hf-max-batch-size needs --backend hf, given {args.backend!r}")
    if args.backend == "hf" and args.hf_max_batch_size is None:
        raise ValueError("--backend hf needs --hf-max-batch-size, the most requests in a padded batch")
    arguments.check_backend(args, parser)


def timed(run: Callable[[Requests], float], requests: Requests, repeats: int) -> list[float]:
    """Seconds of each of ``repeats`` runs after a short warm-up."""
    run([request._replace(output_len=min(2, request.output_len)) for request in requests[:1]])
    return [run(requests) for _ in range(repeats)]


def bench_engine(
    model: arguments.Model, requests: Requests, args: argparse.Namespace
) -> tuple[list[float], dict[str, Any]]:
    """(seconds of each run, figures of the engine and its last run)."""
    config = arguments.config_for(model, requests)
    started = time.perf_counter()
    with CompiledEngine.from_config(config) as engine:
        start_seconds = time.perf_counter() - started
        results.prepare_report(engine, args.report)
        before, outputs = engine.stats(), []

        def run(some: Requests) -> float:
            nonlocal before, outputs
            engine.reset_prefix_cache()  # the prompts are the same in each run
            engine.reset_report()
            before = engine.stats()
            seconds, outputs = results.generate(engine, some, arguments.sampling_of(args, some))
            return seconds

        elapsed = timed(run, requests, args.repeats)
        stats = engine.stats()
        facts = {
            **results.summary("ttft", list(map(results.ttft, outputs)), _PERCENTILES),
            **results.summary("tpot", results.tpots(outputs), _PERCENTILES),
            "steps": results.steps_between(before, stats),
            "peak_used_blocks": stats.peak_used_blocks,
            "num_kv_blocks": stats.num_kv_blocks,
            "engine": results.engine_facts(engine, start_seconds),
        }
        results.write_report(engine, args.report)
        print(engine.compile_report())
    return elapsed, facts


def bench_hf_model(
    model: arguments.Model, requests: Requests, args: argparse.Namespace
) -> tuple[list[float], dict[str, Any]]:
    """The same for transformers."""
    hf, facts = arguments.load_hf(model, requests, args)
    elapsed = timed(lambda some: bench_hf.run(hf, some, args.hf_max_batch_size), requests, args.repeats)
    return elapsed, {"hf_max_batch_size": args.hf_max_batch_size, "engine": facts}


def rows_of(result: dict[str, Any]) -> dict[str, str]:
    """The result as text: name -> value."""
    rows = {
        "tokens": f"{result['total_prompt_tokens']} prompt, {result['total_output_tokens']} output",
        "elapsed": f"{result['elapsed_time']:.3f} s, the median of "
        + ", ".join(f"{seconds:.3f}" for seconds in result["elapsed_times"]),
        "requests": f"{result['requests_per_second']:.3f} requests/s",
        "throughput": f"{result['tokens_per_second']:.1f} tokens/s, {result['output_tokens_per_second']:.1f} output "
        "tokens/s",
    }
    if result["backend"] == "hf":
        return rows
    return rows | {
        "TTFT, TPOT of the last run": f"median {result['median_ttft_ms']:.1f} ms, {result['median_tpot_ms']:.2f} ms",
        "steps of the last run": results.steps_line(result["steps"]),
        "KV blocks": f"peak {result['peak_used_blocks']} of {result['num_kv_blocks']}",
        "compiled": results.compiled_line(result["engine"]),
    }


def main() -> int:
    args = parse_arguments()
    bench = bench_engine if args.backend == "compiled-llm" else bench_hf_model
    with errors_end("bench_throughput"), arguments.described_model(args) as model:
        requests = arguments.requests_of(args, model)
        elapsed, facts = bench(model, requests, args)
    seconds = statistics.median(elapsed)
    prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    output_tokens = sum(request.output_len for request in requests)
    result = {
        "benchmark": "throughput",
        "backend": args.backend,
        "model": model.name,
        "workload": args.workload,
        "elapsed_time": seconds,
        "num_requests": len(requests),
        "total_num_tokens": prompt_tokens + output_tokens,
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": (prompt_tokens + output_tokens) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "total_prompt_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "elapsed_times": elapsed,
        **facts,
        "machine": machine.describe(resolve_device(args.device)),
    }
    title = f"{args.backend}, {model.name}, {result['engine']['dtype']}: {len(requests)} requests"
    tables.print_table(title, rows_of(result))
    tables.finish(result, args.output_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
