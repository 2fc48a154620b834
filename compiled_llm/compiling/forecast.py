"""How long compiling will take: from what it took on such a machine before, which the entries of the cache say."""

import dataclasses
from collections.abc import Mapping, Sequence

from compiled_llm.compiling.cache import CompileCache
from compiled_llm.compiling.costs import Cost
from compiled_llm.compiling.keys import Fields

# What every function takes, as much as for so many arguments: of steps of 4 and 28 layers, with 37 arguments each.
_FIXED = 170


def expected_cost(cache: CompileCache, key: Fields) -> Cost | None:
    """Of a function that is not in the cache, by those of its name that were compiled on such a machine.

    Tracing takes longer for more arguments, of which a step has some for each layer. None if no such function was
    compiled here.
    """
    machine = ("cpu", "gpu", "torch")
    known = [
        (Cost(*facts["cost"]), _size(fields))
        for _, fields, facts in cache.stored(key["function"])
        if "cost" in facts and all(fields.get(name) == key.get(name) for name in machine)
    ]
    if not known:
        return None
    size = _size(key)
    nearest, its_size = min(known, key=lambda one: abs(one[1] - size))
    # Where another function had built the same libraries, none was built again.
    cpp, libraries = max((cost.cpp, cost.libraries) for cost, _ in known)
    return Cost(nearest.own * size / its_size, cpp, libraries)


def _size(key: Fields) -> int:
    return _FIXED + len(key["arguments"])


@dataclasses.dataclass
class _Job:
    """A function that a process works on. ``own``, ``cpp``: CPU seconds that are left."""

    name: str
    own: float
    cpp: float
    libraries: int

    def rate(self, cores: float) -> float:
        """CPU seconds a second, if it may use so many cores."""
        return min(cores, 1.0 if self.own else max(1, self.libraries))

    def until_change(self, cores: float) -> float:
        """Seconds until its next part begins or it is done."""
        return (self.own or self.cpp) / self.rate(cores)

    def work(self, seconds: float, cores: float) -> None:
        done = seconds * self.rate(cores)
        if self.own:
            self.own = self.own - done if self.own - done > 1e-9 else 0.0
        else:
            self.cpp = self.cpp - done if self.cpp - done > 1e-9 else 0.0


def expected_start(cache: CompileCache) -> float:
    """Seconds that a process needs before it can begin to compile; 0 where none has compiled yet."""
    return next((facts["start"] for _, _, facts in cache.stored("*") if "start" in facts), 0.0)


def finish_times(costs: Mapping[str, Cost], cores: int, begin: Sequence[float]) -> dict[str, float]:
    """When each function will be done: seconds from now.

    Args:
        costs: in the order in which processes take them.
        begin: for each process, seconds until it can begin.
    """
    waiting = [_Job(name, max(cost.own, 1e-6), cost.cpp, cost.libraries) for name, cost in costs.items()]
    running: list[_Job] = []
    free, now = sorted(begin), 0.0
    done: dict[str, float] = {}
    while waiting or running:
        while waiting and free and free[0] <= now:
            free.pop(0)
            running.append(waiting.pop(0))
        share = cores / max(1, len(running))
        steps = [job.until_change(share) for job in running] + ([free[0] - now] if waiting and free else [])
        step = min(steps)
        now += step
        for job in running:
            job.work(step, share)
        for job in [job for job in running if not job.own and not job.cpp]:
            running.remove(job)
            done[job.name] = now
            free.insert(0, now)
    return done
