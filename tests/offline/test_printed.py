"""Results on stdout: in the order of the input, prompt and continuation told apart, nothing that a terminal obeys."""

import itertools
import json
import sys
from typing import Any

import pytest

from compiled_llm.offline.printed import PrintedResults
from tests.offline.runs import run


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
