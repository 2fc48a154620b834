"""What a machine can do at most: bytes read a second, and multiply-adds a second. Measured once and kept on disk.

A share of these limits says how well a step used the machine, whatever the machine. Both are the fastest of several
tries, since everything else on the machine can only slow them down. Virtual machines share their memory with others, so
the bandwidth there changes by the minute: a limit says when it was measured, and ``remeasure`` measures it anew.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from compiled_llm import machine
from compiled_llm.compile_cache import write_whole
from compiled_llm.ops import native

_READ_BYTES = 1 << 28  # and four times the last cache where that is more
_COPY_BYTES = 1 << 30  # on a GPU
_LEAST_READ_BYTES = 1 << 26
_READS, _LEAST_READ_SECONDS, _MOST_READ_SECONDS = 8, 0.3, 1.0
_PEAK_SECONDS, _PEAK_TRIES = 0.02, 15
_MATRIX_SIZES = (1024, 2048, 4096, 8192)
_CALIBRATION_ROUNDS = 20_000


@dataclasses.dataclass(frozen=True)
class MachineLimits:
    """The limits of one device for one dtype.

    Attributes:
        read_bytes_per_second: all threads streaming through memory much larger than the last cache; on a GPU a large
            copy, read and written bytes together, or a large sum, whichever is faster.
        flops_per_second: on a CPU a loop of its best multiply-add instruction for the dtype; on a GPU the fastest of
            some square matrix products. A multiply-add is two operations.
        instruction: which instruction, or which size of matrices, that was.
        measured_at: UTC, ISO 8601.
    """

    device: str
    dtype: str
    read_bytes_per_second: float
    flops_per_second: float
    instruction: str
    measured_at: str

    def __str__(self) -> str:
        return (
            f"{self.read_bytes_per_second / 1e9:.1f} GB/s, {self.flops_per_second / 1e12:.2f} TFLOP/s in {self.dtype} "
            f"({self.instruction}), measured {self.measured_at}"
        )


def cached(device: torch.device, dtype: torch.dtype) -> MachineLimits | None:
    """The limits that an earlier ``measured`` left on disk for this hardware; None when there are none."""
    try:
        content = json.loads(_path(device, dtype).read_text())
        limits = MachineLimits(**content["limits"])
        sound = all(0 < rate < math.inf for rate in (limits.read_bytes_per_second, limits.flops_per_second))
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not whole: measured anew
        return None
    return limits if sound else None


def measured(device: torch.device, dtype: torch.dtype, *, remeasure: bool = False) -> MachineLimits:
    """The limits of ``device`` for ``dtype``: from disk, or measured now (below three seconds) and kept there.

    Raises:
        RuntimeError: too little memory is free to measure in.
    """
    known = None if remeasure else cached(device, dtype)
    if known is not None:
        return known
    measure = _measure_gpu if device.type == "cuda" else _measure_cpu
    read, flops, instruction = measure(device, dtype)
    moment = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    limits = MachineLimits(device.type, str(dtype).removeprefix("torch."), read, flops, instruction, moment)
    path, content = _path(device, dtype), {"limits": dataclasses.asdict(limits), "hardware": machine.hardware(device)}
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        warnings.warn(f"the machine's limits are not kept, so they will be measured again: {error}", stacklevel=2)
    return limits


def _path(device: torch.device, dtype: torch.dtype) -> Path:
    facts = json.dumps([machine.hardware(device), str(dtype)], sort_keys=True)
    return native.cache_directory() / "limits" / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"


def _buffer_bytes(wanted: int, free: int) -> int:
    """At most a quarter of what is free."""
    if free // 4 < _LEAST_READ_BYTES:
        raise RuntimeError(
            f"the machine's limits cannot be measured with {free >> 20} MiB of memory free: measure them before the "
            "engine takes it, with machine_limits.measured(device, dtype)"
        )
    return min(wanted, free // 4)


# -- CPU


def _measure_cpu(device: torch.device, dtype: torch.dtype) -> tuple[float, float, str]:
    loops = native.load("limits_cpu")
    size = _buffer_bytes(max(_READ_BYTES, 4 * _last_cache_bytes()), psutil.virtual_memory().available)
    memory = native.huge_zeros([size // 4], torch.float32).fill_(1.0)
    if loops is None:
        read = _fastest(lambda: _seconds(memory.sum))
        matrix = torch.ones(1024, 1024, dtype=dtype)
        product = min(_seconds(lambda: matrix @ matrix) for _ in range(_PEAK_TRIES))
        return memory.nbytes / read, 2 * 1024**3 / product, "a matrix product of torch, for lack of a C++ compiler"
    array, threads = memory.numpy(), torch.get_num_threads()
    read = _fastest(lambda: loops.read_seconds(array, threads))
    instruction = loops.supported(dtype == torch.bfloat16)[0]
    loops.run_peak(instruction, _CALIBRATION_ROUNDS, threads)  # wakes the threads
    _, seconds = loops.run_peak(instruction, _CALIBRATION_ROUNDS, threads)
    rounds = max(1, int(_CALIBRATION_ROUNDS * _PEAK_SECONDS / seconds))
    tries = [loops.run_peak(instruction, rounds, threads) for _ in range(_PEAK_TRIES)]
    return memory.nbytes / read, max(flops / seconds for flops, seconds in tries), instruction


def _last_cache_bytes() -> int:
    with contextlib.suppress(ValueError, OSError):  # a system that does not know the name
        return max(0, os.sysconf("SC_LEVEL3_CACHE_SIZE"))
    return 0


def _fastest(read: Callable[[], float]) -> float:
    """The fewest seconds of several reads: as many as fit, and not fewer than make a measurement."""
    tries, end = [read()], time.perf_counter() + _LEAST_READ_SECONDS
    last = end + _MOST_READ_SECONDS - _LEAST_READ_SECONDS
    while time.perf_counter() < end or (len(tries) < _READS and time.perf_counter() < last):
        tries.append(read())
    return min(tries)


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


# -- GPU


def _measure_gpu(device: torch.device, dtype: torch.dtype) -> tuple[float, float, str]:
    free, _ = torch.cuda.mem_get_info(device)
    source = torch.ones(_buffer_bytes(_COPY_BYTES, free) // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _gpu_seconds(lambda: target.copy_(source))
    read = source.nbytes / _gpu_seconds(source.sum)
    rates: dict[str, float] = {}
    for size in _MATRIX_SIZES:
        if 3 * size * size * dtype.itemsize <= free // 4:
            a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
            taken = _gpu_seconds(lambda a=a, b=b: a @ b)  # type: ignore[misc]
            rates[f"matrices of {size} x {size}"] = 2 * size**3 / taken
    best = max(rates, key=lambda name: rates[name])
    return max(copied, read), rates[best], best


def _gpu_seconds(run: Callable[[], object], tries: int = 10) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(tries):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)
