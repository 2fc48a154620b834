"""Serve a file of prompts and print the results and a summary.

    python scripts/serve_offline.py --bucket-sizes 1,8,32
    python scripts/serve_offline.py --model DIR --input prompts.jsonl --output out.jsonl --resume

Without ``--input`` the bundled prompts run through the bundled model. ``--input`` takes .jsonl (rows with ``prompt`` or
``prompt_token_ids``, and if wanted ``cache_salt`` and ``priority``) or .txt (a prompt a line). ``--output`` is written
row by row, each row as soon as it is done; ``--resume`` serves only the rows that it does not hold yet.

``--report DIR`` writes what the run did and how near the machine's limits it ran (``report.html``, ``report.json``; see
docs/report.md), ``--trace FILE`` the shapes of its steps, which ``scripts/tune_buckets.py`` reads.

Exit status: 0 when every row was served, 1 when some failed (each is named), 2 for bad arguments.
"""

import argparse
import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from compiled_llm import CompiledEngine, CompletionOutput, Logprob, RequestOutput, SamplingParams, machine_limits
from compiled_llm.arguments import add_engine_arguments, add_sampling_arguments, engine_config, sampling_params
from compiled_llm.engine import DEMO_MODEL
from compiled_llm.kv_cache import describe
from compiled_llm.report import RunReport


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--input", type=Path, help="prompts, .jsonl or .txt (default: the bundled prompts)")
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="write a JSON row for each finished request")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --output, serve the missing ones")
    parser.add_argument("--quiet", action="store_true", help="print the summary only")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write a report of the run there, as HTML and JSON")
    parser.add_argument(
        "--report-profile-steps",
        type=int,
        metavar="N",
        help="for the report, run N steps of each bucket a second time under torch's profiler (default: 4)",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the shapes of all steps, for tune_buckets.py")
    parser.add_argument(
        "--remeasure-limits", action="store_true", help="measure the machine's limits anew, not once per machine"
    )
    add_engine_arguments(parser)
    add_sampling_arguments(parser, max_tokens=64, temperature=0.7)
    args = parser.parse_args()
    if args.resume and args.output is None:
        parser.error("--resume needs --output, the file to resume")
    if args.output is not None and args.output.exists() and not args.resume:
        parser.error(f"--output {args.output} exists: give --resume to go on with it, or another name")
    if args.output is not None and not os.access(args.output.parent, os.W_OK):
        parser.error(f"--output {args.output}: its directory is not there, or may not be written to")
    if args.input is not None and args.input.suffix not in (".jsonl", ".txt"):
        parser.error(f"--input must end in .jsonl or .txt, given {args.input}")
    if args.report is None and args.report_profile_steps is not None:
        parser.error("--report-profile-steps needs --report, the directory to write to")
    if args.report_profile_steps is not None and not 0 <= args.report_profile_steps <= 1000:
        parser.error(f"--report-profile-steps must be from 0 to 1000, given {args.report_profile_steps}")
    if args.report is not None and args.report.exists() and not args.report.is_dir():
        parser.error(f"--report {args.report} is a file: give a directory")
    if args.trace is not None and (args.trace.is_dir() or not os.access(args.trace.parent, os.W_OK)):
        parser.error(f"--trace {args.trace}: a directory, or one that is not there or may not be written to")
    return args


def read_prompts(path: Path) -> list[Any]:
    """A prompt for each row; a ``ValueError`` stands in the place of a row that cannot be read."""
    lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines(), which knows more ends of lines than JSON
    if path.suffix == ".txt":
        return [line for line in lines if line.strip()]
    return [parse_row(line) for line in lines if line.strip()]


def parse_row(line: str) -> Any:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON: {error}")
    if not isinstance(row, dict) or ("prompt" in row) == ("prompt_token_ids" in row):
        return ValueError("a row must be an object with either 'prompt' or 'prompt_token_ids'")
    unknown = sorted(row.keys() - {"prompt", "prompt_token_ids", "cache_salt", "priority"})
    return ValueError(f"a row has an unknown key: {', '.join(unknown)}") if unknown else row


def finished_rows(path: Path) -> set[int]:
    """Indices of the rows that ``path`` holds. A last line that a crash cut off is removed from the file."""
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    try:
        indices = {int(json.loads(line)["index"]) for line in whole.split(b"\n")[:-1]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--output {path} is no file of this script, so it is left as it is: {error!r}") from error
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return indices


def serve(engine: CompiledEngine, prompts: dict[int, Any], params: SamplingParams) -> Iterator[tuple[int, Any]]:
    """(index, output) of each prompt as it finishes; (index, ``ValueError``) for one that cannot be served."""
    for index, prompt in prompts.items():
        try:
            if isinstance(prompt, ValueError):
                raise prompt
            priority = prompt.pop("priority", 0) if isinstance(prompt, dict) else 0
            engine.add_request(str(index), prompt, params, priority)
        except ValueError as error:
            yield index, error
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                yield int(output.request_id), output


def row_of(index: int, output: RequestOutput) -> dict[str, Any]:
    row = {"index": index, "prompt": output.prompt, **fields_of(output.outputs[0])}
    if len(output.outputs) > 1:
        row["outputs"] = [fields_of(completion) for completion in output.outputs]
    if output.prompt_logprobs is not None:
        row["prompt_logprobs"] = [logprobs and readable(logprobs) for logprobs in output.prompt_logprobs]
    return row


def fields_of(completion: CompletionOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        fields["cumulative_logprob"] = completion.cumulative_logprob
        fields["logprobs"] = [readable(logprobs) for logprobs in completion.logprobs]
    return fields


def readable(logprobs: dict[int, Logprob]) -> dict[int, dict[str, Any]]:
    return {token_id: dataclasses.asdict(logprob) for token_id, logprob in logprobs.items()}


def percentiles(summary: dict[str, float] | None) -> str:
    if summary is None:
        return "none"
    return ", ".join(f"{name} {summary[name] * 1e3:.1f} ms" for name in ("mean", "p50", "p99"))


def of_the_limit(report: RunReport) -> str:
    """The phases' shares of what the machine can do."""
    if report.limits is None:
        return "not measured on this machine yet: --report does"
    phases = [
        f"{phase.name} {phase.limit_share:.0%} ({phase.bytes_per_second / 1e9:.1f} GB/s, "
        f"{phase.flops_per_second / 1e12:.2f} TFLOP/s)"
        for phase in report.phases
        if phase.limit_share is not None
    ]
    return f"{', '.join(phases) or 'no step'} of {report.limits}"


def print_summary(engine: CompiledEngine, outputs: list[RequestOutput], seconds: float, start_seconds: float) -> None:
    stats, compiled, report = engine.stats(), engine.compile_report(), engine.report(measure_limits=False)
    seconds -= report.profile_seconds
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    padding = stats.num_padding_tokens / max(1, stats.num_padding_tokens + stats.num_computed_tokens)
    runner = engine.runner
    kv_cache = describe(engine.model_config, runner.cache_dtypes, runner.dtype)
    peak = max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, engine.memory_report().start_peak_bytes)
    hits, misses = compiled.cache_count("hit"), compiled.cache_count("miss")
    temperature = "uncompiled" if not hits + misses else "warm" if not misses else "cold" if not hits else "partly warm"
    whole = stats.host_seconds + stats.execute_seconds - stats.launch_seconds
    rows = {
        "requests": f"{len(outputs)} in {seconds:.2f} s",
        "tokens": f"{prompt_tokens} prompt, {output_tokens} output",
        "throughput": f"{output_tokens / seconds:.1f} output tokens/s, {len(outputs) / seconds:.2f} requests/s",
        "TTFT": percentiles(report.latencies["ttft"]),
        "TPOT": percentiles(report.latencies["tpot"]),
        "steps": f"{stats.num_steps}, padding {padding:.1%} of the buckets' rows",
        "of the limit": of_the_limit(report),
        "KV cache": f"{kv_cache}; a pool of {runner.kv_cache_bytes / 2**20:.1f} MiB",
        "KV use": f"peak {stats.peak_used_blocks} of {stats.num_kv_blocks} blocks "
        f"({stats.peak_used_blocks / stats.num_kv_blocks:.1%})",
        "prefix cache": f"{stats.prefix_hit_tokens} of {stats.prefix_queried_tokens} tokens found, "
        f"{stats.num_evictions} evictions, {stats.cached_blocks} blocks cached",
        "preemptions": f"{stats.num_recompute_preemptions} by recompute ({stats.num_recomputed_tokens} tokens), "
        f"{stats.num_swap_preemptions} by swap ({stats.num_swapped_out_tokens} tokens out, "
        f"{stats.num_swapped_in_tokens} in)",
        "host time": f"{stats.host_seconds / max(1, stats.num_steps) * 1e6:.0f} us a step, "
        f"{stats.host_seconds / max(1e-9, whole):.1%} of it",
        "compiled": f"{compiled.graphs} graphs, {compiled.graph_breaks} graph breaks, {compiled.recompiles} recompiles "
        f"after ready, {compiled.compile_seconds:.1f} s, cache {hits} hits {misses} misses",
        "start": f"{start_seconds:.1f} s ({temperature}), of which kernels {runner.start_times.kernels:.1f}, weights "
        f"{runner.start_times.weights:.1f}, compile {runner.start_times.compile:.1f} s",
        "peak memory": f"{peak / 2**20:.0f} MiB, of which weights {runner.weight_bytes / 2**20:.0f} MiB",
    }
    print("\nSummary")
    for name, value in rows.items():
        print(f"  {name:<12} {value}")


def main() -> int:
    args = parse_arguments()
    try:
        prompts = dict(enumerate(read_prompts(args.input or DEMO_MODEL / "prompts.jsonl")))
        done = finished_rows(args.output) if args.resume else set()
        params = sampling_params(args)
        engine = CompiledEngine.from_config(engine_config(args))
    except (ValueError, OSError) as error:
        print(f"serve_offline: error: {error}", file=sys.stderr)
        return 2
    start_seconds = time.time() - psutil.Process().create_time()  # of the process: imports count
    if args.report is not None or args.remeasure_limits:
        machine_limits.measured(engine.runner.device, engine.runner.dtype, remeasure=args.remeasure_limits)
    if args.report is not None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler writes its stages to the terminal otherwise
        engine.reset_report(profile_steps=4 if args.report_profile_steps is None else args.report_profile_steps)
    if not args.quiet:
        print(engine.compile_report())
        print(f"\n{engine.memory_report()}")

    failed: dict[int, str] = {}
    outputs: list[RequestOutput] = []
    todo = {index: prompt for index, prompt in prompts.items() if index not in done}
    started = time.perf_counter()
    with open(args.output or os.devnull, "a", encoding="utf-8") as file, tqdm(total=len(todo), unit="prompt") as bar:
        for index, output in serve(engine, todo, params):
            bar.update()
            if isinstance(output, ValueError):
                failed[index] = str(output)
                continue
            outputs.append(output)
            file.write(json.dumps(row_of(index, output), ensure_ascii=False) + "\n")
            file.flush()
    seconds = time.perf_counter() - started

    if not args.quiet:
        for output in sorted(outputs, key=lambda output: int(output.request_id)):
            prompt = output.prompt if output.prompt is not None else str(output.prompt_token_ids)
            for completion in output.outputs:
                name = output.request_id if len(output.outputs) == 1 else f"{output.request_id}.{completion.index}"
                print(f"\n--- {name}: {completion.finish_reason}, {len(completion.token_ids)} tokens")
                print(f"{prompt}\033[1m{completion.text}\033[0m" if sys.stdout.isatty() else prompt + completion.text)
    if done:
        print(f"\n{len(done)} rows were there already")
    print_summary(engine, outputs, max(seconds, 1e-9), start_seconds)
    if args.report is not None:
        engine.report().write(args.report)
        print(f"\nReport: {args.report / 'report.html'}")
    if args.trace is not None:
        args.trace.write_text(json.dumps(engine.trace(), indent=1) + "\n")
    for index, reason in sorted(failed.items()):
        print(f"row {index} failed: {reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
