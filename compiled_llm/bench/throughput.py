"""How fast many requests are served that are all submitted at once, as ``vllm bench throughput`` measures it.

    compiled-llm bench throughput --workload W2          # Qwen3-0.6B's shape, random weights, bfloat16
    compiled-llm bench throughput --model DIR --random-input-len 128 --random-output-len 64 --num-prompts 100
    compiled-llm bench throughput --backend hf --hf-max-batch-size 32 --workload W2

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
import time
from collections.abc import Callable, Sequence
from typing import Any

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.api.outputs import RequestOutput
from compiled_llm.bench import hf, serving
from compiled_llm.bench.harness import finish
from compiled_llm.bench.workloads import Requests
from compiled_llm.checkpoint.shapes import engine_parser
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.worker.device import resolve_device

_PERCENTILES = (50, 99)


def parser(program: str) -> FlagParser:
    made = engine_parser(program, "How fast many requests are served that are all submitted at once.")
    serving.add_backend_flag(made)
    made.add_argument("--hf-max-batch-size", type=int, help="most requests in a batch of --backend hf")
    made.add_argument("--repeats", type=int, default=3, help="timed runs; the result is their median (default: 3)")
    made.add_argument("--output-json", type=tables.output_file, metavar="FILE", help="write the JSON line there too")
    serving.add_report_flag(made)
    serving.add_request_flags(made)
    serving.add_sampling_flags(made)
    return made


def check_arguments(args: argparse.Namespace, flags: FlagParser) -> None:
    if args.backend != "hf" and args.hf_max_batch_size is not None:
        raise ValueError(f"--hf-max-batch-size needs --backend hf, given {args.backend!r}")
    if args.backend == "hf" and args.hf_max_batch_size is None:
        raise ValueError("--backend hf needs --hf-max-batch-size, the most requests in a padded batch")
    serving.check_serving(args, flags)


def timed(run: Callable[[Requests], float], requests: Requests, repeats: int) -> list[float]:
    """Seconds of each of ``repeats`` runs after a short warm-up."""
    run([request._replace(output_len=min(2, request.output_len)) for request in requests[:1]])
    return [run(requests) for _ in range(repeats)]


def bench_engine(
    model: serving.Model, requests: Requests, args: argparse.Namespace
) -> tuple[list[float], dict[str, Any]]:
    """(seconds of each run, figures of the engine and its last run)."""
    config = serving.config_for(model, requests)
    started = time.perf_counter()
    with CompiledEngine.from_config(config) as engine:
        start_seconds = time.perf_counter() - started
        serving.prepare_report(engine, args.report)
        before, outputs = engine.stats(), list[RequestOutput]()

        def run(some: Requests) -> float:
            nonlocal before, outputs
            engine.reset_prefix_cache()  # the prompts are the same in each run
            engine.reset_report()
            before = engine.stats()
            seconds, outputs = serving.generate(engine, some, serving.sampling_of(args, some))
            return seconds

        elapsed = timed(run, requests, args.repeats)
        stats = engine.stats()
        facts = {
            **serving.summary("ttft", list(map(serving.ttft, outputs)), _PERCENTILES),
            **serving.summary("tpot", serving.tpots(outputs), _PERCENTILES),
            "steps": serving.steps_between(before, stats),
            "peak_used_blocks": stats.peak_used_blocks,
            "num_kv_blocks": stats.num_kv_blocks,
            "engine": serving.engine_facts(engine, start_seconds),
        }
        serving.write_report(engine, args.report)
        print(engine.compile_report())
    return elapsed, facts


def bench_hf(model: serving.Model, requests: Requests, args: argparse.Namespace) -> tuple[list[float], dict[str, Any]]:
    """The same for transformers."""
    module, facts = serving.load_hf(model, requests, args)
    elapsed = timed(lambda some: hf.run(module, some, args.hf_max_batch_size), requests, args.repeats)
    return elapsed, {"hf_max_batch_size": args.hf_max_batch_size, "engine": facts}


def rows_of(result: dict[str, Any]) -> dict[str, str]:
    """The result as text: name -> value."""
    tokens = f"{result['tokens_per_second']:.1f} tokens/s, {result['output_tokens_per_second']:.1f} output tokens/s"
    rows = {
        "tokens": f"{result['total_prompt_tokens']} prompt, {result['total_output_tokens']} output",
        "elapsed": f"{result['elapsed_time']:.3f} s, the median of "
        + ", ".join(f"{seconds:.3f}" for seconds in result["elapsed_times"]),
        "requests": f"{result['requests_per_second']:.3f} requests/s",
        "throughput": tokens,
    }
    if result["backend"] == "hf":
        return rows
    return rows | {
        "TTFT, TPOT of the last run": f"median {result['median_ttft_ms']:.1f} ms, {result['median_tpot_ms']:.2f} ms",
        "steps of the last run": serving.steps_line(result["steps"]),
        "KV blocks": f"peak {result['peak_used_blocks']} of {result['num_kv_blocks']}",
        "compiled": serving.compiled_line(result["engine"]),
    }


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    flags = parser(program)
    least = {"repeats": 1, "hf_max_batch_size": 1}
    args = flags.parse_checked(lambda args: check_arguments(args, flags), arguments, **least)
    bench = bench_engine if args.backend == "compiled-llm" else bench_hf
    with errors_end(program), serving.described_model(args) as model:
        requests = serving.requests_of(args, model)
        elapsed, facts = bench(model, requests, args)
    seconds = statistics.median(elapsed)
    prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    output_tokens = sum(request.output_len for request in requests)
    result = {
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
    }
    title = f"{args.backend}, {model.name}, {result['engine']['dtype']}: {len(requests)} requests"
    tables.print_table(title, rows_of(result))
    finish("throughput", result, args.output_json, device=resolve_device(args.device))
    return 0
