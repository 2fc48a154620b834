"""bench_kernels without a GPU: the table that follows from a profile, and a run on the CPU, where ops are timed."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.scripts.test_gpu_validate import ROOT, load

CUDA, CPU = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    return load(ROOT / "scripts" / "bench" / "bench_kernels.py")


def event(name: str, start: float, end: float, device: Any = CUDA) -> Any:
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    is_range = name.startswith(("compiled_llm::", "## Call"))
    fields = {"device_type": device, "time_range": span, "cpu_children": [], "is_user_annotation": is_range}
    return SimpleNamespace(name=name, **fields)


def test_launches_in_their_order_with_the_gaps_before_them(bench: Any) -> None:
    events = [
        event("nvjet_gemm", 15, 40),
        event("split_kernel", 4, 12),
        event("compiled_llm::step", 0, 60),
        event("## Call CompiledFxGraph ##", 0, 60),
        event("cudaGraphLaunch", 0, 3, CPU),
        event("nvjet_gemm", 39, 50),  # begins before the other ends
    ]
    assert bench.launches(events, on_gpu=True) == [
        ("split_kernel", 8, 0.0),
        ("nvjet_gemm", 25, 3.0),
        ("nvjet_gemm", 11, 0.0),
    ]


def test_medians_of_repeats_and_a_row_for_each_name(bench: Any) -> None:
    steps = [[bench.Launch("a", us, 0.0), bench.Launch("nvjet", 5, gap), bench.Launch("a", 2, 1)]
             for us, gap in ((4, 1), (6, 3), (50, 2))]  # fmt: skip
    step = bench.medians(steps)
    assert step == [("a", 6, 0.0), ("nvjet", 5, 2), ("a", 2, 1)]
    assert bench.by_name(step) == [
        {"name": "a", "work": "everything else", "count": 2, "us": 8, "us_each": 4, "gap_us": 1},
        {"name": "nvjet", "work": "linears", "count": 1, "us": 5, "us_each": 5, "gap_us": 2},
    ]
    with pytest.raises(RuntimeError, match="have other kernels"):
        bench.medians([*steps, step[:2]])


def test_a_run_on_a_cpu(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = ROOT / "compiled_llm" / "demo_model"
    path = tmp_path / "kernels.json"
    flags = ["--model", demo, "--device", "cpu", "--batch-size", 3, "--context", 20, "--repeats", 2, "--json", path]
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *map(str, flags), "--enforce-eager", "--prompts", "30"])
    assert bench.main() == 0
    result = json.loads(path.read_text())
    assert result["dtype"] == "bfloat16"
    assert "demo_model, bfloat16, 3 requests of 22 keys, the mean" in capsys.readouterr().out
    assert result["launches"] == len(result["in_order"]) > 20
    rows = {row["name"]: row for row in result["kernels"]}
    config = json.loads((demo / "config.json").read_text())
    assert rows["compiled_llm::paged_attention"]["count"] == config["num_hidden_layers"]
    assert sum(row["us"] for row in rows.values()) == pytest.approx(result["busy_us"])
    (prompt,) = result["prompts"]
    assert prompt["tokens"] == 30
    assert prompt["first_token_ms"] > 0
    assert result["step_us"] > 0
    assert prompt["launches"] == len(prompt["in_order"]) > 20


def test_a_profile_without_a_launch_is_an_error(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host's side of a replayed graph alone."""
    launches = bench.launches
    monkeypatch.setattr(bench, "profiled_events", lambda run, on_gpu: [event("cudaGraphLaunch", 0, 3, CPU)])
    monkeypatch.setattr(bench, "launches", lambda events, on_gpu: launches(events, True))
    flags = ["--shape", "tiny", "--device", "cpu", "--batch-size", "1", "--context", "20", "--repeats", "1"]
    flags += ["--enforce-eager", "--json", str(tmp_path / "a.json")]
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *flags])
    assert bench.main() == 1
    captured = capsys.readouterr()
    assert "has no launch" in captured.err
    assert "launches," not in captured.out
    assert not (tmp_path / "a.json").exists()


@pytest.mark.parametrize(("flags", "dtype"), [([], "bfloat16"), (["--dtype", "float32"], "float32")])
def test_a_shape_is_bfloat16_unless_another_dtype_is_asked_for(
    bench: Any, monkeypatch: pytest.MonkeyPatch, flags: list[str], dtype: str
) -> None:
    words = ["--shape", "tiny", "--device", "cpu", "--batch-size", "1", "--context", "20", "--enforce-eager", *flags]
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *words])
    with bench.engine_of(bench.parse_arguments()) as engine:
        assert str(engine.runner.dtype) == f"torch.{dtype}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py"])
    assert bench.main() == 2
