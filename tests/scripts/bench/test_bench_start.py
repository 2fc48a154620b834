"""bench_start: its phases, its table, and a start in this process. What a start costs is no test's business."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

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


def test_the_phases_of_a_start_add_up_to_it(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(script, monkeypatch, *FAST, "--one-start") == 0
    start = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(start["seconds"]) == set(script.PHASES)
    assert all(seconds >= 0 for seconds in start["seconds"].values())
    assert sum(start["seconds"].values()) == pytest.approx(start["total"], abs=0.01)
    assert start["graphs"].keys() >= {"decode_1", "sample_1"}
    assert (start["hits"], start["misses"], start["recompiles"]) == (0, 0, 0)


def test_a_cold_start_and_the_median_of_warm_ones(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen = []

    def start(cache: Path) -> dict:
        seen.append(cache)
        total = {1: 60.0, 2: 9.0, 3: 7.0, 4: 8.0}[len(seen)]
        seconds = dict.fromkeys(script.PHASES, total / len(script.PHASES))
        return {"seconds": seconds, "total": total, "graphs": {"a": 1.0}, "hits": 0, "misses": 1, "load": 0.5}

    monkeypatch.setattr(script, "in_fresh_process", start)
    assert run(script, monkeypatch, *FAST, "--json", str(tmp_path / "result.json")) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads((tmp_path / "result.json").read_text())
    assert json.loads(lines[-1]) == result
    assert (result["cold"]["total"], result["warm"]["total"]) == (60.0, 8.0)
    assert next(line for line in lines if line.startswith("without weights")).split()[2:] == ["50", "6.667"]
    assert len(set(seen)) == 1, "a warm start uses what the cold one left"
    assert not seen[0].exists()


def test_no_warm_run_is_refused(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        run(script, monkeypatch, *FAST, "--warm-runs", "0")
