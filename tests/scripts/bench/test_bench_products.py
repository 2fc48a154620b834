"""bench_products on a CPU: the layers of a shape, and a table of them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.test_gpu_validate import ROOT, load


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    return load(ROOT / "scripts" / "bench" / "bench_products.py")


def test_the_layers_of_a_shape(bench: Any) -> None:
    assert set(bench.layers_of("qwen3-0.6b")) == {
        (4096, 1024),
        (1024, 2048),
        (6144, 1024),
        (1024, 3072),
        (151936, 1024),
    }


def test_a_table_and_what_is_left_out(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(x: Any, weight: Any) -> Any:
        raise RuntimeError("not for this GPU")

    monkeypatch.setattr(bench, "layers_of", lambda shape: [(48, 32), (16, 64)])
    ways = {"cublas": bench.plain, "wrong": lambda x, weight: bench.plain(x, weight) * 2, "broken": fails}
    monkeypatch.setattr(bench, "ways", lambda device, name, rows: ways)
    flags = ["--device", "cpu", "--rows", "1", "5", "--seconds", "0.001", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["bench_products.py", *flags])
    assert bench.main() == 0
    result = json.loads((tmp_path / "out.json").read_text())
    rows = result["results"]
    assert [(row["layer"], row["rows"], row["best"]) for row in rows] == [
        ("48x32", 1, "cublas"),
        ("48x32", 5, "cublas"),
        ("16x64", 1, "cublas"),
        ("16x64", 5, "cublas"),
    ]
    assert all(row["cublas_us"] > 0 and set(row["left_out"]) == {"wrong", "broken"} for row in rows)
    out = capsys.readouterr().out
    assert "not for this GPU" in out
    assert result["dtype"] == "bfloat16"
    assert "qwen3-0.6b, bfloat16" in out
