"""What a run shows: how far it is, on stderr; results without an output file, on stdout; and a summary at its end."""

import json
import resource
import sys
import time
from collections import deque
from types import TracebackType
from typing import Any, NamedTuple, TextIO

from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.offline.rows import RunProgress
from compiled_llm.report.machine_limits import significant
from compiled_llm.report.report import RunReport
from compiled_llm.step.kv_cache import describe

_TABLE_SECONDS = 0.25  # between two pictures of the table
_FIRST_LINE_SECONDS, _LINE_SECONDS = 5.0, 30.0
_RATE_SECONDS = 10.0  # over which the rates of the table are taken


class _Moment(NamedTuple):
    seconds: float
    rows: int
    prompt_tokens: int
    output_tokens: int


class Display:
    """How far a run is: a table on a terminal, a line now and then elsewhere. A context manager around the run.

    Args:
        stream: where it goes.
        shown: False: it shows nothing.
    """

    def __init__(self, stream: TextIO | Any, *, shown: bool = True) -> None:
        self._stream, self._shown = stream, shown
        self._live: Any = None
        self._moments: deque[_Moment] = deque([_Moment(0.0, 0, 0, 0)])
        self._next = 0.0

    def __enter__(self) -> "Display":
        if self._shown and self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            # stdout may be another terminal, or a file: it is not redirected through the table.
            is_same = sys.stdout.isatty()
            console = Console(file=self._stream)
            self._live = Live(
                console=console, auto_refresh=False, transient=True, redirect_stdout=is_same, redirect_stderr=True
            )
            self._live.start()
        self._next = time.monotonic() + (_FIRST_LINE_SECONDS if self._live is None else 0.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, progress: RunProgress) -> None:
        """Show it, if that is due: it may be called as often as one likes."""
        now = time.monotonic()
        if not self._shown or now < self._next:
            return
        self._next = now + (_LINE_SECONDS if self._live is None else _TABLE_SECONDS)
        self._moments.append(_Moment(progress.seconds, progress.rows, progress.prompt_tokens, progress.output_tokens))
        while len(self._moments) > 2 and self._moments[1].seconds < progress.seconds - _RATE_SECONDS:
            self._moments.popleft()
        if self._live is None:
            print(self.line(progress), file=self._stream, flush=True)
        else:
            self._live.update(self._table(progress), refresh=True)

    def line(self, progress: RunProgress) -> str:
        """All there is to show, in one line."""
        return ", ".join(f"{name} {value}" for name, value in self._values(progress).items())

    def _values(self, progress: RunProgress) -> dict[str, str]:
        first, last = self._moments[0], self._moments[-1]
        seconds = max(last.seconds - first.seconds, 1e-9)
        rates = [(new - old) / seconds for old, new in zip(first[1:], last[1:], strict=True)]
        cached = progress.cached_tokens / max(1, progress.prompt_tokens)
        engines = f" in {progress.workers} engines" if progress.workers > 1 else ""
        return {
            "rows": _rows(progress),
            "rate": f"{rates[0]:,.1f} rows/s, {rates[1]:,.0f} tokens/s in, {rates[2]:,.0f} out",
            "running": f"{progress.running}{engines}, waiting {progress.waiting}",
            "KV use": f"{progress.kv_share:.0%}, prefix hits {cached:.0%}",
            "time": f"{_duration(progress.seconds)}, {_left(progress, rates[0])}",
        }

    def _table(self, progress: RunProgress) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 1))
        table.add_column(style="bold")
        table.add_column()
        done = progress.resumed + progress.rows
        if progress.total:
            table.add_row("", ProgressBar(total=progress.total, completed=min(done, progress.total), width=40))
        for name, value in self._values(progress).items():
            table.add_row(name, value)
        return table


def _rows(progress: RunProgress) -> str:
    done = progress.resumed + progress.rows
    about = "about " if progress.total_is_estimate else ""
    of_all = "" if not progress.total else f" of {about}{progress.total:,} ({done / progress.total:.0%})"
    failed = f", {progress.failed:,} failed" if progress.failed else ""
    return f"{done:,}{of_all}{failed}"


def _left(progress: RunProgress, rate: float) -> str:
    """How long it takes still, at this number of rows a second."""
    if progress.stopping:
        return "stopping: those that run end, Ctrl-C again ends them"
    if not progress.total or rate <= 0:
        return "unknown left"
    rows = max(0, progress.total - progress.resumed - progress.rows)
    return f"{_duration(rows / rate)} left"


def _duration(seconds: float) -> str:
    """``2 h 5 min``, ``12 min 3 s``, ``8 s``."""
    whole = round(seconds)
    for size, unit, part, small in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {small}"
    return f"{whole} s"


# -- Results on stdout


_DIM, _BOLD, _PLAIN = "\033[2m", "\033[1m", "\033[0m"
# What a terminal would take for commands. A model may write anything.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class PrintedResults:
    """Results as text, in the order of the input: each is printed once all rows before it are; failed rows are not."""

    def __init__(self) -> None:
        self._waiting: dict[int, bytes | None] = {}
        self._next = 0

    def add(self, index: int, line: bytes | None) -> None:
        """Take the result of row ``index``, as its line of an output file; None: it failed."""
        self._waiting[index] = line
        while self._next in self._waiting:
            _print(self._waiting.pop(self._next))
            self._next += 1

    def end(self) -> None:
        """Print what still waits: a run that is stopped leaves rows out."""
        for index in sorted(self._waiting):
            _print(self._waiting.pop(index))


def _print(line: bytes | None) -> None:
    """As a person reads it. Answers in OpenAI's format stay as they are."""
    if line is None:
        return
    row = json.loads(line)
    if "index" not in row:
        print(line.decode(), end="", flush=True)
        return
    on_terminal = sys.stdout.isatty()
    completions = row.get("outputs", [row])
    texts = [("prompt", row["prompt"])] if row["prompt"] is not None else []
    for number, completion in enumerate(completions, 1):
        which = "" if len(completions) == 1 else f" {number} of {len(completions)}"
        text = completion["text"] or _without_text(row, completion)
        texts.append((f"continuation{which}, {_length_of(completion)}", text))
    print()
    for place, (label, text) in enumerate(texts):
        heading = f"--- row {row['index']}: {label}"
        is_continuation = place > 0 or row["prompt"] is None
        if on_terminal:
            heading, text = f"{_DIM}{heading}{_PLAIN}", text.translate(_CONTROLS)
            text = f"{_BOLD}{text}{_PLAIN}" if is_continuation else text
        print(f"{heading}\n{text}", flush=True)


def _length_of(completion: dict[str, Any]) -> str:
    count = len(completion["token_ids"])
    reason = completion["stop_reason"]
    by = "the length limit" if completion["finish_reason"] == "length" else "itself" if reason is None else repr(reason)
    return f"{count} token{'s' * (count != 1)}, ended by {by}"


def _without_text(row: dict[str, Any], completion: dict[str, Any]) -> str:
    """What stands for an empty text: the token ids, where the prompt was given as such."""
    if row["prompt"] is not None or not completion["token_ids"]:
        return "(no text)"
    return f"token ids {', '.join(map(str, completion['token_ids']))}"


# -- The summary


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
    """All there is to say of one engine: its report and its statistics, and what these leave out."""
    stats, compiled, runner = engine.stats(), engine.compile_report(), engine.runner
    rows = {**report.rows(), **stats.rows()}
    del rows["requests"], rows["tokens"]  # which ``run_rows`` counts, by rows
    hits, misses = compiled.cache_count("hit"), compiled.cache_count("miss")
    temperature = "uncompiled" if not hits + misses else "warm" if not misses else "cold" if not hits else "partly warm"
    whole = stats.host_seconds + stats.execute_seconds - stats.launch_seconds
    return {
        **rows,
        "efficiency": efficiency(report),
        "KV pool": kv_cache_of(engine),
        "host time": f"{stats.host_seconds / max(1, stats.num_steps) * 1e6:.0f} us a step, "
        f"{stats.host_seconds / max(1e-9, whole):.1%} of all time in steps",
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
    """Times to the first token of a request, and between its later tokens."""
    first, others = report.latencies["ttft"], report.latencies["tpot"]
    if first is None:
        return "no token was generated"
    texts = [f"first token after {_mean(first)}"] + [f"then one every {_mean(others)}" for others in [others] if others]
    return ", ".join(texts)


def _mean(summary: dict[str, float]) -> str:
    return f"{summary['mean'] * 1e3:.1f} ms (99% within {summary['p99'] * 1e3:.1f})"


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
