"""What inspect_gpu_step prints and refuses; tests/gpu_step has what it finds."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.gpu_step.measured import Measured, Unmatched
from tests.gpu_step.made_up import inspection
from tests.scripts.test_gpu_validate import ROOT, load


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return load(ROOT / "scripts" / "inspect_gpu_step.py")


def test_estimates_alone(script: Any) -> None:
    text = script.printed(inspection())
    assert "a layer, from its attention to the next: 4 launches" in text
    assert "18 launches in 4 layers, estimated 0.182 ms" in text
    assert "decode_8, bfloat16, 1024 keys" in text
    assert "rotary_attention: split_kernel" in text
    assert "measured" not in text


def test_measured_times_beside_the_estimates(script: Any) -> None:
    us = (1.0, 12.5, 3.0, 4.0, 5.0, 2.0, 3.0, 4.0, None, 1.0)
    measured = Measured(us, us, (Unmatched("splitKreduce", 4, 20.0),), ("mm",), 90.0, 10.0, "NVIDIA H200")
    text = script.printed(inspection(), measured)
    line = next(line for line in text.splitlines() if line.startswith("rotary_attention: write_kernel"))
    assert "1.25" in line.split()  # of the estimated 10 us
    assert "measured us" in text
    assert "measured on NVIDIA H200: 0.090 ms in launches and 0.010 ms between them, 0.55 of the estimate" in text
    assert "were not found: mm" in text
    assert text.splitlines()[-1].split() == ["splitKreduce", "4", "20"]


def test_a_measured_step_must_have_the_dtype_of_the_inspected_one(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = tmp_path / "kernels.json"
    result = {"benchmark": "kernels", "in_order": [], "machine": {"gpu": "none"}, "shape": "qwen3-0.6b"}
    result |= {"batch_size": 8, "context": 1024, "kv_cache_dtype": "auto", "dtype": "float32"}
    path.write_text(json.dumps(result))
    monkeypatch.setattr(sys, "argv", ["inspect_gpu_step.py", "--measured", str(path)])
    with pytest.raises(SystemExit):
        script.parse_arguments()
    assert "dtype 'float32', asked 'bfloat16'" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(sys, "argv", ["inspect_gpu_step.py", "--measured", str(path), "--dtype", "float32"])
    assert script.parse_arguments().measured == result


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--picture", "step.txt"], "must end in .png, .svg or .pdf"),
        (["--picture", "nowhere/step.png"], "its directory is not there"),
        (["--measured", "nothing.json"], "No such file"),
        (["--measured", "nothing.json", "--bucket", "tokens_512"], "--bucket must be one, given tokens_512"),
    ],
)
def test_files_that_are_of_no_use_are_refused_at_once(
    script: Any, flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["inspect_gpu_step.py", *flags])
    with pytest.raises(SystemExit):
        script.parse_arguments()
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_picture_without_matplotlib_is_refused_at_once(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    monkeypatch.setattr(sys, "argv", ["inspect_gpu_step.py", "--picture", "step.png"])
    with pytest.raises(SystemExit):
        script.parse_arguments()
    assert "pip install matplotlib" in capsys.readouterr().err
