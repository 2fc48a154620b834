"""StepCosts: measured seconds of what the scheduler may choose between. Plain Python."""

import dataclasses
import math
from collections.abc import Sequence

# A measurement moves its average by this share. One that differs by more than a factor of two counts as that factor, so
# that one slow step cannot exclude a bucket for long.
_WEIGHT = 0.1
_MOST_CHANGE = 2.0
# With each step in another bucket, an average moves back towards the least it has been by this share: so a bucket that
# was slow for a while, and is not used for that reason, is tried again later.
_FORGETTING = 0.005
# The smallest bucket's time times this is always allowed: where twice the tokens take so much longer at most, smaller
# steps would spend too much on reading the weights.
_ALWAYS_ALLOWED = 1.8


# What an average is of counts for less with each step that passes without another: a machine becomes faster and slower.
_LEFT_OF_COUNT = 0.99
_LEAST_LEFT = 2.0  # of what it is of: the next one moves it by a third


def left_of(count: float, num_passed: int) -> float:
    """As how many measurements an average of ``count`` counts, when so many steps have passed since the last."""
    return max(min(count, _LEAST_LEFT), count * _LEFT_OF_COUNT**num_passed)


@dataclasses.dataclass
class StepCosts:
    """What was measured at the engine's start, if anything was, and in each step since.

    Attributes:
        bucket_seconds: of a step in each token bucket that was measured, by its size in tokens; moving averages.
        swap_seconds: of copying one block from the device to the host, or back. 0: not measured.
        pads: whether a step takes the time of its whole bucket, however many tokens it has.
    """

    bucket_seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    swap_seconds: float = 0.0
    pads: bool = True

    def __post_init__(self) -> None:
        self._least_seconds = dict(self.bucket_seconds)

    def record_step(self, num_tokens: int, seconds: float, num_computed: int | None = None) -> None:
        """A step in the token bucket of ``num_tokens`` took ``seconds``. ``num_computed``: its own; None: all of these.

        A step of twice the tokens takes twice as long at most. Averages of other buckets that contradict this one are
        of another time, such as that before steps were compiled: they are moved as far as it says.
        """
        if not self.pads and num_computed is not None:
            if 2 * num_computed < num_tokens:
                return  # that says little of a full one
            seconds *= num_tokens / num_computed  # a full one takes so long at most
        most = min((num_tokens / size * known for size, known in self.bucket_seconds.items() if size < num_tokens),
                   default=math.inf)  # fmt: skip
        average = moved(self.bucket_seconds.get(num_tokens, min(seconds, most)), seconds)
        for size, known in self.bucket_seconds.items():
            known += _FORGETTING * (self._least_seconds[size] - known)
            bound = average * size / num_tokens
            self.bucket_seconds[size] = max(known, bound) if size < num_tokens else min(known, bound)
        self.bucket_seconds[num_tokens] = average
        self._least_seconds[num_tokens] = min(average, self._least_seconds.get(num_tokens, average))

    def expected(self, size: int) -> float:
        """Seconds of a step in a token bucket, if it was not measured from smaller ones, else larger ones."""
        shares = {known: taken * size / known for known, taken in self.bucket_seconds.items()}
        at_most = [seconds for known, seconds in shares.items() if known <= size]
        return min(at_most) if at_most else max(shares.values(), default=math.inf)

    def largest_within(self, seconds: float, sizes: Sequence[int]) -> int:
        """The largest of the token buckets ``sizes`` that takes at most ``seconds``, or little more than the smallest.

        The first, which is the smallest, where nothing was measured.
        """
        most = max(seconds, _ALWAYS_ALLOWED * self.expected(sizes[0]))
        return max((size for size in sizes if self.expected(size) <= most < math.inf), default=sizes[0])

    def swap_is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether copying blocks out and back costs less than computing their tokens again, by the largest bucket."""
        if not self.bucket_seconds or not self.swap_seconds:
            return False
        size = max(self.bucket_seconds)
        return 2 * num_blocks * self.swap_seconds < num_tokens * self.bucket_seconds[size] / size


def moved(average: float, value: float) -> float:
    """A moving average after one more measurement."""
    bounded = min(max(value, average / _MOST_CHANGE), average * _MOST_CHANGE)
    return average + _WEIGHT * (bounded - average)
