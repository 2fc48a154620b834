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
from collections.abc import Sequence
from typing import Any

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser
from compiled_llm.bench import serving
from compiled_llm.bench.harness import finish
from compiled_llm.bench.workloads import Requests, Timing
from compiled_llm.checkpoint.shapes import engine_parser

_PERCENTILES = (50, 99)


def parser(program: str) -> FlagParser:
    made = engine_parser(program, "How fast many requests are served that are all submitted at once.")
    made.add_argument("--hf-max-batch-size", type=int, help="most requests in a batch of --backend hf")
    made.add_argument("--repeats", type=int, default=3, help="timed runs; the result is their median (default: 3)")
    serving.add_backend_flags(made)
    serving.add_request_flags(made)
    serving.add_engine_flags(made)
    return made


def check_arguments(args: argparse.Namespace, flags: FlagParser) -> None:
    if args.backend != "hf" and args.hf_max_batch_size is not None:
        raise ValueError(f"--hf-max-batch-size needs --backend hf, given {args.backend!r}")
    if args.backend == "hf" and args.hf_max_batch_size is None:
        raise ValueError("--backend hf needs --hf-max-batch-size, the most requests in a padded batch")
    serving.check_serving(args, flags)


def figures_of(runs: Sequence[Timing], requests: Requests) -> dict[str, Any]:
    """vLLM's keys, and ours."""
    seconds = statistics.median(one.seconds for one in runs)
    prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    output_tokens = sum(request.output_len for request in requests)
    return {
        "elapsed_time": seconds,
        "num_requests": len(requests),
        "total_num_tokens": prompt_tokens + output_tokens,
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": (prompt_tokens + output_tokens) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "total_prompt_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "elapsed_times": [one.seconds for one in runs],
        **serving.summary("ttft", runs[-1].ttfts, _PERCENTILES),
        **serving.summary("tpot", runs[-1].tpots, _PERCENTILES),
    }


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    flags = parser(program)
    least = {"repeats": 1, "hf_max_batch_size": 1}
    args = flags.parse_checked(lambda args: check_arguments(args, flags), arguments, **least)
    with serving.started(program, args, serving.requests_of) as (backend, start_seconds):
        requests, runs = backend.requests, []
        backend.run([request._replace(output_len=min(2, request.output_len)) for request in requests[:1]])
        for _ in range(args.repeats):
            backend.begin(empty_cache=True)  # the prompts are the same in each run
            runs.append(backend.run(requests))
        result = {"backend": args.backend, "model": backend.name, "workload": args.workload}
        result |= figures_of(runs, requests) | backend.figures(start_seconds)
    times = ", ".join(f"{one.seconds:.3f}" for one in runs)
    rates = f"{result['tokens_per_second']:.1f} tokens/s, {result['output_tokens_per_second']:.1f} output tokens/s"
    rows = {
        "tokens": f"{result['total_prompt_tokens']} prompt, {result['total_output_tokens']} output",
        "elapsed": f"{result['elapsed_time']:.3f} s, the median of {times}",
        "requests": f"{result['requests_per_second']:.3f} requests/s",
        "throughput": rates,
        "TTFT, TPOT of the last run": f"median {result['median_ttft_ms']:.1f} ms, {result['median_tpot_ms']:.2f} ms",
    }
    tables.print_table(serving.title(result, f"{len(requests)} requests"), rows | serving.engine_rows(result))
    finish("throughput", result, args.output_json, device=backend.device)
    return 0
