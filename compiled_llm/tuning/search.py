"""The search for what is fastest on a GPU, and the clock that it goes by."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

Config = TypeVar("Config")


class InUseError(Exception):
    """What is in use does not run, or gives a row bits that depend on how many rows there are."""


class Gpu(NamedTuple):
    """What is tuned for. The defaults are Hopper's numbers, for a machine without a GPU.

    Attributes:
        name: as torch gives it; empty without a GPU.
        shared_memory: bytes that a program may have.
        device: where the candidates run. On "cpu" that is Triton's interpreter, whose times mean nothing.
    """

    name: str = ""
    capability: tuple[int, int] = (9, 0)
    shared_memory: int = 227 * 1024
    device: str = "cpu"

    @classmethod
    def present(cls) -> "Gpu":
        """This machine's, if it has one."""
        if not torch.cuda.is_available():
            return cls()
        properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability = properties.major, properties.minor
        return cls(properties.name, capability, properties.shared_memory_per_block_optin, "cuda")


def search(
    start: Config,
    configs: Iterable[Config],
    measure: Callable[[Config], float],
    seconds: float,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[Config, float, int]:
    """The best of ``configs`` by ``measure``, its cost relative to ``start``, and how many were tried.

    ``start`` stays the best where nothing is 2% better. Ends after ``seconds``, but measures ``start`` in any case.
    ``InUseError`` if that takes for ever, as what does not run and what has other bits.
    """
    end = now() + seconds
    base = best_cost = measure(start)
    if math.isinf(base):
        raise InUseError(f"{start} in use does not run, or gives rows other bits")
    best, tried = start, 0
    for config in configs:
        if now() > end:
            break
        tried += 1
        cost = measure(config)
        if cost < 0.98 * best_cost:
            best, best_cost = config, cost
    return best, best_cost / base, tried


def tuned_ranges(
    bounds: Sequence[int],
    seconds: float,
    start_of: Callable[[int, int], Config],
    candidates_of: Callable[[int, int, Config], Sequence[Config]],
    seconds_of: Callable[[int, Config], float],
) -> tuple[Config, ...]:
    """The best choice for each range of rows, each with an even share of the time.

    Args:
        bounds: ends of the ranges, which rise.
        start_of: the choice in use for more than so many and up to so many rows.
        candidates_of: other choices for such a range, the closest to the one in use first.
        seconds_of: time of a call with so many rows. A range counts by two of its sizes.
    """
    chosen, below = [], 0
    for rows in bounds:
        steps = sorted({max(1, math.isqrt(below * rows)), rows})

        def cost(choice: Config, steps: Sequence[int] = steps) -> float:
            return math.exp(sum(math.log(seconds_of(step, choice)) for step in steps) / len(steps))

        start = start_of(below, rows)
        tried = candidates_of(below, rows, start)
        best, ratio, count = search(start, tried, cost, seconds / len(bounds))
        print(f"  {below + 1:5} to {rows:5} rows{ratio:8.1%} of the time before, {count} of {len(tried)}: {best}")
        chosen.append(best)
        below = rows
    return tuple(chosen)


def call_seconds(run: Callable[[int], object], copies: int, device: str) -> float:
    """Median time of one call, of ``copies`` that do not share their weights. ``run(0)`` has run before."""
    if device == "cuda":
        return graph_seconds(run, copies)
    start = time.perf_counter()
    run(0)
    return time.perf_counter() - start


def graph_seconds(run: Callable[[int], object], layers: int) -> float:
    """Median time of one call, of a CUDA graph of ``run(0)`` to ``run(layers - 1)``. It has run before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            run(layer)
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / layers)
    return statistics.median(times)
