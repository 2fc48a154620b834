"""What a run shows while it serves, on stderr: a table on a terminal, a line now and then elsewhere."""

import sys
import time
from collections import deque
from types import TracebackType
from typing import Any, NamedTuple, TextIO

from compiled_llm.offline.progress import RunProgress

_TABLE_SECONDS = 0.25  # between two pictures of the table
_FIRST_LINE_SECONDS, _LINE_SECONDS = 5.0, 30.0
_RATE_SECONDS = 10.0  # over which the rates of the table are taken


class _Moment(NamedTuple):
    seconds: float
    rows: int
    prompt_tokens: int
    output_tokens: int


class Display:
    """As a context manager around a run. ``update`` may be called as often as one likes.

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
        """Show it, if something is due."""
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
