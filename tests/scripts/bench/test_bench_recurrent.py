"""bench_recurrent: what it measures for small layers, and what is refused."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCH = Path(__file__).parents[3] / "scripts" / "bench"
SMALL = (
    ("rule", "gated_delta_rule", (1, 2, 16, 32), 2 * 16 * 32 * 4),
    ("convolution", "short_convolution", (256, 4), 3 * 256 * 2),
    ("scan", "mamba2_scan", (2, 16, 1, 16), 2 * 16 * 16 * 4),
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("bench_recurrent")


def run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_recurrent.py", *arguments])
    threads = torch.get_num_threads()
    try:
        bench.main()
    except SystemExit as bad_arguments:
        return int(bad_arguments.code or 0)
    finally:
        torch.set_num_threads(threads)
    return 0


def test_small_layers(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "LAYERS", [bench.Layer(*layer[:3]) for layer in SMALL])
    monkeypatch.setattr(bench, "READ_BYTES", 1 << 16)
    file = tmp_path / "found.json"
    assert run(bench, monkeypatch, "--rounds", "5", "--tokens", "9", "--batch-size", "3", "--json", str(file)) == 0
    rows = json.loads(file.read_text())["results"]
    assert [row["layer"] for row in rows] == [layer[0] for layer in SMALL]
    for row, (*_, nbytes) in zip(rows, SMALL, strict=True):
        assert row["rounds"] == 5
        assert row["state_kb"] == nbytes / 1e3
        assert row["decode_gb_per_s"] == pytest.approx(2 * 3 * nbytes / row["decode_us"] / 1e3)
        assert min(row["of_read"], row["chunk_us_per_token_and_head"]) > 0
    out = capsys.readouterr().out
    assert "convolution" in out
    assert "in bfloat16" in out
    assert json.loads(file.read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "no-such"], "--layers"),
        (["--rounds", "0"], "--rounds"),
        (["--tokens", "0"], "--tokens"),
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
