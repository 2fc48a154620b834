"""The kernels of a step: the table that follows from a profile, and the idle time of a device between them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_llm.bench import host, kernels

CUDA, CPU = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU


def event(name: str, start: float, end: float, device: Any = CUDA) -> Any:
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    is_range = name.startswith(("compiled_llm::", "## Call"))
    fields = {"device_type": device, "time_range": span, "cpu_children": [], "is_user_annotation": is_range}
    return SimpleNamespace(name=name, **fields)


def test_launches_in_their_order_with_the_gaps_before_them() -> None:
    events = [
        event("nvjet_gemm", 15, 40),
        event("split_kernel", 4, 12),
        event("compiled_llm::step", 0, 60),
        event("## Call CompiledFxGraph ##", 0, 60),
        event("cudaGraphLaunch", 0, 3, CPU),
        event("nvjet_gemm", 39, 50),  # begins before the other ends
    ]
    assert kernels.launches(events, on_gpu=True) == [
        ("split_kernel", 8, 0.0),
        ("nvjet_gemm", 25, 3.0),
        ("nvjet_gemm", 11, 0.0),
    ]


def test_medians_of_repeats_and_a_row_for_each_name() -> None:
    steps = [[kernels.Launch("a", us, 0.0), kernels.Launch("nvjet", 5, gap), kernels.Launch("a", 2, 1)]
             for us, gap in ((4, 1), (6, 3), (50, 2))]  # fmt: skip
    step = kernels.medians(steps)
    assert step == [("a", 6, 0.0), ("nvjet", 5, 2), ("a", 2, 1)]
    assert kernels.by_name(step) == [
        {"name": "a", "work": "everything else", "count": 2, "us": 8, "us_each": 4, "gap_us": 1},
        {"name": "nvjet", "work": "linears", "count": 1, "us": 5, "us_each": 5, "gap_us": 2},
    ]
    with pytest.raises(RuntimeError, match="have other kernels"):
        kernels.medians([*steps, step[:2]])


def test_a_profile_without_a_launch_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host's side of a replayed graph alone."""
    launches = kernels.launches
    monkeypatch.setattr(kernels, "profiled_events", lambda run, on_gpu: [event("cudaGraphLaunch", 0, 3, CPU)])
    monkeypatch.setattr(kernels, "launches", lambda events, on_gpu: launches(events, True))
    flags = ["--shape", "tiny", "--device", "cpu", "--batch-size", "1", "--context", "20", "--repeats", "1"]
    flags += ["--enforce-eager", "--json", str(tmp_path / "a.json")]
    assert kernels.main("compiled-llm bench kernels", flags) == 1
    captured = capsys.readouterr()
    assert "has no launch" in captured.err
    assert "launches," not in captured.out
    assert not (tmp_path / "a.json").exists()


def test_idle_is_the_time_that_no_event_covers() -> None:
    step = [(0.0, 10.0, "plan"), (10.5, 30.0, "product"), (20.0, 32.0, "beside"), (37.0, 39.0, "copy")]
    spans = [(start + 50 * n, end + 50 * n, name) for n in range(4) for start, end, name in step]
    found = host.idle_of(spans, 4, 60.0)
    assert found["busy"] == 10 + 21.5 + 2
    assert found["idle"] == pytest.approx(0.5 + 5 + 11 * 3 / 4)
    assert found["idle_wall"] == 60 - 33.5
    assert found["launches"] == 4
    assert found["gaps"].startswith("copy > plan 8.2; beside > copy 5.0")


def test_without_events_there_is_no_figure() -> None:
    assert host.idle_of([], 4, 60.0)["idle"] is None
