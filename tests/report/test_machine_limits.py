"""The machine's limits: measured once, kept, and measured again if asked, doubted or damaged on disk."""

import errno
import itertools
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.ops import native
from compiled_llm.report import cpu_loops, machine_limits
from compiled_llm.report.machine_limits import MachineLimits, _Rate, significant
from compiled_llm.system import hardware as machine

CPU = torch.device("cpu")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small memory and short loops, in a cache directory of its own that has the kernels."""
    cpu_loops.load()  # from the cache that all tests share
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path))
    monkeypatch.setattr(machine_limits, "_READ_BYTES", 1 << 24)
    monkeypatch.setattr(machine_limits, "_last_cache_bytes", lambda: 0)
    monkeypatch.setattr(machine_limits, "_LEAST_SECONDS", 0.01)
    monkeypatch.setattr(machine_limits, "_MOST_SECONDS", 0.1)
    monkeypatch.setattr(machine_limits, "_PEAK_SECONDS", 0.001)


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Sets what measuring finds from now on. The cache directory is the test's own."""
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path))

    def finds(read: float = 3e10, flops: float = 4e11, spreads: tuple[float, float] = (0.02, 0.03), name: str = "avx2"):
        rates = _Rate(read, spreads[0]), _Rate(flops, spreads[1]), name
        monkeypatch.setattr(machine_limits, "_measure_cpu", lambda device, dtype: rates)

    finds()
    return finds


def start_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits, "_PROCESS", "another")


@pytest.mark.usefixtures("quick")
def test_measured_once_and_kept_for_this_hardware_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_limits.cached(CPU, torch.bfloat16) is None
    limits = machine_limits.measured(CPU, torch.bfloat16)
    assert limits.read_bytes_per_second > 1e6
    assert limits.flops_per_second > 1e6
    assert machine_limits.cached(CPU, torch.bfloat16) == limits
    assert machine_limits.cached(CPU, torch.float32) is None, "another dtype has another peak"
    assert str(limits.measured_at) in str(limits)


def test_kept_for_later_processes_until_it_is_to_be_measured_again(
    monkeypatch: pytest.MonkeyPatch, measure: Callable[..., None]
) -> None:
    limits = machine_limits.measured(CPU, torch.bfloat16)
    assert (limits.doubt, limits.steadiness) == ("", "steady: tries within 2% and 3%")
    start_another_process(monkeypatch)
    measure(flops=5e11)
    assert machine_limits.measured(CPU, torch.bfloat16) == limits
    again = machine_limits.measured(CPU, torch.bfloat16, remeasure=True)
    assert again.flops_per_second == 5e11
    assert machine_limits.measured(CPU, torch.bfloat16) == machine_limits.cached(CPU, torch.bfloat16) == again
    facts = machine.hardware(CPU)
    monkeypatch.setattr(machine, "hardware", lambda device: facts | {"threads": facts["threads"] + 1})
    assert machine_limits.cached(CPU, torch.bfloat16) is None, "other hardware"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"spreads": (0.3, 0.0)}, "the tries of bandwidth disagree"),
        ({"spreads": (0.0, 1.0)}, "the tries of arithmetic disagree"),
        ({"spreads": (0.5, 0.5)}, "the tries of bandwidth and arithmetic disagree"),
        ({"flops": 4e9, "name": "amx"}, "TFLOP/s is not plausible"),
        ({"read": 4e7}, "less than 1.00 GB/s is not plausible"),
    ],
)
def test_a_doubtful_value_is_used_and_marked_and_measured_again_by_the_next_process(
    monkeypatch: pytest.MonkeyPatch, measure: Callable[..., None], found: dict[str, Any], says: str
) -> None:
    measure(**found)
    limits = machine_limits.measured(CPU, torch.float32)
    assert says in limits.doubt
    assert f"NOT STEADY ({limits.doubt})" in str(limits)
    assert machine_limits.cached(CPU, torch.float32) == limits, "for this process"
    start_another_process(monkeypatch)
    assert machine_limits.cached(CPU, torch.float32) is None
    measure()
    assert machine_limits.measured(CPU, torch.float32).doubt == ""
    start_another_process(monkeypatch)
    assert machine_limits.cached(CPU, torch.float32) is not None


def broken(content: dict[str, Any], **changes: Any) -> str:
    return json.dumps(content | {"limits": content["limits"] | changes})


@pytest.mark.parametrize(
    "change",
    [
        lambda content: "",
        lambda content: "{",
        lambda content: "[]",
        lambda content: "{}",
        lambda content: "[" * 100_000,
        lambda content: json.dumps({"limits": {"device": "cpu"}}),
        lambda content: broken(content, read_bytes_per_second=0.0),
        lambda content: broken(content, read_bytes_per_second=-1.0),
        lambda content: broken(content, flops_per_second=float("nan")),
        lambda content: broken(content, flops_per_second="fast"),
        lambda content: broken(content, read_spread=None),
        lambda content: broken(content, measured_at="yesterday"),
        lambda content: broken(content, dtype="bfloat16"),
        lambda content: broken(content, instruction="amx", flops_per_second=4e9),
        lambda content: json.dumps(content | {"hardware": {"cpu": "another"}}),
        lambda content: json.dumps(content | {"format": 1}),
        lambda content: json.dumps({name: content[name] for name in ("limits", "hardware")}),  # as of format 1
    ],
)
def test_a_file_that_is_not_whole_or_not_ours_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, measure: Callable[..., None], tmp_path: Path, change: Callable[[Any], str]
) -> None:
    limits = machine_limits.measured(CPU, torch.float32)
    (path,) = (tmp_path / "limits").iterdir()
    start_another_process(monkeypatch)
    assert machine_limits.cached(CPU, torch.float32) == limits
    path.write_text(change(json.loads(path.read_text())))
    assert machine_limits.cached(CPU, torch.float32) is None
    again = machine_limits.measured(CPU, torch.float32)
    assert (again, again.device, again.dtype) == (machine_limits.cached(CPU, torch.float32), "cpu", "float32")


def test_a_disk_that_takes_nothing_is_a_warning(monkeypatch: pytest.MonkeyPatch, measure: Callable[..., None]) -> None:
    def read_only(*args) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(machine_limits, "write_whole", read_only)
    with pytest.warns(UserWarning, match="limits are not kept.*Read-only file system"):
        assert machine_limits.measured(CPU, torch.float32).instruction == "avx2"


@pytest.mark.usefixtures("quick")
def test_tries_agree_where_enough_are_near_the_fastest() -> None:
    speeds = itertools.cycle([5.0, 9.9, 9.6, 10.0, 9.7, 9.8, 1.0])
    rate = machine_limits._agreed(lambda: (next(speeds), 1.0), threads=0)
    assert (rate.value, rate.spread) == (10.0, pytest.approx(0.0, abs=0.051))
    outlier = itertools.chain([10.0], itertools.repeat(5.0))
    rate = machine_limits._agreed(lambda: (next(outlier), 1.0), threads=0)
    assert (rate.value, rate.spread) == (10.0, 0.5), "the fastest of all, and no other agrees with it"


@pytest.mark.usefixtures("quick")
def test_tries_that_agree_on_half_a_processor_do_not_count() -> None:
    rate = machine_limits._agreed(lambda: (0.5, 0.01), threads=2)  # took no processor's time for these 10 ms
    assert (rate.value, rate.spread) == (50.0, 1.0)


def test_one_slow_try_at_the_start_makes_the_others_no_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that takes a second to start, as on a busy machine, among tries that each take a millisecond to start."""
    delays = itertools.chain([1.0], itertools.repeat(0.001))

    def run_peak(name: str, rounds: int, threads: int) -> tuple[float, float]:
        return 1e5 * rounds * threads, next(delays) + rounds * 2e-8

    loops = types.SimpleNamespace(
        run_peak=run_peak, supported=lambda bfloat16: ["amx"], read_seconds=lambda array, threads: 0.01
    )
    monkeypatch.setattr(machine_limits, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine_limits, "_MOST_SECONDS", 0.01)
    monkeypatch.setattr(machine_limits.cpu_loops, "load", lambda: loops)
    _, flops, _ = machine_limits._measure_cpu(CPU, torch.bfloat16)
    assert flops.value > 0.7 * 1e5 * torch.get_num_threads() / 2e-8


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.004, "0.00400"),
        (0.0468, "0.0468"),
        (6.2546, "6.25"),
        (31.54, "31.5"),
        (6254.6, "6255"),
        (0, "0"),
        (1e-6, "0.00000100"),
    ],
)
def test_three_digits_however_small(value: float, text: str) -> None:
    assert significant(value) == text


def test_too_little_memory_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"100 MiB of memory free.*machine_limits\.measured"):
        machine_limits._buffer_bytes(1 << 30, 100 << 20)
    assert machine_limits._buffer_bytes(1 << 30, 2 << 30) == 1 << 29


@pytest.mark.usefixtures("quick")
def test_without_a_compiler_torch_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits.cpu_loops, "load", lambda: None)
    limits = machine_limits.measured(CPU, torch.float32)
    assert isinstance(limits, MachineLimits)
    assert "for lack of a C++ compiler" in limits.instruction
    assert min(limits.read_bytes_per_second, limits.flops_per_second) > 1e6


def test_every_instruction_that_this_cpu_has_runs_and_says_what_it_did() -> None:
    loops = cpu_loops.load()
    if loops is None:
        pytest.skip("no C++ compiler")
    names = loops.supported(True)
    assert names[-1] == "portable"
    assert [name for name in names if name in loops.supported(False)] == loops.supported(False)
    for name in names:
        flops, seconds = loops.run_peak(name, 1000, 2)
        assert flops >= 2 * 1000 * 12 * 2 * 4
        assert seconds > 0
    with pytest.raises(ValueError, match="which this CPU supports"):
        loops.run_peak("mmx", 1, 1)


def test_reading_refuses_what_it_cannot_stream() -> None:
    loops = cpu_loops.load()
    if loops is None:
        pytest.skip("no C++ compiler")
    array = native.huge_zeros([1 << 20], torch.float32).numpy()
    assert loops.read_seconds(array, 2) > 0
    with pytest.raises(ValueError, match="contiguous"):
        loops.read_seconds(array[::2], 1)
    with pytest.raises(ValueError, match="64 bytes"):
        loops.read_seconds(array[1:], 1)
