"""The search for what is fastest on a GPU, and the clock that it goes by."""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch

Config = TypeVar("Config")


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
    """
    end = now() + seconds
    base = best_cost = measure(start)
    best, tried = start, 0
    for config in configs:
        if now() > end:
            break
        tried += 1
        cost = measure(config)
        if cost < 0.98 * best_cost:
            best, best_cost = config, cost
    return best, best_cost / base, tried


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
