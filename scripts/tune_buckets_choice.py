"""The arithmetic of tune_buckets.py: the time of a bucket of any size, and the set of buckets with the least cost."""

from collections.abc import Callable, Sequence

import numpy as np


def bucket_of(num_tokens: int, sizes: Sequence[int]) -> int:
    """The smallest of the sorted ``sizes`` that holds a step."""
    return next(size for size in sizes if size >= num_tokens)


def never_falling(times: dict[int, float], weights: dict[int, int]) -> dict[int, float]:
    """Isotonic regression: the times nearest to ``times`` by weighted least squares that never fall with the size.

    By pooling: sizes whose times fall are taken together, with their weighted mean, until nothing falls.
    """
    pools: list[tuple[float, int, list[int]]] = []  # time, weight, sizes
    for size in sorted(times):
        time, weight, sizes = times[size], weights[size], [size]
        while pools and pools[-1][0] > time:
            before, heavy, smaller = pools.pop()
            time = (before * heavy + time * weight) / (heavy + weight)
            weight, sizes = heavy + weight, smaller + sizes
        pools.append((time, weight, sizes))
    return {size: time for time, _, sizes in pools for size in sizes}


def interpolated(times: dict[int, float]) -> Callable[[int], float]:
    """Seconds of a bucket of any size from ``times``, which never fall: straight lines in between and beyond.

    Of a smaller size than measured, a token takes no less than in the smallest.
    """
    if not times:
        return lambda size: 0.0
    sizes = np.array(sorted(times), dtype=float)
    seconds = np.array([times[size] for size in sorted(times)])
    if len(sizes) == 1:
        return lambda size: float(seconds[0])
    slopes = np.diff(seconds) / np.diff(sizes)

    def time_of(size: int) -> float:
        piece = min(max(int(np.searchsorted(sizes, size)) - 1, 0), len(slopes) - 1)
        line = float(seconds[piece] + slopes[piece] * (size - sizes[piece]))
        return max(line, float(seconds[0] * size / sizes[0])) if size < sizes[0] else line

    return time_of


def best_buckets(
    counts: dict[int, int],
    candidates: Sequence[int],
    step_time: Callable[[int], float],
    compile_seconds: float,
    max_buckets: int,
    runs_per_start: float,
) -> list[int]:
    """At most ``max_buckets`` of the sorted ``candidates``, the last one among them, with the least cost.

    Cost is ``runs_per_start`` times the sum over all steps of the time of the smallest bucket that holds them, and
    ``compile_seconds`` for each bucket. Dynamic programming: ``costs[k][j]`` is the least for all steps up to candidate
    j, which is the largest of k + 1 buckets; the buckets below the second largest, i, do not change the cost of
    the steps between i and j.
    """
    sizes = np.array(candidates)
    steps = np.zeros(len(sizes) + 1)  # steps up to each candidate, beginning with none
    for num_tokens, count in counts.items():
        steps[int(np.searchsorted(sizes, num_tokens)) + 1] += count
    steps = steps.cumsum()
    time = np.array([step_time(size) for size in candidates]) * runs_per_start
    costs = [steps[1:] * time + compile_seconds]
    second_largest: list[np.ndarray] = []
    for _ in range(1, min(max_buckets, len(sizes))):
        cost, choice = np.full(len(sizes), np.inf), np.zeros(len(sizes), dtype=int)
        for j in range(1, len(sizes)):
            below = costs[-1][:j] + (steps[j + 1] - steps[1 : j + 1]) * time[j]
            choice[j] = below.argmin()
            cost[j] = below[choice[j]] + compile_seconds
        costs.append(cost)
        second_largest.append(choice)
    number = int(np.argmin([cost[-1] for cost in costs]))
    chosen = [len(sizes) - 1]
    for choice in reversed(second_largest[:number]):
        chosen.append(int(choice[chosen[-1]]))
    return [int(sizes[j]) for j in reversed(chosen)]
