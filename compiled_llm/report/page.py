"""The page of a report: one HTML file, its pictures inside, readable without a network.

A report here is the content of ``report.json``, as ``RunReport.to_dict`` gives it.
"""

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any

from compiled_llm.report.machine_limits import MachineLimits, significant

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 0.6em 0 1.4em; }
th, td { padding: 0.2em 0.9em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
h2 { margin-top: 1.8em; } img { max-width: 100%; } .note { color: #555; font-size: 90%; }
"""
_MOST_ADAPTERS = 100  # in the table
_TIME_NAMES = {
    "device": "device, on tokens",
    "padding": "device, on padding",
    "host": "host",
    "waiting": "waiting for requests",
}
_LATENCY_NAMES = {
    "ttft": "time to the first token (TTFT)",
    "itl": "between two tokens (ITL)",
    "tpot": "per token after the first (TPOT)",
    "e2e": "whole request",
    "queue": "until first scheduled",
}


def page(report: dict[str, Any], texts: Mapping[str, str]) -> str:
    """The HTML text of ``report``. Without matplotlib it has tables only, and a note about it.

    Args:
        report: of ``RunReport.to_dict``.
        texts: further sections: title -> plain text.
    """
    try:
        from compiled_llm.report import pictures as report_pictures
    except ImportError:
        pictures: dict[str, bytes] = {}
        missing = _note("No pictures: matplotlib is not installed. <code>pip install matplotlib</code> adds them.")
    else:
        pictures, missing = report_pictures.draw(report), ""

    def picture(name: str) -> str:
        if name not in pictures:
            return ""
        return f'<p><img alt="{name}" src="data:image/png;base64,{base64.b64encode(pictures[name]).decode()}"></p>'

    parts = [
        f"<h1>{_text(report['model'])}</h1>",
        _summary(report),
        missing,
        "<h2>How the time was spent</h2>",
        picture("time"),
        _time_table(report),
        "<h2>Share of the limits</h2>",
        _limits_note(report),
        picture("limits"),
        _steps_table([*report["phases"], *report["buckets"]]),
        _device_table(report),
        "<h2>Latency</h2>",
        picture("latency"),
        _latency_table(report),
        _adapter_table(report),
        "<h2>Requests and the KV cache over time</h2>",
        picture("series"),
        _counts_table(report),
        *(f"<h2>{_text(title)}</h2>\n<pre>{_text(text)}</pre>" for title, text in texts.items()),
        "<h2>Machine</h2>",
        _table(["", ""], [[name, value] for name, value in report["machine"].items()]),
    ]
    body = "\n".join(part for part in parts if part)
    head = f"<meta charset='utf-8'><title>compiled-llm: {_text(report['model'])}</title><style>{_STYLE}</style>"
    return f"<!doctype html>\n<html lang='en'><head>{head}</head><body>\n{body}\n</body></html>\n"


def _summary(report: dict[str, Any]) -> str:
    stats = report["stats"]
    rate = stats["num_output_tokens"] / report["seconds"] if report["seconds"] else 0.0
    text = (
        f"{report['num_finished']} requests in {report['seconds']:.2f} s: {stats['num_prompt_tokens']} tokens in, "
        f"{stats['num_output_tokens']} out, {rate:.1f} output tokens/s."
    )
    phases = [phase for phase in report["phases"] if phase["limit_share"] is not None]
    shares = [f"{phase['name']} {_percent(phase['limit_share'])}" for phase in phases]
    limits = f" Of the machine's limit: {', '.join(shares)}." if shares else ""
    return f"<p>{text}{limits} Exact: {_text(report['exact'])}. Model: {_text(report['model_code'])}.</p>"


def _time_table(report: dict[str, Any]) -> str:
    whole = report["seconds"] or 1.0
    rows = [[_TIME_NAMES[name], f"{value:.3f}", _percent(value / whole)] for name, value in report["time"].items()]
    parts = [[f"host: {name}", f"{value:.3f}", _percent(value / whole)] for name, value in report["host_parts"].items()]
    note = _note(
        "Padding: each bucket's time times the share of its rows that held no token. Waiting: between steps, nothing "
        "launched. Host: the rest; its parts below are measured independently of it, and may add up to more if the "
        "host worked while the device did."
    )
    return _table(["", "seconds", "share"], rows + parts) + note


def _limits_note(report: dict[str, Any]) -> str:
    if report["limits"] is None:
        return _note("The machine's limits were not measured, so there are no shares of them.")
    note = f"<b>The limits: {_text(report['limits_note'])}.</b> " if report["limits_note"] else ""
    limits = _text(MachineLimits(**report["limits"]))
    return _note(
        f"{note}The machine: {limits}. Steady limits are kept for later runs. On a virtual machine the "
        "bandwidth changes by the minute, so a share may exceed 100%. It also may if a cache of the processor holds "
        "the model's weights. Above 110% the limits are measured again; <code>--remeasure-limits</code> always "
        "measures them. Bytes and operations are those that every implementation needs; the share of the limit is the "
        "time that they need at the limits, divided by the time taken."
    )


def _steps_table(steps: Sequence[dict[str, Any]]) -> str:
    titles = ["", "steps", "ms a step", "tokens", "padding", "GB/s", "of bandwidth", "TFLOP/s", "of peak", "of limit"]
    rows = [
        [
            step["name"],
            step["num_steps"],
            f"{step['seconds'] / step['num_steps'] * 1e3:.2f}",
            step["num_tokens"],
            _percent(step["padding_share"]),
            significant(step["bytes_per_second"] / 1e9),
            _percent(step["bandwidth_share"]),
            significant(step["flops_per_second"] / 1e12),
            _percent(step["peak_share"]),
            _percent(step["limit_share"]),
        ]
        for step in steps
    ]
    return _table(titles, rows)


def _device_table(report: dict[str, Any]) -> str:
    steps = [step for step in (*report["phases"], *report["buckets"]) if step["device_shares"]]
    if not steps:
        return _note("What the device did by kind of work was not profiled (<code>--report-profile-steps</code>).")
    rows = [[step["name"], *map(_percent, step["device_shares"].values())] for step in steps]
    count = sum(report["profiled_steps"].values())
    note = f"From {count} steps that were run a second time under torch's profiler. No time on this page includes that."
    return "<h3>What the device did</h3>" + _table(["", *steps[0]["device_shares"]], rows) + _note(note)


def _latency_table(report: dict[str, Any]) -> str:
    rows = []
    for key, name in _LATENCY_NAMES.items():
        summary = report["latencies"][key]
        if summary is not None:
            values = [f"{summary[column] * 1e3:.1f}" for column in ("mean", "p50", "p90", "p99")]
            rows.append([name, int(summary["count"]), *values])
    return _table(["milliseconds", "count", "mean", "p50", "p90", "p99"], rows)


def _adapter_table(report: dict[str, Any]) -> str:
    if not report["adapters"]:
        return ""
    titles = ["", "requests", "tokens in", "tokens out", "device s", "share", "TTFT p50", "p99", "TPOT p50", "p99"]
    rows = []
    for one in report["adapters"]:
        counts = one["num_requests"], one["num_prompt_tokens"], one["num_output_tokens"]
        summaries = one["ttft"] or {}, one["tpot"] or {}
        times = [f"{summary[name] * 1e3:.1f}" if summary else "" for summary in summaries for name in ("p50", "p99")]
        rows.append([one["name"] or "none", *counts, f"{one['seconds']:.3f}", _percent(one["share"]), *times])
    note = _note("Each step's time, shared out by the tokens that it computed. Latencies are in milliseconds.")
    return "<h2>Adapters</h2>" + _table(titles, rows[:_MOST_ADAPTERS]) + note


def _counts_table(report: dict[str, Any]) -> str:
    stats = report["stats"]
    rows = [
        ["KV blocks", f"{stats['num_kv_blocks']}, at most {stats['peak_used_blocks']} used since the start"],
        *([["state slots", f"{stats['num_state_slots']}"]] if stats["num_state_slots"] else []),
        ["prefix cache", f"{stats['prefix_hit_tokens']} of {stats['prefix_queried_tokens']} tokens found"],
        ["evictions", stats["num_evictions"]],
        *([["snapshots evicted", stats["num_snapshot_evictions"]]] if stats["num_state_slots"] else []),
        [
            "preemptions",
            f"{stats['num_recompute_preemptions']} by recompute ({stats['num_recomputed_tokens']} tokens), "
            f"{stats['num_swap_preemptions']} by swap ({stats['num_swapped_out_tokens']} tokens out)",
        ],
    ]
    return _table(["", ""], rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{_text(title)}</th>" for title in titles) if any(titles) else ""
    lines = ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in ([head] if head else []) + lines) + "</table>"


def _note(text: str) -> str:
    return f'<p class="note">{text}</p>'


def _text(value: Any) -> str:
    return html.escape(str(value))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
