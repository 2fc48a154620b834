"""Sample: numbers of which a random sample is kept."""

import math
import random
from array import array
from collections.abc import Sequence

_MOST_VALUES = 1 << 16


class Sample:
    """Numbers, of which a random sample of bounded size is kept. Count and sum are exact."""

    def __init__(self, size: int = _MOST_VALUES, seed: int = 0) -> None:
        self.count = 0
        self.sum = 0.0
        self.values = array("d")
        self._size = size
        self._random = random.Random(seed).random
        # Li's algorithm L: which number will take the place of one that is kept is drawn ahead.
        self._weight, self._next = 1.0, size - 1
        self._draw_next()

    def add(self, value: float) -> None:
        self.extend((value,))

    def extend(self, values: Sequence[float]) -> None:
        """Add numbers, in their order."""
        start, room = self.count, self._size - len(self.values)
        self.count += len(values)
        self.sum += sum(values)
        if room > 0:
            self.values.extend(values[:room])
        while self._next < self.count:
            self.values[int(self._random() * self._size)] = values[self._next - start]
            self._draw_next()

    def _draw_next(self) -> None:
        self._weight *= math.exp(math.log(1.0 - self._random()) / self._size)
        self._next += 1 + int(math.log(1.0 - self._random()) / math.log1p(-self._weight))

    def summary(self) -> dict[str, float] | None:
        """Count, mean, p50, p90, p99; None if there is no number."""
        if not self.count:
            return None
        ordered = sorted(self.values)
        at = {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 90, 99)}
        return {"count": self.count, "mean": self.sum / self.count, **at}
