"""bench_quantized: what it measures and checks (in Triton's interpreter), and what it refuses."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "scripts" / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("bench_quantized")


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("int8_w8a8", ["24x64"]),
        *(
            pytest.param(kind, ["24x64", "16x64x4x2"], marks=pytest.mark.battery)
            for kind in ("int8_w8a8", "int8", "int4", "int4_w4a8", "fp8", "mxfp4")
        ),
    ],
)
def test_layers_and_experts_are_checked_and_timed(kind: str, layers: list[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, str(BENCH / "bench_quantized.py"), "--kind", kind, "--layer", *layers]
    done = subprocess.run(
        [*command, "--rows", "1", "17", "--seconds", "0", "--json", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())["results"]
    assert json.loads(file.read_text())["dtype"] == "bfloat16"
    assert "in bfloat16" in done.stdout
    assert [(row["layer"], row["rows"]) for row in results] == [(layer, rows) for layer in layers for rows in (1, 17)]
    for row in results:
        assert 0 < row["error"] < 2**-6
        assert row["left_out"] == {}
        assert min(row["op_gb_per_s"], row["bf16_tflop_per_s"], row["faster"]) > 0
        has_int_mm = kind == "int8_w8a8" and row["layer"] == "24x64" and row["rows"] == 17
        assert (row["int_mm_us"] is not None) == has_int_mm


@pytest.mark.parametrize("sizes", [(24, 64), (16, 64, 4, 2)])
def test_a_wrong_result_ends_the_run(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sizes: tuple[int, ...],
) -> None:
    def wrong(of, x, route, choice):
        def launch(packed):
            out = torch.zeros(len(x) if route is None else len(route[0]), sizes[0]).bfloat16()
            right = bench.expected(of, x, route)
            out[: len(right)] = right
            out[0, 3] += right.abs().max() / 40
            return out

        return launch

    monkeypatch.setattr(bench, "op_of", wrong)
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    layer = "x".join(map(str, sizes))
    monkeypatch.setattr(sys, "argv", ["bench_quantized.py", "--kind", "int8", "--layer", layer, "--rows", "3"])
    assert bench.main() == 1
    assert "int8" in (message := capsys.readouterr().err)
    assert "off by 0.0" in message


def test_rows_are_routed_to_their_experts(bench: ModuleType) -> None:
    rows, starts = bench.routed(50, 8, 3, "cpu")
    assert (len(rows), starts[0], starts[-1]) == (150, 0, 150)
    assert rows.bincount().tolist() == [3] * 50
    assert (starts.diff() >= 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no CUDA GPU"),
        (["--layer", "6144"], "neither OUTPUTSxINPUTS nor"),
        (["--layer", "16x64x4x5"], "neither OUTPUTSxINPUTS nor"),
        (["--rows", "0"], "--rows"),
    ],
)
def test_what_is_refused(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_quantized.py", *arguments])
    try:
        status = bench.main()
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err
