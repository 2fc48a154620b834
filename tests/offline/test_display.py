"""What a run shows: a table where there is a terminal, results in the order of the input, and a short summary."""

import dataclasses
import io
import itertools
import json
import sys
import time
import types
from typing import Any

import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.offline.display import (
    Display,
    PrintedResults,
    _duration,
    detailed_rows,
    efficiency,
    engine_rows,
    one_of_many,
    print_summary,
    run_rows,
)
from compiled_llm.offline.rows import RowResult, RunProgress
from compiled_llm.report.machine_limits import MachineLimits
from tests.offline.runs import run


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


# -- Results on stdout


def line(index: int, prompt: str | None = "import os", **changes: Any) -> bytes:
    """Of an output file."""
    completion = {"text": "\nimport sys", "token_ids": [199, 652], "finish_reason": "length", "stop_reason": None}
    return json.dumps({"index": index, "prompt": prompt, **completion, **changes}).encode() + b"\n"


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_rows_come_in_the_order_of_the_input(order: tuple[int, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Row 2 has failed; what cannot be printed yet waits."""
    printed = PrintedResults()
    ended: set[int] = set()
    shown = ""
    for index in order:
        printed.add(index, None if index == 2 else line(index))
        ended.add(index)
        shown += capsys.readouterr().out
        first_missing = next(index for index in range(5) if index not in ended)
        assert [n for n in range(4) if f"row {n}: prompt" in shown] == [n for n in range(first_missing) if n != 2]
    assert shown.index("row 0: prompt") < shown.index("row 1: prompt") < shown.index("row 3: prompt")
    printed.end()
    assert capsys.readouterr().out == ""


def test_what_waits_for_rows_that_were_left_out_is_printed_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    printed = PrintedResults()
    for index in (5, 3, 4):
        printed.add(index, line(index))
    assert capsys.readouterr().out == ""
    printed.end()
    out = capsys.readouterr().out
    assert 0 < out.index("row 3: prompt") < out.index("row 4: prompt") < out.index("row 5: prompt")


CHOICES = [
    {"text": "a", "token_ids": [1], "finish_reason": "stop", "stop_reason": None},
    {"text": "b", "token_ids": [1, 2], "finish_reason": "stop", "stop_reason": "\n"},
]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            line(0),
            "\n--- row 0: prompt\nimport os\n"
            "--- row 0: continuation, 2 tokens, ended by the length limit\n\nimport sys\n",
        ),
        (
            line(7, text="x", token_ids=[3], finish_reason="stop", stop_reason=3),
            "\n--- row 7: prompt\nimport os\n--- row 7: continuation, 1 token, ended by 3\nx\n",
        ),
        (
            line(0, outputs=CHOICES),
            "\n--- row 0: prompt\nimport os\n--- row 0: continuation 1 of 2, 1 token, ended by itself\na\n"
            "--- row 0: continuation 2 of 2, 2 tokens, ended by '\\n'\nb\n",
        ),
        (
            line(0, None, text=""),
            "\n--- row 0: continuation, 2 tokens, ended by the length limit\ntoken ids 199, 652\n",
        ),
        (
            line(0, text=""),
            "\n--- row 0: prompt\nimport os\n--- row 0: continuation, 2 tokens, ended by the length limit\n(no text)\n",
        ),
        (b'{"id": "batch_req_0", "custom_id": "a"}\n', '{"id": "batch_req_0", "custom_id": "a"}\n'),
    ],
)
def test_prompt_and_continuation_are_told_apart(row: bytes, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    PrintedResults().add(0, row) if b'"index": 7' not in row else _alone(row)
    assert capsys.readouterr().out == text


def _alone(row: bytes) -> None:
    printed = PrintedResults()
    printed.add(7, row)
    printed.end()


def test_a_terminal_gets_weight_and_no_commands_of_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    PrintedResults().add(0, line(0, "a\x1b[2J", text="\tb\x1b]0;title\x07\n\x9b"))
    assert capsys.readouterr().out == (
        "\n\x1b[2m--- row 0: prompt\x1b[0m\na\\x1b[2J\n"
        "\x1b[2m--- row 0: continuation, 2 tokens, ended by the length limit\x1b[0m\n"
        "\x1b[1m\tb\\x1b]0;title\\x07\n\\x9b\x1b[0m\n"
    )


def test_the_bundled_prompts_come_in_their_order_and_end_in_a_short_summary(capsys: pytest.CaptureFixture[str]) -> None:
    """In the run itself rows end in another order: the longest prompts are served first."""
    assert run("--enforce-eager", "--bucket-sizes", "1,4", "--max-tokens", "2", "--num-kv-blocks", "300") == 0
    out = capsys.readouterr().out
    found = [int(text.split(":")[0]) for text in out.split("\n--- row ")[1:] if ": prompt" in text]
    assert found == list(range(32))
    summary = out[out.index("Summary\n") :].strip().splitlines()
    assert len(summary) <= 10
    assert "of the limit" not in out.split("Summary")[1]


# -- The summary


LIMITS = MachineLimits("cpu", "bfloat16", 3.15e10, 4e9, "amx", "2026-01-01T00:00:00+00:00", 0.02, 0.04)


@pytest.mark.parametrize("note", ["", "measured again, because prefill came to 218% of the limit"])
@pytest.mark.parametrize(
    ("doubt", "steadiness"),
    [("", "steady: tries within 2% and 4%"), ("busy", "NOT STEADY (busy): measured again at the next start")],
)
def test_it_says_how_large_the_limits_are_since_when_and_how_steady(note: str, doubt: str, steadiness: str) -> None:
    phase = types.SimpleNamespace(name="prefill", limit_share=0.5, bytes_per_second=2e6, flops_per_second=2e9)
    report = types.SimpleNamespace(limits=dataclasses.replace(LIMITS, doubt=doubt), limits_note=note, phases=(phase,))
    text = efficiency(report)
    assert text == (
        "prefill 50% (0.00200 GB/s, 0.00200 TFLOP/s) of 31.5 GB/s, 0.00400 TFLOP/s in bfloat16 (amx), "
        f"measured 2026-01-01T00:00:00+00:00, {steadiness}" + (f"; {note}" if note else "")
    )
    assert "0.00 " not in text


def test_values_stand_below_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary({"rows": "3", "prefix cache (0)": "none", "prefix cache (10)": "none"})
    assert capsys.readouterr().out == (
        "\nSummary\n  rows              3\n  prefix cache (0)  none\n  prefix cache (10) none\n"
    )
    print_summary({"rows": "3"})
    assert capsys.readouterr().out == "\nSummary\n  rows         3\n"


def test_it_has_ten_lines_at_most_and_more_where_details_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with CompiledEngine(enforce_eager=True, num_kv_blocks=40, progress="off") as engine:
        engine.generate("import os", SamplingParams(max_tokens=4), use_tqdm=False)
        report = dataclasses.replace(engine.report(measure_limits=False), limits=LIMITS)
        unknown = tuple(dataclasses.replace(phase, limit_seconds=None) for phase in report.phases)
        rows = engine_rows(engine, dataclasses.replace(report, phases=unknown), 1.5)
        phases = tuple(dataclasses.replace(phase, limit_seconds=phase.seconds / 2) for phase in report.phases)
        measured = engine_rows(engine, dataclasses.replace(report, phases=phases), 1.5)
        details = detailed_rows(engine, dataclasses.replace(report, limits=None), 1.5)
        unserved = engine_rows(engine, dataclasses.replace(report, latencies=dict.fromkeys(report.latencies)), 1.5)
    progress = RunProgress(rows=3, failed=1, resumed=2, prompt_tokens=4000, cached_tokens=1000, output_tokens=5000)
    progress.seconds = 2.0
    assert run_rows(progress, "temperature=0") == {
        "rows": "3 in 2.00 s, 1.50 a second, 1 failed; 2 were there before",
        "tokens": "4,000 of prompts, 1,000 of them found in the prefix cache; 5,000 generated, 2,500 a second",
        "sampling": "temperature=0",
    }
    assert "efficiency" not in rows, "what is not known is left out"
    assert measured["efficiency"] == "decode 50%, prefill 50% of what this machine could do at most"
    assert rows["latency"].startswith("first token after ")
    assert ", then one every " in rows["latency"]
    assert unserved["latency"] == "no token was generated"
    assert rows["KV cache"] == "bfloat16, 2048 bytes a token; a pool of 1.3 MiB, at most 2.5% of it in use"
    print_summary({**run_rows(progress, "temperature=0"), "order": "as it was", **measured})
    assert len(capsys.readouterr().out.strip().splitlines()) == 10
    assert one_of_many({"latency": "low", "memory": "little"}) == {"engine": "latency low; memory little"}
    assert len(details) > len(measured)
    assert details["efficiency"].endswith("--report DIR measures them")
