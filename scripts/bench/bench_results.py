"""What the benchmarks compute from their measurements: percentiles, and what an engine did."""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from workloads import Requests

from compiled_llm import CompiledEngine, EngineStats, RequestOutput, SamplingParams
from compiled_llm.report import machine_limits


def percentiles(values: Sequence[float], shown: Sequence[float]) -> dict[str, float]:
    """Percentile -> value, interpolated between neighbours as numpy does; keys like "99" and "99.9"."""
    return {f"{p:g}": float(np.percentile(values, p)) for p in shown}


def summary(metric: str, values: Sequence[float], shown: Sequence[float]) -> dict[str, float]:
    """``mean_ttft_ms``, ``median_``, ``std_`` and ``p99_`` of seconds, for ``metric`` "ttft"; 0 if there is none."""
    milliseconds = [value * 1e3 for value in values] or [0.0]
    result = {
        f"mean_{metric}_ms": float(np.mean(milliseconds)),
        f"median_{metric}_ms": float(np.median(milliseconds)),
        f"std_{metric}_ms": float(np.std(milliseconds)),
    }
    return result | {f"p{p}_{metric}_ms": value for p, value in percentiles(milliseconds, shown).items()}


def generate(
    engine: CompiledEngine, requests: Requests, params: list[SamplingParams]
) -> tuple[float, list[RequestOutput]]:
    """(seconds, outputs) of requests that are submitted at once; each must get exactly the tokens that it asks for."""
    prompts = [request.prompt_token_ids for request in requests]
    started = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    for output, request in zip(outputs, requests, strict=True):
        completion = output.outputs[0]
        if len(completion.token_ids) != request.output_len:
            raise RuntimeError(
                f"request {output.request_id} got {len(completion.token_ids)} tokens of {request.output_len}: "
                f"{completion.finish_reason}, {completion.stop_reason}"
            )
    return seconds, outputs


def ttft(output: RequestOutput) -> float:
    """Seconds from a request's arrival to its first token."""
    assert output.metrics.first_token_time is not None
    return output.metrics.first_token_time - output.metrics.arrival_time


def tpots(outputs: Sequence[RequestOutput]) -> list[float]:
    """Seconds a token after the first one, of the requests that have another."""
    found = []
    for output in outputs:
        metrics, count = output.metrics, len(output.outputs[0].token_ids)
        if count > 1:
            assert metrics.first_token_time is not None
            assert metrics.finished_time is not None
            found.append((metrics.finished_time - metrics.first_token_time) / (count - 1))
    return found


def steps_between(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """Costs of the steps between two readings of an engine's statistics."""
    steps = max(1, after.num_steps - before.num_steps)
    padding = after.num_padding_tokens - before.num_padding_tokens
    computed = after.num_computed_tokens - before.num_computed_tokens
    return {
        "num_steps": after.num_steps - before.num_steps,
        "step_milliseconds": (after.execute_seconds - before.execute_seconds) / steps * 1e3,
        "launch_microseconds_a_step": (after.launch_seconds - before.launch_seconds) / steps * 1e6,
        "host_microseconds_a_step": (after.host_seconds - before.host_seconds) / steps * 1e6,
        "padding_share": padding / max(1, padding + computed),
        "num_computed_tokens": computed,
        "prefix_hit_tokens": after.prefix_hit_tokens - before.prefix_hit_tokens,
        "num_preemptions": after.num_preemptions - before.num_preemptions,
    }


def engine_facts(engine: CompiledEngine, start_seconds: float) -> dict[str, Any]:
    """Sizes and dtypes of an engine, and figures of its start and its compiled graphs."""
    report, limits = engine.compile_report(), engine.runner.limits
    return {
        "start_seconds": start_seconds,
        "graphs": report.graphs,
        "graph_breaks": report.graph_breaks,
        "recompiles": report.recompiles,
        "compile_seconds": report.compile_seconds,
        "cuda_graph_bytes": sum(graph.cuda_graph_bytes for graph in report.reports),
        "cache_misses": report.cache_count("miss"),
        "enforce_eager": engine.config.enforce_eager,
        "dtype": str(engine.runner.dtype).removeprefix("torch."),
        "kv_cache_dtype": engine.config.kv_cache_dtype,
        "max_model_len": limits.max_model_len,
        "bucket_sizes": limits.decode_bucket_sizes,
        "token_bucket_sizes": limits.token_bucket_sizes,
    }


def compiled_line(facts: Mapping[str, Any]) -> str:
    """``engine_facts`` as one line of text."""
    if facts["enforce_eager"]:
        return f"not compiled; start {facts['start_seconds']:.1f} s"
    return (
        f"{facts['graphs']} graphs, {facts['graph_breaks']} graph breaks, {facts['recompiles']} recompiles after "
        f"ready, start {facts['start_seconds']:.1f} s of which compiling {facts['compile_seconds']:.1f} s, "
        f"{facts['cache_misses']} not found in the cache"
    )


def steps_line(steps: Mapping[str, float]) -> str:
    """``steps_between`` as one line of text."""
    return (
        f"{steps['num_steps']} of {steps['step_milliseconds']:.2f} ms, host {steps['host_microseconds_a_step']:.0f} us "
        f"each, padding {steps['padding_share']:.1%}, {steps['prefix_hit_tokens']} tokens found in the prefix cache"
    )


def add_report_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", type=Path, metavar="DIR", help="write the engine's report, as HTML and JSON")


def check_report(path: Path | None) -> None:
    """``ValueError`` where ``--report`` names a file."""
    if path is not None and path.exists() and not path.is_dir():
        raise ValueError(f"--report {path} is a file: give a directory")


def prepare_report(engine: CompiledEngine, path: Path | None) -> None:
    """If a report is requested and the machine's limits are unknown, measure them: before the runs, not after them."""
    if path is not None:
        machine_limits.measured(engine.runner.device, engine.runner.dtype)


def write_report(engine: CompiledEngine, path: Path | None) -> None:
    """What the engine did since its ``reset_report``, into a directory."""
    if path is not None:
        engine.report().write(path)
        print(f"\nReport: {path / 'report.html'}")
