"""What an offline run prints when it is done."""

import resource

from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.offline.progress import RunProgress
from compiled_llm.report.machine_limits import significant
from compiled_llm.report.report import RunReport
from compiled_llm.step.kv_cache import describe


def run_rows(progress: RunProgress, sampling: str) -> dict[str, str]:
    """Rows of the summary about the run as a whole."""
    seconds = max(progress.seconds, 1e-9)
    failed = f", {progress.failed} failed" if progress.failed else ""
    resumed = f"; {progress.resumed} were there before" if progress.resumed else ""
    return {
        "rows": f"{progress.rows} in {seconds:.2f} s{failed}{resumed}",
        "tokens": f"{progress.prompt_tokens} prompt ({progress.cached_tokens} found in the prefix cache), "
        f"{progress.output_tokens} output",
        "sampling": sampling,
        "throughput": f"{progress.output_tokens / seconds:.1f} output tokens/s, {progress.rows / seconds:.2f} rows/s",
    }


def engine_rows(engine: CompiledEngine, report: RunReport, start_seconds: float) -> dict[str, str]:
    """Rows of the summary about one engine."""
    stats, compiled, runner = engine.stats(), engine.compile_report(), engine.runner
    padding = stats.num_padding_tokens / max(1, stats.num_padding_tokens + stats.num_computed_tokens)
    kv_cache = describe(engine.model_config, runner.cache_dtypes, runner.dtype)
    peak = max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, engine.memory_report().start_peak_bytes)
    hits, misses = compiled.cache_count("hit"), compiled.cache_count("miss")
    temperature = "uncompiled" if not hits + misses else "warm" if not misses else "cold" if not hits else "partly warm"
    whole = stats.host_seconds + stats.execute_seconds - stats.launch_seconds
    return {
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


def print_summary(rows: dict[str, str]) -> None:
    """With the values below each other; of many workers, names are longer."""
    width = max(12, *map(len, rows))
    print("\nSummary")
    for name, value in rows.items():
        print(f"  {name:<{width}} {value}")


def percentiles(summary: dict[str, float] | None) -> str:
    if summary is None:
        return "none"
    return ", ".join(f"{name} {summary[name] * 1e3:.1f} ms" for name in ("mean", "p50", "p99"))


def of_the_limit(report: RunReport) -> str:
    """The phases' shares of what the machine can do."""
    if report.limits is None:
        return "not measured on this machine yet: --report does"
    phases = [
        f"{phase.name} {phase.limit_share:.0%} ({significant(phase.bytes_per_second / 1e9)} GB/s, "
        f"{significant(phase.flops_per_second / 1e12)} TFLOP/s)"
        for phase in report.phases
        if phase.limit_share is not None
    ]
    note = f"; {report.limits_note}" if report.limits_note else ""
    return f"{', '.join(phases) or 'no step'} of {report.limits}{note}"
