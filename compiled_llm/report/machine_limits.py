"""The limits of a machine: bytes read per second, and operations per second. Measured once and kept on disk.

A step's share of these limits shows how well it used the machine, and can be compared between machines. Each limit is
the fastest of several tries, because other programs on the machine can only slow a try down.

A measurement is kept for later starts if several tries agree, each of them had the processor to itself, and the rates
are plausible for the instruction. Otherwise ``MachineLimits.doubt`` gives the reason, and only this process uses the
limits. On a virtual machine the bandwidth changes by the minute, because others use its memory too. So the limits
carry the time of their measurement, and ``remeasure`` repeats it.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch

from compiled_llm.ops import native
from compiled_llm.ops.user_warnings import warn
from compiled_llm.report import cpu_loops
from compiled_llm.system import hardware as machine
from compiled_llm.system.resources import free_memory
from compiled_llm.system.whole_files import write_whole

_FORMAT = 2
_PROCESS = uuid.uuid4().hex  # identifies this process
_READ_BYTES = 1 << 28  # or four times the last cache, whichever is larger
_COPY_BYTES = 1 << 30  # on a GPU
_LEAST_READ_BYTES = 1 << 26
_MATRIX_SIZES = (1024, 2048, 4096, 8192)
_CALIBRATION_ROUNDS = 20_000
_PEAK_SECONDS = 0.01  # of a try: so short that some are not interrupted even if other programs run
_AGREEING_TRIES = 5
_MOST_SPREAD = 0.1
_LEAST_CPU_SHARE = 0.8  # of the time of all threads, for a try to count
_LEAST_SECONDS, _MOST_SECONDS = 0.3, 1.2  # for the tries of one limit
_FLOPS_PER_CYCLE = {"amx": 1024, "avx512_bf16": 64, "avx512": 32, "avx2": 16}  # of a thread, at least


@dataclasses.dataclass(frozen=True)
class MachineLimits:
    """The limits of one device for one dtype.

    Attributes:
        read_bytes_per_second: all threads streaming through memory much larger than the last cache; on a GPU a large
            copy, read and written bytes together, or a large sum, whichever is faster.
        flops_per_second: on a CPU a loop of its best multiply-add instruction for the dtype; on a GPU the fastest of
            some square matrix products. A multiply-add is two operations.
        instruction: which instruction, or which size of matrices, reached ``flops_per_second``.
        measured_at: UTC, ISO 8601.
        read_spread, flops_spread: 1 - slowest / fastest of the five fastest tries that had the processor to themselves;
            1 if there were fewer than five. A small spread means a steady measurement.
        doubt: why these limits may be too low, so that they are measured again at the next start; "" if they are kept.
    """

    device: str
    dtype: str
    read_bytes_per_second: float
    flops_per_second: float
    instruction: str
    measured_at: str
    read_spread: float = 0.0
    flops_spread: float = 0.0
    doubt: str = ""

    def __str__(self) -> str:
        return (
            f"{significant(self.read_bytes_per_second / 1e9)} GB/s, "
            f"{significant(self.flops_per_second / 1e12)} TFLOP/s in {self.dtype} ({self.instruction}), "
            f"measured {self.measured_at}, {self.steadiness}"
        )

    @property
    def steadiness(self) -> str:
        """How far the tries agreed, in words."""
        if self.doubt:
            return f"NOT STEADY ({self.doubt}): measured again at the next start"
        return f"steady: tries within {self.read_spread:.0%} and {self.flops_spread:.0%}"


def significant(value: float) -> str:
    """``value`` with three significant digits and no exponent, so that a small rate is not printed as 0.00."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def cached(device: torch.device, dtype: torch.dtype) -> MachineLimits | None:
    """The limits that an earlier ``measured`` wrote to disk for this hardware; None if there are none.

    Limits with a doubt are returned only to the process that measured them.
    """
    try:
        content = json.loads(_path(device, dtype).read_text())
        limits = MachineLimits(**content["limits"])
        rates = limits.read_bytes_per_second, limits.flops_per_second
        datetime.datetime.fromisoformat(limits.measured_at)
        sound = (
            content["format"] == _FORMAT
            and content["hardware"] == machine.hardware(device)
            and (limits.device, limits.dtype) == _names(device, dtype)
            and all(0 < rate < math.inf for rate in rates)
            and all(0 <= spread <= 1 for spread in (limits.read_spread, limits.flops_spread))
        )
        doubt = limits.doubt or _implausible(device, limits.instruction, *rates)
        own = content["process"] == _PROCESS
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # missing or damaged: measured again
        return None
    return limits if sound and (own or not doubt) else None


def measured(device: torch.device, dtype: torch.dtype, *, remeasure: bool = False) -> MachineLimits:
    """The limits of ``device`` for ``dtype``: from disk, or measured now (less than four seconds) and written to disk.

    Raises:
        RuntimeError: too little memory is free for the measurement.
    """
    known = None if remeasure else cached(device, dtype)
    if known is not None:
        return known
    measure = _measure_gpu if device.type == "cuda" else _measure_cpu
    read, flops, instruction = measure(device, dtype)
    limits = MachineLimits(
        *_names(device, dtype),
        read_bytes_per_second=read.value,
        flops_per_second=flops.value,
        instruction=instruction,
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        read_spread=read.spread,
        flops_spread=flops.spread,
        doubt=_implausible(device, instruction, read.value, flops.value) or _unsteady(read, flops),
    )
    content = {
        "format": _FORMAT,
        "limits": dataclasses.asdict(limits),
        "hardware": machine.hardware(device),
        "process": _PROCESS,
    }
    path = _path(device, dtype)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        warn(f"the machine's limits are not kept, so they will be measured again: {error}")
    return limits


def _names(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    return device.type, str(dtype).removeprefix("torch.")


def _path(device: torch.device, dtype: torch.dtype) -> Path:
    facts = json.dumps([machine.hardware(device), str(dtype)], sort_keys=True)
    return native.cache_directory() / "limits" / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"


def _buffer_bytes(size: int, free: int) -> int:
    """``size`` bytes, but at most a quarter of the free memory."""
    if free // 4 < _LEAST_READ_BYTES:
        raise RuntimeError(
            f"the machine's limits cannot be measured with {free >> 20} MiB of memory free: measure them before the "
            "engine takes it, with machine_limits.measured(device, dtype)"
        )
    return min(size, free // 4)


# -- Whether a measurement is plausible


@dataclasses.dataclass(frozen=True)
class _Rate:
    """The highest rate of several tries, bytes or operations per second; see ``MachineLimits`` for ``spread``."""

    value: float
    spread: float


def _agreed(run: Callable[[], tuple[float, float]], threads: int) -> _Rate:
    """Repeats ``run`` until enough tries agree, or until it takes too long.

    Two programs on one core get half of its time each, and their tries would agree on half the rate. So a try counts
    only if its threads had the processor all the time.

    Args:
        run: one try; returns (bytes or operations, seconds).
        threads: number of threads that work in ``run``; 0 if the work is not done by the processor.
    """
    best, alone, count, started = 0.0, [], 0, time.perf_counter()
    while True:
        cpu_seconds = time.process_time()
        amount, seconds = run()
        cpu_seconds = time.process_time() - cpu_seconds
        best, count = max(best, amount / seconds), count + 1
        if cpu_seconds >= _LEAST_CPU_SHARE * threads * seconds:
            alone.append(amount / seconds)
        fastest = sorted(alone, reverse=True)[:_AGREEING_TRIES]
        spread = 1 - fastest[-1] / best if len(fastest) == _AGREEING_TRIES else 1.0
        passed = time.perf_counter() - started
        is_long_enough = passed > _MOST_SECONDS or (passed > _LEAST_SECONDS and spread <= _MOST_SPREAD)
        if is_long_enough and count >= _AGREEING_TRIES:
            return _Rate(best, spread)


def _unsteady(read: _Rate, flops: _Rate) -> str:
    """Why the measurement is doubted: its tries disagree. "" if they agree."""
    names = [name for name, rate in (("bandwidth", read), ("arithmetic", flops)) if not rate.spread <= _MOST_SPREAD]
    return f"the machine is busy, the tries of {' and '.join(names)} disagree" if names else ""


def _implausible(device: torch.device, instruction: str, read: float, flops: float) -> str:
    """Why the rates are doubted: they are below a tenth of a processor's at 1 GHz. "" if they are not."""
    least_read, least_flops = 1e9, 1e8 * torch.get_num_threads() * _FLOPS_PER_CYCLE.get(instruction, 1)
    if device.type == "cuda":
        least_read, least_flops = 1e10, 1e11
    if read < least_read:
        return f"less than {significant(least_read / 1e9)} GB/s is not plausible"
    if flops < least_flops:
        return f"less than {significant(least_flops / 1e12)} TFLOP/s is not plausible"
    return ""


# -- CPU


def _measure_cpu(device: torch.device, dtype: torch.dtype) -> tuple[_Rate, _Rate, str]:
    loops, threads = cpu_loops.load(), torch.get_num_threads()
    size = _buffer_bytes(max(_READ_BYTES, 4 * _last_cache_bytes()), free_memory())
    memory = native.huge_zeros([size // 4], torch.float32).fill_(1.0)
    if loops is None:
        matrix = torch.ones(1024, 1024, dtype=dtype)
        read = _agreed(lambda: (memory.nbytes, _seconds(memory.sum)), threads)
        flops = _agreed(lambda: (2 * 1024**3, _seconds(lambda: matrix @ matrix)), threads)
        return read, flops, "a matrix product of torch, for lack of a C++ compiler"
    array, instruction = memory.numpy(), loops.supported(dtype == torch.bfloat16)[0]
    # By one thread, so that no other has to wake up. The fastest of several: one slow try would make all others short.
    seconds = min(loops.run_peak(instruction, _CALIBRATION_ROUNDS, 1)[1] for _ in range(_AGREEING_TRIES))
    rounds = max(_CALIBRATION_ROUNDS, int(_CALIBRATION_ROUNDS * _PEAK_SECONDS / seconds))
    read = _agreed(lambda: (memory.nbytes, loops.read_seconds(array, threads)), threads)
    return read, _agreed(lambda: loops.run_peak(instruction, rounds, threads), threads), instruction


def _last_cache_bytes() -> int:
    with contextlib.suppress(ValueError, OSError):  # unknown name on this system
        return max(0, os.sysconf("SC_LEVEL3_CACHE_SIZE"))
    return 0


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


# -- GPU


def _measure_gpu(device: torch.device, dtype: torch.dtype) -> tuple[_Rate, _Rate, str]:
    free, _ = torch.cuda.mem_get_info(device)
    source = torch.ones(_buffer_bytes(_COPY_BYTES, free) // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    read = max(
        (_agreed_on_gpu(2 * source.nbytes, lambda: target.copy_(source)), _agreed_on_gpu(source.nbytes, source.sum)),
        key=lambda rate: rate.value,
    )
    rates: dict[str, _Rate] = {}
    for size in _MATRIX_SIZES:
        if 3 * size * size * dtype.itemsize <= free // 4:
            a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
            rates[f"matrices of {size} x {size}"] = _agreed_on_gpu(2 * size**3, lambda a=a, b=b: a @ b)  # type: ignore[misc]
    best = max(rates, key=lambda name: rates[name].value)
    return read, rates[best], best


def _agreed_on_gpu(amount: float, run: Callable[[], object]) -> _Rate:
    def timed() -> tuple[float, float]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return amount, start.elapsed_time(end) / 1e3

    for _ in range(3):
        run()
    return _agreed(timed, threads=0)
