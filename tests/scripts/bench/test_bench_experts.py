"""bench_experts: what it measures for a small mixture, and what is refused."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCH = Path(__file__).parents[3] / "scripts" / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("bench_experts")


def run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_experts.py", *arguments])
    threads = torch.get_num_threads()
    try:
        bench.main()
    except SystemExit as bad_arguments:
        return int(bad_arguments.code or 0)
    finally:
        torch.set_num_threads(threads)
    return 0


@pytest.mark.parametrize("own_rows", [False, True])
def test_a_small_mixture(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    own_rows: bool,
) -> None:
    monkeypatch.setattr(bench, "SHAPES", [bench.Shape("small", 8, 2, 48, 64, own_rows)])
    monkeypatch.setattr(bench, "READ_BYTES", 1 << 16)
    file = tmp_path / "found.json"
    assert run(bench, monkeypatch, "--rounds", "7", "--threads", "1", "--json", str(file)) == 0
    (row,) = json.loads(file.read_text())["results"]
    assert (row["experts"], row["rounds"]) == ("2 of 8, 48 x 64", 7)
    assert row["mb"] == pytest.approx(2 * 2 * 48 * 64 / 1e6)
    assert min(row["experts_gb_per_s"], row["dense_gb_per_s"], row["read_gb_per_s"], row["ratio"]) > 0
    out = capsys.readouterr().out
    assert "small" in out
    assert "bfloat16, kernels: " in out
    assert json.loads(file.read_text())["dtype"] == "bfloat16"


def test_the_ratio_is_of_the_rates_in_one_round(bench: ModuleType) -> None:
    times = {"experts": [2.0, 4.0, 1.0], "dense": [1.0, 3.0, 2.0], "read": [1.0, 1.0, 1.0]}
    shape = bench.Shape("a", 8, 2, 50, 100, own_rows=True)
    row = bench.result_of(shape, times)
    assert row["ratio"] == 0.75, "the median of 1/2, 3/4 and 2"
    assert row["experts_gb_per_s"] == 2 * 2 * 50 * 100 / 2.0 / 1e9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "no-such"], "--shapes"),
        (["--rounds", "0"], "--rounds"),
        (["--threads", "0"], "--threads"),
        (["--json", "/no/such/directory/file"], "--json"),
    ],
)
def test_bad_arguments(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert run(bench, monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err
