"""bench_offline_order: its rows, a run of it, and arguments that do not go together."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts" / "bench"
SMALL = ["bench_offline_order.py", "--rows", "12", "--prefixes", "2", "--max-tokens", "2", "--enforce-eager"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_offline_order")


def test_rows_have_prefixes_and_lengths(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", [*SMALL, "--longest-tokens", "9", "--prefix-tokens", "20"])
    bench.write_rows(tmp_path / "rows.jsonl", bench.parse_arguments())
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert len({tuple(row["prompt_token_ids"][:20]) for row in rows}) == 2
    assert {len(row["prompt_token_ids"]) for row in rows} == {36}
    lengths = {row["sampling_params"]["max_tokens"] for row in rows}
    assert len(lengths) > 3
    assert lengths <= set(range(2, 10))


def test_the_longest_rows_are_no_shorter_than_the_shortest(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*SMALL, "--longest-tokens", "1"])
    with pytest.raises(SystemExit, match="2"):
        bench.parse_arguments()
    assert "--longest-tokens must be at least --max-tokens, 2, given 1" in capsys.readouterr().err


@pytest.mark.battery  # two starts of the command
def test_a_run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [*SMALL, "--prefix-tokens", "200", "--longest-tokens", "4"])
    bench.main()
    out = capsys.readouterr().out
    assert out.count("prompts have") == 2
    assert out.splitlines()[-1].startswith("12 rows: ")
