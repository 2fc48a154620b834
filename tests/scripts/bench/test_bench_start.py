"""bench_start: its stages, its table, and one start. What a start costs is no test's business."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compiled_llm.ops.native import cache_directory

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench" / "bench_start.py"
FAST = ["--shape", "tiny", "--enforce-eager", "--bucket-sizes", "1", "--max-model-len", "64", "--num-kv-blocks", "8"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("bench_start", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    return script.main()


def test_the_stages_of_a_start_add_up_to_it(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real start, on weights of a checkpoint that was written for it."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *FAST])
    args = script.parse_arguments()
    with script.engine_arguments(args) as arguments:
        assert arguments.keys() >= {"model", "enforce_eager", "bucket_sizes"}
        assert "load_format" not in arguments
        start = script.start(script.THIS, cache_directory(), arguments)
    assert start["dtype"] == "bfloat16"
    assert set(start["seconds"]) == set(script.STAGES)
    assert all(seconds >= 0 for seconds in start["seconds"].values())
    assert sum(start["seconds"].values()) == pytest.approx(start["total"], abs=0.01)
    assert start["graphs"].keys() >= {"step", "sample"}
    assert (start["hits"], start["misses"], start["recompiles"]) == (0, 0, 0)


def test_two_checkouts_are_measured_in_turns(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "compiled_llm").mkdir()
    (tmp_path / "compiled_llm" / "__init__.py").touch()
    seen: list[tuple[Path, Path]] = []

    def start(checkout: Path, cache: Path, arguments: dict[str, Any]) -> dict[str, Any]:
        seen.append((checkout, cache))
        total = 60.0 if len(seen) <= 2 else 10.0 + len(seen)
        seconds = dict.fromkeys(script.STAGES, total / len(script.STAGES))
        counts = {"graphs": {"a": 1.0}, "hits": 0, "misses": 1, "recompiles": 0, "dtype": "bfloat16"}
        return {"seconds": seconds, "total": total, "cpu": 1.0, "load": 0.5, **counts}

    monkeypatch.setattr(script, "start", start)
    result_path = tmp_path / "result.json"
    arguments = ["--demo", "--other", str(tmp_path), "--warm-runs", "3", "--json", str(result_path)]
    assert run(script, monkeypatch, *arguments) == 0
    lines, result = capsys.readouterr().out.splitlines(), json.loads(result_path.read_text())
    assert json.loads(lines[-1]) == result
    assert result["dtype"] == "bfloat16"
    assert lines[0] == "bfloat16"
    assert [checkout for checkout, _ in seen] == [script.THIS, tmp_path] * 4
    assert len({cache for _, cache in seen}) == 2, "a warm start uses what the cold one left"
    assert (result["this"]["cold"]["total"], [start["total"] for start in result["this"]["warm"]]) == (60, [13, 15, 17])
    assert next(line for line in lines if line.startswith("total")).split() == ["total", "60", "60", "15", "16"]
    assert result["cpu_threads"] > 0


@pytest.mark.parametrize("wrong", [["--warm-runs", "0"], ["--demo", "--model", "x"], ["--other", "nowhere"]])
def test_what_is_refused(script: ModuleType, monkeypatch: pytest.MonkeyPatch, wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        run(script, monkeypatch, *FAST, *wrong)
