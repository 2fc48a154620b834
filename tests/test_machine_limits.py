"""The machine's limits: measured once, found again, measured anew when asked or when the file is broken."""

import dataclasses
import errno
import json
from pathlib import Path

import pytest
import torch

from compiled_llm import machine, machine_limits
from compiled_llm.machine_limits import MachineLimits
from compiled_llm.ops import native

CPU = torch.device("cpu")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small memory and short loops, in a cache directory of its own that has the kernels."""
    native.load("limits_cpu")  # from the cache that all tests share
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path))
    monkeypatch.setattr(machine_limits, "_READ_BYTES", 1 << 24)
    monkeypatch.setattr(machine_limits, "_last_cache_bytes", lambda: 0)
    monkeypatch.setattr(machine_limits, "_LEAST_READ_SECONDS", 0.01)
    monkeypatch.setattr(machine_limits, "_MOST_READ_SECONDS", 0.1)
    monkeypatch.setattr(machine_limits, "_PEAK_SECONDS", 0.001)


@pytest.mark.usefixtures("quick")
def test_measured_once_and_kept_for_this_hardware_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_limits.cached(CPU, torch.bfloat16) is None
    limits = machine_limits.measured(CPU, torch.bfloat16)
    assert limits.read_bytes_per_second > 1e6
    assert limits.flops_per_second > 1e6
    assert machine_limits.cached(CPU, torch.bfloat16) == limits
    assert machine_limits.cached(CPU, torch.float32) is None, "another dtype has another peak"
    assert str(limits.measured_at) in str(limits)

    def fake(device: torch.device, dtype: torch.dtype) -> tuple[float, float, str]:
        return 1.0, 2.0, "fake"

    monkeypatch.setattr(machine_limits, "_measure_cpu", fake)
    assert machine_limits.measured(CPU, torch.bfloat16) == limits
    assert machine_limits.measured(CPU, torch.bfloat16, remeasure=True).instruction == "fake"
    assert machine_limits.measured(CPU, torch.bfloat16).instruction == "fake"
    facts = machine.hardware(CPU)
    monkeypatch.setattr(machine, "hardware", lambda device: facts | {"threads": facts["threads"] + 1})
    assert machine_limits.cached(CPU, torch.bfloat16) is None, "other hardware"


def entry(rate: float) -> str:
    """A file with this rate of reading, which may be none."""
    return json.dumps({"limits": dataclasses.asdict(MachineLimits("cpu", "float32", rate, 1.0, "", ""))})


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"limits": {"device": "cpu"}}', entry(0.0), entry(-1.0), entry(float("nan"))]
)
def test_a_file_that_is_not_whole_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str
) -> None:
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path))
    monkeypatch.setattr(machine_limits, "_measure_cpu", lambda device, dtype: (1.0, 2.0, "fake"))
    machine_limits.measured(CPU, torch.float32)
    (path,) = (tmp_path / "limits").iterdir()
    path.write_text(content)
    assert machine_limits.cached(CPU, torch.float32) is None
    again = machine_limits.measured(CPU, torch.float32)
    assert (again, again.device, again.dtype) == (machine_limits.cached(CPU, torch.float32), "cpu", "float32")


def test_a_disk_that_takes_nothing_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def read_only(*args) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path))
    monkeypatch.setattr(machine_limits, "_measure_cpu", lambda device, dtype: (1.0, 2.0, "fake"))
    monkeypatch.setattr(machine_limits, "write_whole", read_only)
    with pytest.warns(UserWarning, match="limits are not kept.*Read-only file system"):
        assert machine_limits.measured(CPU, torch.float32).instruction == "fake"


def test_too_little_memory_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"100 MiB of memory free.*machine_limits\.measured"):
        machine_limits._buffer_bytes(1 << 30, 100 << 20)
    assert machine_limits._buffer_bytes(1 << 30, 2 << 30) == 1 << 29


@pytest.mark.usefixtures("quick")
def test_without_a_compiler_torch_is_the_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits.native, "load", lambda name: None)
    limits = machine_limits.measured(CPU, torch.float32)
    assert isinstance(limits, MachineLimits)
    assert "for lack of a C++ compiler" in limits.instruction
    assert min(limits.read_bytes_per_second, limits.flops_per_second) > 1e6


def test_every_instruction_that_this_cpu_has_runs_and_says_what_it_did() -> None:
    loops = native.load("limits_cpu")
    if loops is None:
        pytest.skip("no C++ compiler")
    names = loops.supported(True)
    assert names[-1] == "baseline"
    assert [name for name in names if name in loops.supported(False)] == loops.supported(False)
    for name in names:
        flops, seconds = loops.run_peak(name, 1000, 2)
        assert flops >= 2 * 1000 * 12 * 2 * 4
        assert seconds > 0
    with pytest.raises(ValueError, match="not supported"):
        loops.run_peak("mmx", 1, 1)


def test_reading_refuses_what_it_cannot_stream() -> None:
    loops = native.load("limits_cpu")
    if loops is None:
        pytest.skip("no C++ compiler")
    array = native.huge_zeros([1 << 20], torch.float32).numpy()
    assert loops.read_seconds(array, 2) > 0
    with pytest.raises(ValueError, match="contiguous"):
        loops.read_seconds(array[::2], 1)
    with pytest.raises(ValueError, match="64 bytes"):
        loops.read_seconds(array[1:], 1)
