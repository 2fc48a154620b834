"""The display: lines now and then where there is no terminal, a table that leaves nothing behind where there is one."""

import io
import time

import pytest

from compiled_llm.offline.display import Display, _duration
from compiled_llm.offline.progress import RowResult, RunProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def advance(progress: RunProgress, clock: list[float], seconds: float, rows: int) -> None:
    clock[0] += seconds
    progress.seconds += seconds
    for _ in range(rows):
        progress.add(RowResult(progress.rows, "", b"", None, 10, 5, 2))


def test_a_line_now_and_then(clock: list[float]) -> None:
    stream, progress = io.StringIO(), RunProgress(resumed=100, total=10_000, total_is_estimate=True, kv_share=0.5)
    with Display(stream) as display:
        display.update(progress)
        for _ in range(70):
            advance(progress, clock, 1.0, 10)
            display.update(progress)
        progress.stopping, progress.failed = True, 3
        advance(progress, clock, 30.0, 10)
        display.update(progress)
    first, *_, last = stream.getvalue().splitlines()
    assert len(stream.getvalue().splitlines()) == 4, "after 5, 35, 65 and 100 s"
    assert first == (
        "rows 150 of about 10,000 (2%), rate 10.0 rows/s, 100 tokens/s in, 20 out, running 0, waiting 0, "
        "KV use 50%, prefix hits 50%, time 5 s, 16 min 25 s left"
    )
    assert "3 failed" in last
    assert "Ctrl-C again" in last


@pytest.mark.parametrize(("total", "words"), [(None, "rows 1, "), (1, "rows 1 of 1 (100%), ")])
def test_the_end_is_unknown_where_nothing_tells(clock: list[float], total: int | None, words: str) -> None:
    progress = RunProgress(total=total, workers=3)
    advance(progress, clock, 1.0, 1)
    line = Display(io.StringIO()).line(progress)
    assert line.startswith(words)
    assert "unknown left" in line
    assert "running 0 in 3 engines" in line


def test_a_terminal_gets_a_table_four_times_a_second(clock: list[float]) -> None:
    stream, progress = Terminal(), RunProgress(total=100)
    with Display(stream) as display:
        for _ in range(40):
            advance(progress, clock, 0.1, 1)
            display.update(progress)
        assert display._live is not None
        shown = stream.getvalue()
    assert 10 <= shown.count("prefix hits") <= 16
    assert "40 of 100 (40%)" in shown
    assert "6 s left" in shown


def test_nothing_is_shown_where_that_is_asked_for(clock: list[float]) -> None:
    stream = Terminal()
    with Display(stream, shown=False) as display:
        display.update(RunProgress())
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (125, "2 min 5 s"), (3700, "1 h 1 min"), (90_000, "1 d 1 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert _duration(seconds) == text
