"""StepCosts: measured seconds of what the scheduler may choose between. Plain Python."""

import dataclasses

# A measurement moves its average by this share. One that differs by more than a factor of two counts as that factor, so
# that one slow step cannot exclude a bucket for long.
_WEIGHT = 0.1
_MOST_CHANGE = 2.0
# With each step in another bucket, an average moves back towards its start by this share: so a bucket that was slow for
# a while, and is not used for that reason, is tried again later.
_FORGETTING = 0.005


@dataclasses.dataclass
class StepCosts:
    """What was measured at the engine's start, and in each step since.

    Attributes:
        bucket_seconds: of a step in each token bucket, by its size in tokens; a moving average from then on. Empty: not
            measured.
        swap_seconds: of copying one block from the device to the host, or back. 0: not measured.
    """

    bucket_seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    swap_seconds: float = 0.0
    _start_seconds: dict[int, float] = dataclasses.field(default_factory=dict)

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """A step in the token bucket of ``num_tokens`` took ``seconds``. Unknown buckets are ignored."""
        if num_tokens not in self.bucket_seconds:
            return
        if not self._start_seconds:
            self._start_seconds = dict(self.bucket_seconds)
        for size, known in self.bucket_seconds.items():
            if size == num_tokens:
                self.bucket_seconds[size] = moved(known, seconds)
            else:
                self.bucket_seconds[size] = known + _FORGETTING * (self._start_seconds[size] - known)

    def largest_within(self, seconds: float) -> int | None:
        """The largest token bucket that takes at most ``seconds``; None when there is none."""
        return max((size for size, taken in self.bucket_seconds.items() if taken <= seconds), default=None)

    def swap_is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether copying blocks out and back costs less than computing their tokens again, by the largest bucket."""
        if not self.bucket_seconds:
            return False
        size = max(self.bucket_seconds)
        return 2 * num_blocks * self.swap_seconds < num_tokens * self.bucket_seconds[size] / size


def moved(average: float, value: float) -> float:
    """A moving average after one more measurement."""
    bounded = min(max(value, average / _MOST_CHANGE), average * _MOST_CHANGE)
    return average + _WEIGHT * (bounded - average)
