"""bench_shared: the shares, and a run of a tiny model beside busy loops and another engine."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts" / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_shared")


def speed(*speeds: float) -> list[dict[str, float]]:
    return [{"tokens_per_second": one, "cores": one / 100} for one in speeds]


def test_shares_are_of_the_same_round_and_of_the_slower_engine(bench: ModuleType) -> None:
    rows = bench.compared(
        [
            {"alone": speed(100), "one busy loop": speed(50), "two engines": speed(60, 40)},
            {"alone": speed(200), "one busy loop": speed(140), "two engines": speed(90, 95)},
            {"alone": speed(100), "one busy loop": speed(60), "two engines": speed(50, 50)},
        ]
    )
    assert rows["alone"]["share"] == 1
    assert rows["alone"]["goal"] is None
    assert (rows["one busy loop"]["share"], rows["one busy loop"]["least_share"]) == (0.6, 0.5)
    assert rows["one busy loop"]["goal"] == bench.GOALS["one busy loop"]
    assert rows["two engines"]["share"] == 0.45
    assert rows["two engines"]["tokens_per_second"] == 50
    assert rows["two engines"]["cores"] == 0.5


def test_busy_loops_run_and_end(bench: ModuleType) -> None:
    before = set(psutil.Process().children())
    with bench.busy_loops(2):
        assert len(set(psutil.Process().children()) - before) == 2
    assert set(psutil.Process().children()) == before


@pytest.mark.battery
def test_a_run(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shared.json"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    eager = ["--shape", "tiny", "--enforce-eager", "--num-kv-blocks", "70", "--progress", "off"]
    times = ["--seconds", "0.2", "--rounds", "2", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["bench_shared.py", *eager, *times])
    assert bench.main() == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert json.loads(file.read_text()) == result
    assert result["dtype"] == "bfloat16"
    assert "tiny, bfloat16" in out
    assert list(result["rows"]) == ["alone", "one busy loop", "two busy loops", "two engines"]
    assert all(row["tokens_per_second"] > 0 and row["cores"] > 0 for row in result["rows"].values())
    assert [len(found["two engines"]) for found in result["rounds"]] == [2, 2]
    assert result["environment"]["GOMP_SPINCOUNT"] == "7"
