"""bench_host: the parts of a step's host time, in this process and in others, and the idle time of a device."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts" / "bench"
SIZES = ["--requests", "2", "--steps", "6"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_host")


def test_a_run(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_host.py", *SIZES, "--output", str(tmp_path / "new")])
    assert bench.main() == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "new" / "host.json").read_text()) == result
    assert [row["outputs of"] for row in result["results"]] == ["cumulative", "final"]
    for row in result["results"]:
        parts = [row[part] for part in bench.PARTS]
        assert min(parts) > 0
        # Medians of parts, and the median of their sum.
        assert sum(parts) == pytest.approx(row["host"], rel=0.5)


@pytest.mark.battery
def test_an_engine_that_does_not_start_is_said_and_the_others_run(bench: ModuleType, tmp_path: Path) -> None:
    """In processes of their own, as on a GPU."""
    args = bench.argparse.Namespace(device="cpu", steps=4, kinds="final", patience=60.0, graphs="manual")
    bad, good = bench.in_processes(args, [0, 1])
    assert bad["requests"] == 0
    assert "bucket_sizes" in bad["error"]
    assert good["requests"] == 1
    assert good["host"] > 0


def test_idle_is_the_time_that_no_event_covers(bench: ModuleType) -> None:
    step = [(0.0, 10.0, "plan"), (10.5, 30.0, "product"), (20.0, 32.0, "beside"), (37.0, 39.0, "copy")]
    spans = [(start + 50 * n, end + 50 * n, name) for n in range(4) for start, end, name in step]
    found = bench.idle_of(spans, 4, 60.0)
    assert found["busy"] == 10 + 21.5 + 2
    assert found["idle"] == pytest.approx(0.5 + 5 + 11 * 3 / 4)
    assert found["idle_wall"] == 60 - 33.5
    assert found["launches"] == 4
    assert found["gaps"].startswith("copy > plan 8.2; beside > copy 5.0")


def test_without_events_there_is_no_figure(bench: ModuleType) -> None:
    assert bench.idle_of([], 4, 60.0)["idle"] is None
