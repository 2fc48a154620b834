"""What compiling a function costs, in CPU seconds. How long it takes depends on these and on what runs beside it."""

import os
import time
from typing import NamedTuple


class Cost(NamedTuple):
    """What compiling a function takes: CPU seconds.

    Attributes:
        own: of the process that compiles, which uses one core.
        cpp: of the C++ compilers that it starts; without headers, which are built once on a machine.
        libraries: how many these build, all of them at once if there are cores, when ``own`` is spent.
    """

    own: float
    cpp: float
    libraries: int

    def seconds(self, cores: int) -> float:
        """Wall time on so many cores that nobody else uses."""
        return self.own + self.cpp / max(1, min(self.libraries, cores))


class CostMeter:
    """Measures what this process spends from now on."""

    def __init__(self) -> None:
        self._own, self._children = time.process_time(), _children_seconds()

    def cost(self, libraries: int, header_seconds: float) -> Cost:
        """What was spent until now, but for ``header_seconds``, which building headers took."""
        cpp = _children_seconds() - self._children - header_seconds
        return Cost(round(time.process_time() - self._own, 2), round(max(0.0, cpp), 2), libraries)


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system
