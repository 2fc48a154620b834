"""bench_load reports the time of a load over that of a plain read, and the peak over the weights."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests import mxfp4
from tests.families import checkpoint

BENCH = Path(__file__).parents[3] / "scripts" / "bench"


@pytest.mark.parametrize("cold", [False, True])
def test_a_model_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, cold: bool
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("bench_load")
    model, found = checkpoint("llama"), tmp_path / "found.json"
    arguments = ["--model", str(model), "--rounds", "2", "--json", str(found), *(["--cold"] if cold else [])]
    monkeypatch.setattr(sys, "argv", ["bench_load.py", *arguments])
    dropped = []
    monkeypatch.setattr(module.os, "posix_fadvise", lambda *what: dropped.append(what))
    module.main()
    assert len(dropped) == (2 * 3 if cold else 0), "before each read and each load, the first ones included"
    result = json.loads(found.read_text())
    assert result["from"] == ("disk" if cold else "page cache")
    assert result["file_bytes"] == (model / "model.safetensors").stat().st_size
    assert result["weight_bytes"] > 0.9 * result["file_bytes"]
    for name in ("read_seconds", "load_seconds", "load_over_read"):
        assert result[name] > 0
    assert "load over plain read" in capsys.readouterr().out


def test_experts_in_mxfp4(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In memory as in the file, but for scales of two bytes, not one, and tables."""
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("bench_load")
    plain = {name: value for name, value in mxfp4.CONFIG.items() if name != "quantization_config"}
    monkeypatch.setitem(module.SHAPES, "tiny", {**plain, "hidden_size": 512, "intermediate_size": 512})
    found = tmp_path / "found.json"
    words = ["--shape", "tiny", "--mxfp4", "--rounds", "1", "--json", str(found)]
    monkeypatch.setattr(sys, "argv", ["bench_load.py", *words])
    module.main()
    result = json.loads(found.read_text())
    assert result["dtype"] == "bfloat16"
    assert 0.85 < result["file_bytes"] / result["weight_bytes"] < 0.96
    monkeypatch.setattr(sys, "argv", ["bench_load.py", "--model", str(tmp_path), *words])
    with pytest.raises(SystemExit):
        module.main()


@pytest.mark.battery
def test_the_promise_of_the_peak_at_full_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("bench_load")
    module.write_checkpoint(tmp_path, "qwen3-0.6b")
    assert module.measure(tmp_path, "auto", 1)["peak_over_weights"] < 1.2
