"""bench_precisions: a row for each workload and precision, ratios by the rounds, and what is refused."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.report import machine_limits
from compiled_llm.report.machine_limits import MachineLimits

SCRIPTS = Path(__file__).parents[3] / "scripts" / "bench"
LIMITS = MachineLimits("cpu", "bfloat16", 1e9, 1e12, "made up", "2026-01-01T00:00:00+00:00")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(machine_limits, "measured", lambda device, dtype: LIMITS)
    return importlib.import_module("bench_precisions")


@pytest.fixture
def run(module: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def main(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["bench_precisions.py", "--shape", "tiny", "--enforce-eager", *arguments])
        try:
            return int(module.main())
        except SystemExit as bad_arguments:
            return int(bad_arguments.code or 0)

    return main


def test_a_row_for_each_workload_and_precision(run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert run("--precisions", "none", "int4/int8", "--workloads", "W1", "--repeats", "2", "--json", str(path)) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert result["dtype"] == "bfloat16"
    assert "tiny, bfloat16" in out
    assert json.loads(path.read_text()) == result
    plain, quantized = result["rows"]
    assert (plain["precision"], quantized["precision"]) == ("none", "int4/int8")
    assert plain["ratio"] == 1
    assert quantized["weights_gb"] < 0.7 * plain["weights_gb"]
    assert plain["of_limit"] == pytest.approx(plain["median"] * plain["weights_gb"])
    assert [len(values) for values in result["speeds"]["W1"].values()] == [2, 2]


def test_ratios_are_those_within_a_round(module: Any) -> None:
    speeds = {"W4": {"none": [10.0, 100.0, 50.0], "int8": [20.0, 150.0, 200.0]}}
    _, row = module.rows_of(speeds, {"none": 4, "int8": 2}, 1e9)
    assert (row["median"], row["min"], row["max"], row["ratio"]) == (150, 20, 200, 2)
    assert row["of_limit"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--precisions", "int8", "int8"], "must differ"),
        (["--precisions", "int3"], "quantization"),
        (["--repeats", "0"], "--repeats"),
        (["--json", "/no/such/directory/out.json"], "/no/such/directory"),
    ],
)
def test_bad_arguments_exit_with_2(
    run: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
