"""bench_modes: a run of a tiny model, and arguments that do not go together."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from compiled_llm.offline.modes import MODES

SCRIPTS = Path(__file__).parents[3] / "scripts" / "bench"
TINY = ["bench_modes.py", "--shape", "tiny", "--enforce-eager", "--rows", "3", "--rounds", "1"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_modes")


def test_a_run(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "modes.json"
    monkeypatch.setattr(sys, "argv", [*TINY, "--input-len", "8", "--output-len", "4", "--json", str(file)])
    assert bench.main() == 0
    out = capsys.readouterr().out
    assert "high-throughput: --bucket-sizes" in out
    result = json.loads(out.splitlines()[-1])
    assert json.loads(file.read_text()) == result
    assert [row["mode"] for row in result["rows"]] == list(MODES)
    assert result["dtype"] == "bfloat16"
    assert "tiny, bfloat16" in out
    assert all(value > 0 for row in result["rows"] for name, value in row.items() if name != "mode")


def test_rows_must_fit_the_model(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*TINY, "--max-model-len", "64"])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert "--max-model-len must be at least 96" in capsys.readouterr().err
