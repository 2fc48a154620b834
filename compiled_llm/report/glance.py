"""What a report says at a glance: some lines of text."""

from typing import TYPE_CHECKING

from compiled_llm.readable import table

if TYPE_CHECKING:
    from compiled_llm.report.report import RunReport, StepsReport


def glance(report: "RunReport") -> str:
    """A dozen lines, the last of which says where the rest is."""
    stats, compiled = report.stats, report.compile_report
    seconds = max(report.seconds, 1e-9)
    rows = {
        "requests": f"{report.num_finished:,} ended in {report.seconds:.2f} s",
        "tokens": f"{stats.num_prompt_tokens:,} of prompts, {stats.num_output_tokens:,} generated: "
        f"{stats.num_output_tokens / seconds:,.0f} a second",
        "first token": _times(report.latencies["ttft"]),
        "next tokens": _times(report.latencies["tpot"]),
        **{phase.name: steps_line(phase) for phase in report.phases},
        "time": ", ".join(f"{name} {part / seconds:.0%}" for name, part in report.time.items()),
        "KV cache": f"at most {stats.peak_used_blocks:,} of {stats.num_kv_blocks:,} blocks in use, "
        f"{stats.num_preemptions:,} preemptions",
        "prefix cache": f"{stats.prefix_hit_tokens:,} of {stats.prefix_queried_tokens:,} prompt tokens found",
        "compiled": f"{compiled.graphs} graphs, {compiled.graph_breaks} graph breaks, {compiled.recompiles} recompiles",
        "exact": f"a request's results are the same to the bit in any batch: {report.exact}",
    }
    return table(f"RunReport of {report.model}", rows) + '\n  report.write("DIR") writes all of it: HTML, JSON, a trace'


def steps_line(steps: "StepsReport") -> str:
    """``64 steps, 2,016 tokens in 0.81 s; 6% padding; 38% of the machine's limit``."""
    limit = "" if steps.limit_share is None else f"; {steps.limit_share:.0%} of the machine's limit"
    counts = (
        f"{steps.num_steps:,} step{'s' * (steps.num_steps != 1)}, {steps.num_tokens:,} tokens in {steps.seconds:.2f} s"
    )
    return f"{counts}; {steps.padding_share:.0%} padding{limit}"


def _times(summary: dict[str, float] | None) -> str:
    if summary is None:
        return "none"
    return ", ".join(f"{name} {summary[name] * 1e3:.1f} ms" for name in ("mean", "p50", "p99"))
