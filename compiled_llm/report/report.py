"""RunReport: what an engine served, what share of the machine's limits it reached, and how the time was spent.

Definitions, all for the time from the first arrival to the end of the last step:

- A bucket's **padding** is the time of its steps times the share of its rows that held no token. Where memory limits a
  decode step, removing these rows would save less time than that.
- **share of the limit** is the time that the bytes or the operations of the steps need at the machine's limits
  (whichever takes longer, computed for each shape of step), divided by the time that the device took.
- **waiting** is the time between steps in which nothing was launched: there was no request, or the caller was busy.
- **host** is the rest of the time. Its parts are measured independently of it. If the host prepares a step while the
  device runs another one, the parts may add up to more than the rest.
"""

import dataclasses
import datetime
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from compiled_llm.api.config import EngineLimits
from compiled_llm.api.outputs import EngineStats
from compiled_llm.api.readable import table
from compiled_llm.compiling.report import CompileReport
from compiled_llm.ops.linear import product_choices
from compiled_llm.report import machine_limits
from compiled_llm.report.adapter_use import AdapterReport
from compiled_llm.report.machine_limits import MachineLimits
from compiled_llm.report.page import page
from compiled_llm.report.roofline import ModelWork
from compiled_llm.report.step_log import Point, StepLog, StepRow
from compiled_llm.scheduling.bucket import buckets_of
from compiled_llm.system import hardware as machine
from compiled_llm.worker.memory import MemoryLedger
from compiled_llm.worker.profiler import KINDS, StepProfiler

Shares = dict[str, float]
_SHOWN_ADAPTERS = 4
_MOST_LIMIT_SHARE = 1.1  # above it, a limit was measured too low


@dataclasses.dataclass(frozen=True)
class StepsReport:
    """Steps of one bucket or of one phase ("decode", or "prefill": steps in which some request runs several tokens).

    Attributes:
        seconds: time of the device.
        num_requests, num_tokens: sums over the steps, without padding.
        padding_share: share of the buckets' rows that held no token.
        padding_seconds: sum over the buckets of their time times their padding share.
        bytes, flops: minimum of bytes to read and write, and of operations; see ``roofline``.
        limit_seconds: time for these at the machine's limits; None if the limits are unknown.
        bandwidth_share, peak_share: bytes and operations per second, as shares of the machine's limits.
        device_shares: share of the time for each kind of work; None if no step was profiled.
    """

    name: str
    num_steps: int
    seconds: float
    num_requests: int
    num_tokens: int
    padding_share: float
    padding_seconds: float
    bytes: float
    flops: float
    limit_seconds: float | None
    bandwidth_share: float | None
    peak_share: float | None
    device_shares: Shares | None

    def __repr__(self) -> str:
        return f"StepsReport of {self.name}: {self.line()}"

    def line(self) -> str:
        """``64 steps, 2,016 tokens in 0.81 s; 6% padding; 38% of the machine's limit``."""
        limit = "" if self.limit_share is None else f"; {self.limit_share:.0%} of the machine's limit"
        counts = f"{self.num_steps:,} step{'s' * (self.num_steps != 1)}, {self.num_tokens:,} tokens"
        return f"{counts} in {self.seconds:.2f} s; {self.padding_share:.0%} padding{limit}"

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def limit_share(self) -> float | None:
        """``limit_seconds / seconds``; None if the limits are unknown or no time passed."""
        return None if self.limit_seconds is None or not self.seconds else self.limit_seconds / self.seconds


@dataclasses.dataclass(frozen=True)
class RunReport:
    """What was served since the engine was created, or since ``engine.reset_report()``. Times in seconds.

    ``str()`` of it is a dozen lines, ``to_dict()`` and ``write()`` give all.

    Attributes:
        seconds: from the first arrival to the end of the last step.
        num_finished: requests that ended, failed and aborted ones included.
        exact: whether a request's numbers are the same to the bit in any company: "yes", or "no (REASON)".
        model_code: whose code computes the model: a file of this engine, or transformers'.
        limits_note: a remark on ``limits``: this run was faster than the earlier limits allow, so they were measured
            again, or could not be. Usually "".
        phases: "decode" and "prefill", if such steps ran; ``buckets``: the same for each bucket.
        time: seconds that sum up to ``seconds``: "device" (without padding), "padding", "host", "waiting".
        host_parts: host seconds by part; if the device worked at the same time they may exceed ``time["host"]``.
        device_shares: share of the device's time for each kind of work; None if no step was profiled.
        latencies: for "ttft", "tpot", "itl", "e2e", "queue": count, mean, p50, p90, p99; None if there is no value.
            ``itl`` has all gaps between two tokens of a request, ``tpot`` each request's mean gap.
        series: the engine's state over time; for a long run every second, fourth, ... step.
        adapters: what each was used for, the most used first; empty where none are served.
        stats: counts since the reset; for a state, its present value; the peak is since the engine was created.
        profiled_steps: number of profiled steps by bucket. They were run a second time, in ``profile_seconds``, which
            are in no other time of the report.
        trace: of ``make_trace``. machine: of ``hardware.describe``.
    """

    model: str
    seconds: float
    num_finished: int
    exact: str
    model_code: str
    limits: MachineLimits | None
    limits_note: str
    phases: tuple[StepsReport, ...]
    buckets: tuple[StepsReport, ...]
    time: dict[str, float]
    host_parts: dict[str, float]
    device_shares: Shares | None
    latencies: dict[str, dict[str, float] | None]
    series: tuple[Point, ...]
    adapters: tuple[AdapterReport, ...]
    stats: EngineStats
    profiled_steps: dict[str, int]
    profile_seconds: float
    compile_report: CompileReport
    memory: MemoryLedger
    trace: dict[str, Any]
    machine: dict[str, Any]

    def __repr__(self) -> str:
        """A dozen lines, the last of which says where the rest is."""
        lines = table(f"RunReport of {self.model}", self.rows())
        return f'{lines}\n  write("DIR") writes all of it: HTML, JSON, a trace'

    def rows(self) -> dict[str, str]:
        """The lines of its ``repr``, by name."""
        stats, compiled = self.stats, self.compile_report
        seconds = max(self.seconds, 1e-9)
        return {
            "requests": f"{self.num_finished:,} ended in {self.seconds:.2f} s",
            "tokens": f"{stats.num_prompt_tokens:,} of prompts, {stats.num_output_tokens:,} generated: "
            f"{stats.num_output_tokens / seconds:,.0f} a second",
            "first token": _times(self.latencies["ttft"]),
            "next tokens": _times(self.latencies["tpot"]),
            **{phase.name: phase.line() for phase in self.phases},
            "time": ", ".join(f"{name} {part / seconds:.0%}" for name, part in self.time.items()),
            "KV cache": f"at most {stats.peak_used_blocks:,} of {stats.num_kv_blocks:,} blocks in use, "
            f"{stats.num_preemptions:,} preemptions",
            **self._adapter_rows(),
            **({"from disk": stats.from_disk} if stats.disk_bytes else {}),
            "prefix cache": f"{stats.prefix_hit_tokens:,} of {stats.prefix_queried_tokens:,} prompt tokens found",
            **({"KV tiers": stats.rows()["KV tiers"]} if stats.num_tier_blocks else {}),
            "compiled": f"{compiled.graphs} graphs, {compiled.graph_breaks} breaks, {compiled.recompiles} recompiles",
            "exact": f"a request's results are the same to the bit in any batch: {self.exact}",
        }

    def _adapter_rows(self) -> dict[str, str]:
        used = [f"{one.name or 'none'} {one.share:.0%}" for one in self.adapters[:_SHOWN_ADAPTERS]]
        more = f", and {len(self.adapters) - len(used)} more" if len(self.adapters) > len(used) else ""
        return {"adapters": f"{', '.join(used)} of the device's time{more}"} if used else {}

    def phase(self, name: str) -> StepsReport | None:
        """The phase of that name, "decode" or "prefill"; None if no such step ran."""
        return next((phase for phase in self.phases if phase.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """The content of ``report.json``: plain JSON values. ``series`` is a list for each field of ``Point``."""
        content = dataclasses.asdict(self)
        for key in ("phases", "buckets"):
            for entry, report in zip(content[key], getattr(self, key), strict=True):
                entry |= {
                    name: getattr(report, name) for name in ("bytes_per_second", "flops_per_second", "limit_share")
                }
        content["series"] = {name: [point[place] for point in self.series] for place, name in enumerate(Point._fields)}
        return content

    def page(self) -> str:
        """The report as one HTML file, its pictures inside."""
        return page(self.to_dict(), {"Compiled": str(self.compile_report), "Memory": str(self.memory)})

    def write(self, directory: str | Path) -> None:
        """Write ``report.json``, ``report.html`` (one file, pictures inline) and ``trace.json`` into ``directory``.

        Without matplotlib (``pip install compiled-llm[plot]``) the page has tables only, and a note about it.
        """
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / "report.json").write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        (path / "trace.json").write_text(json.dumps(self.trace, indent=1) + "\n")
        (path / "report.html").write_text(self.page(), encoding="utf-8")


def _times(summary: dict[str, float] | None) -> str:
    if summary is None:
        return "none"
    return ", ".join(f"{name} {summary[name] * 1e3:.1f} ms" for name in ("mean", "p50", "p99"))


def make_report(
    log: StepLog,
    stats: EngineStats,
    *,
    trace: dict[str, Any],
    work: ModelWork,
    compile_report: CompileReport,
    memory: MemoryLedger,
    profiler: StepProfiler | None,
    device: torch.device,
    dtype: torch.dtype,
    exact: str,
    model_code: str,
    measure_limits: bool,
) -> RunReport:
    """The report of what ``log`` recorded.

    Args:
        stats: counts since ``log`` was created; trace: of ``make_trace``, for the same log.
        work: of the model, for its dtype and the cache's.
        device, dtype: of the model; exact, model_code: of the engine, for the fields of these names.
        measure_limits: whether limits may be measured now, if they are unknown or were measured too low.

    Raises:
        RuntimeError: limits are to be measured and too little memory is free for that.
    """
    rows = sorted(log.rows(), key=lambda row: (row.bucket.kind, row.bucket.num_tokens))
    in_bucket: dict[str, list[StepRow]] = {}
    for row in rows:
        in_bucket.setdefault(row.bucket.name, []).append(row)
    in_phase = {name: found for name, kind in _PHASES if (found := [row for row in rows if row.bucket.kind == kind])}
    limits, limits_note = _limits(device, dtype, log, measure_limits, work, in_phase | in_bucket)

    def steps(groups: dict[str, list[StepRow]]) -> tuple[StepsReport, ...]:
        shares = {name: _device_shares(found, profiler) for name, found in groups.items()}
        return tuple(_steps_report(name, found, work, limits, shares[name]) for name, found in groups.items())

    return RunReport(
        model=trace["model"],
        seconds=log.wall_seconds,
        num_finished=log.num_finished,
        exact=exact,
        model_code=model_code,
        limits=limits,
        limits_note=limits_note,
        phases=steps(in_phase),
        buckets=steps(in_bucket),
        time=_time(log, rows),
        host_parts={part: getattr(stats, f"{part}_seconds") for part in ("schedule", "prepare", "launch", "output")},
        device_shares=_device_shares(rows, profiler),
        latencies=log.latencies(),
        series=tuple(log.series.points),
        adapters=() if log.by_adapter is None else log.by_adapter.reports(),
        stats=stats,
        profiled_steps=dict(profiler.num_steps) if profiler else {},
        profile_seconds=log.paused_seconds,
        compile_report=compile_report,
        memory=memory,
        trace=trace,
        machine=trace["machine"],
    )


def make_trace(
    log: StepLog, limits: EngineLimits, compile_report: CompileReport, model: str, device: torch.device
) -> dict[str, Any]:
    """The input of ``compiled-llm tune buckets``: shapes of all steps, and seconds of buckets and of compiling."""
    names = {bucket.name for bucket in buckets_of(limits)}
    return {
        "format": 1,
        "buckets": {"decode": list(limits.decode_bucket_sizes), "tokens": list(limits.token_bucket_sizes)},
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "compile_seconds": {
            report.name: report.compile_seconds for report in compile_report.reports if report.name in names
        },
        "step_seconds": log.step_seconds(),
        "steps": log.trace_rows(),
        "rounded_steps": log.rounded_steps,
        "model": model,
        "machine": machine.describe(device) | _products(device),
    }


def _products(device: torch.device) -> dict[str, str]:
    """What the products of a GPU's steps were chosen by; empty for a CPU."""
    if device.type != "cuda":
        return {}
    return {"products": product_choices.said_of(product_choices.gpu_name(device.index or 0))}


_PHASES = (("decode", "decode"), ("prefill", "tokens"))


def _limits(
    device: torch.device,
    dtype: torch.dtype,
    log: StepLog,
    measure: bool,
    work: ModelWork,
    groups: dict[str, list[StepRow]],
) -> tuple[MachineLimits | None, str]:
    """The machine's limits and a remark on them. ``groups``: steps by name of their phase or bucket.

    If a group exceeds the limits, they were measured too low. They are measured again, once for each log.
    """
    limits = machine_limits.cached(device, dtype)
    if limits is None and measure:
        limits = machine_limits.measured(device, dtype)
    if limits is None or log.is_cut or not (surpassed := _surpassed(groups, work, limits)):
        return limits, ""
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(limits.measured_at).astimezone()
    if not measure or age.total_seconds() < time.perf_counter() - log.created:
        return limits, f"{surpassed}: these limits are too low, or a cache of the processor holds the model's weights"
    try:
        again = machine_limits.measured(device, dtype, remeasure=True)
    except RuntimeError as error:
        return limits, f"{surpassed}: these limits are too low, and {error}"
    note = f"measured again, because with those of {limits.measured_at} {surpassed}"
    if still := _surpassed(groups, work, again):
        note += f". With these, {still}: a cache of the processor may hold the model's weights"
    return again, note


def _surpassed(groups: dict[str, list[StepRow]], work: ModelWork, limits: MachineLimits) -> str:
    """Which group exceeds the limits most, and its share of them; "" if none does by more than 10%."""
    reports = [_steps_report(name, rows, work, limits, None) for name, rows in groups.items()]
    share, name = max(((report.limit_share or 0.0, report.name) for report in reports), default=(0.0, ""))
    return f"{name} came to {share:.0%} of the limit" if share > _MOST_LIMIT_SHARE else ""


def _padding_seconds(row: StepRow) -> float:
    return row.seconds * row.total_padding / (row.total_padding + row.total_tokens)


def _steps_report(
    name: str, rows: Sequence[StepRow], model: ModelWork, limits: MachineLimits | None, shares: Shares | None
) -> StepsReport:
    seconds = sum(row.seconds for row in rows)
    num_bytes = sum(model.bytes(row.work()) for row in rows)
    flops = sum(model.flops(row.work()) for row in rows)
    num_tokens, padding = sum(row.total_tokens for row in rows), sum(row.total_padding for row in rows)
    read, peak = (limits.read_bytes_per_second, limits.flops_per_second) if limits else (None, None)
    return StepsReport(
        name=name,
        num_steps=sum(row.count for row in rows),
        seconds=seconds,
        num_requests=sum(row.total_requests for row in rows),
        num_tokens=num_tokens,
        padding_share=padding / (num_tokens + padding),
        padding_seconds=sum(_padding_seconds(row) for row in rows),
        bytes=num_bytes,
        flops=flops,
        limit_seconds=sum(model.seconds(row.work(), read, peak) for row in rows) if read and peak else None,
        bandwidth_share=num_bytes / seconds / read if read and seconds else None,
        peak_share=flops / seconds / peak if peak and seconds else None,
        device_shares=shares,
    )


def _time(log: StepLog, rows: Sequence[StepRow]) -> dict[str, float]:
    device, padding = sum(row.seconds for row in rows), sum(map(_padding_seconds, rows))
    host = max(0.0, log.wall_seconds - device - log.waiting_seconds)
    return {"device": device - padding, "padding": padding, "host": host, "waiting": log.waiting_seconds}


def _device_shares(rows: Sequence[StepRow], profiler: StepProfiler | None) -> Shares | None:
    """Share of the time of ``rows`` for each kind of work, over the buckets that were profiled; None if none was."""
    if profiler is None:
        return None
    shares = {name: profiler.shares(name) or {} for name in {row.bucket.name for row in rows}}
    seconds = dict.fromkeys(KINDS, 0.0)
    for row in rows:
        for kind, share in shares[row.bucket.name].items():
            seconds[kind] += row.seconds * share
    whole = sum(seconds.values())
    return {kind: value / whole for kind, value in seconds.items()} if whole else None
