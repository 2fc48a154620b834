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
        "rows": f"{progress.rows} in {seconds:.2f} s, {progress.rows / seconds:,.2f} a second{failed}{resumed}",
        "tokens": f"{progress.prompt_tokens:,} of prompts, "
        f"{progress.cached_tokens:,} of them found in the prefix cache; "
        f"{progress.output_tokens:,} generated, {progress.output_tokens / seconds:,.0f} a second",
        "sampling": sampling,
    }


def engine_rows(engine: CompiledEngine, report: RunReport, start_seconds: float) -> dict[str, str]:
    """What is worth a look of one engine, in five rows at most."""
    stats, runner = engine.stats(), engine.runner
    preempted = f"; {stats.num_preemptions} preemptions for lack of room" if stats.num_preemptions else ""
    phases = [f"{phase.name} {phase.limit_share:.0%}" for phase in report.phases if phase.limit_share is not None]
    rows = {
        "latency": latency(report),
        "efficiency": f"{', '.join(phases)} of what this machine could do at most",
        "KV cache": f"{kv_cache_of(engine)}, at most {stats.peak_used_blocks / stats.num_kv_blocks:.1%} of it in use"
        f"{preempted}",
        "start": f"{start_seconds:.1f} s, of which {runner.start_times.compile:.1f} s to compile graphs or load them",
        "memory": f"at most {peak_bytes(engine) / 2**20:.0f} MiB, weights {runner.weight_bytes / 2**20:.0f} MiB of it",
    }
    return rows if phases else {name: text for name, text in rows.items() if name != "efficiency"}


def detailed_rows(engine: CompiledEngine, report: RunReport, start_seconds: float) -> dict[str, str]:
    """All there is to say of one engine."""
    stats, compiled, runner = engine.stats(), engine.compile_report(), engine.runner
    padding = stats.num_padding_tokens / max(1, stats.num_padding_tokens + stats.num_computed_tokens)
    hits, misses = compiled.cache_count("hit"), compiled.cache_count("miss")
    temperature = "uncompiled" if not hits + misses else "warm" if not misses else "cold" if not hits else "partly warm"
    whole = stats.host_seconds + stats.execute_seconds - stats.launch_seconds
    return {
        "TTFT": percentiles(report.latencies["ttft"]),
        "TPOT": percentiles(report.latencies["tpot"]),
        "steps": f"{stats.num_steps}, padding {padding:.1%} of the buckets' rows",
        "efficiency": efficiency(report),
        "KV cache": kv_cache_of(engine),
        "KV use": f"peak {stats.peak_used_blocks} of {stats.num_kv_blocks} blocks "
        f"({stats.peak_used_blocks / stats.num_kv_blocks:.1%})",
        "prefix cache": f"{stats.prefix_hit_tokens} of {stats.prefix_queried_tokens} tokens found, "
        f"{stats.num_evictions} evictions, {stats.cached_blocks} blocks cached",
        "preemptions": f"{stats.num_recompute_preemptions} by recompute ({stats.num_recomputed_tokens} tokens), "
        f"{stats.num_swap_preemptions} by swap ({stats.num_swapped_out_tokens} tokens out, "
        f"{stats.num_swapped_in_tokens} in)",
        "host time": f"{stats.host_seconds / max(1, stats.num_steps) * 1e6:.0f} us a step, "
        f"{stats.host_seconds / max(1e-9, whole):.1%} of all time in steps",
        "compiled": f"{compiled.graphs} graphs, {compiled.graph_breaks} graph breaks, {compiled.recompiles} recompiles "
        f"after ready, {compiled.compile_seconds:.1f} s, cache {hits} hits {misses} misses",
        "start": f"{start_seconds:.1f} s ({temperature}), of which kernels {runner.start_times.kernels:.1f}, weights "
        f"{runner.start_times.weights:.1f}, compile {runner.start_times.compile:.1f} s",
        "peak memory": f"{peak_bytes(engine) / 2**20:.0f} MiB, of which weights {runner.weight_bytes / 2**20:.0f} MiB",
    }


def one_of_many(rows: dict[str, str]) -> dict[str, str]:
    """The same rows as one, for runs with several engines."""
    return {"engine": "; ".join(f"{name} {text}" for name, text in rows.items())}


def kv_cache_of(engine: CompiledEngine) -> str:
    """Its dtype, and what it takes."""
    runner = engine.runner
    described = describe(engine.model_config, runner.cache_dtypes, runner.dtype)
    return f"{described}; a pool of {runner.kv_cache_bytes / 2**20:.1f} MiB"


def peak_bytes(engine: CompiledEngine) -> int:
    """Most memory of the host that this process held."""
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, engine.memory_report().start_peak_bytes)


def print_summary(rows: dict[str, str]) -> None:
    """With the values below each other; of many workers, names are longer."""
    width = max(12, *map(len, rows))
    print("\nSummary")
    for name, value in rows.items():
        print(f"  {name:<{width}} {value}")


def latency(report: RunReport) -> str:
    """Times to the first token, and between those that follow."""
    first, others = report.latencies["ttft"], report.latencies["tpot"]
    if first is None:
        return "no token was generated"
    texts = [f"first token after {_mean(first)}"] + [f"then one every {_mean(others)}" for others in [others] if others]
    return ", ".join(texts)


def _mean(summary: dict[str, float]) -> str:
    return f"{summary['mean'] * 1e3:.1f} ms (99% within {summary['p99'] * 1e3:.1f})"


def percentiles(summary: dict[str, float] | None) -> str:
    if summary is None:
        return "none"
    return ", ".join(f"{name} {summary[name] * 1e3:.1f} ms" for name in ("mean", "p50", "p99"))


def efficiency(report: RunReport) -> str:
    """The phases' shares of what the machine can do."""
    if report.limits is None:
        return "unknown, because the limits of this machine are not measured; --report DIR measures them"
    phases = [
        f"{phase.name} {phase.limit_share:.0%} ({significant(phase.bytes_per_second / 1e9)} GB/s, "
        f"{significant(phase.flops_per_second / 1e12)} TFLOP/s)"
        for phase in report.phases
        if phase.limit_share is not None
    ]
    note = f"; {report.limits_note}" if report.limits_note else ""
    return f"{', '.join(phases) or 'no step'} of {report.limits}{note}"
