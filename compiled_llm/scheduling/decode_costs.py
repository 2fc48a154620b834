"""DecodeCosts: seconds of steps that decode, by how many requests and drafts they have. Plain Python.

Some steps are measured at the start: one that fills each decode bucket. What a step is expected to take is what follows
from these, times a *ratio*: that of what steps like it have taken since to what followed from the start.

Where a step takes the time of its whole bucket, those of one bucket are alike. On a CPU, a step computes its own tokens
alone: what was measured makes curves over tokens, and steps are alike that have about as many requests and about as
many drafts, in powers of two. So a ratio is soon known, though few steps are of just the same size.
"""

import math
from collections.abc import Mapping, Sequence

from compiled_llm.scheduling.costs import left_of, moved

# A step moves the ratio of those like it by this share, at first by more where that is not of a measured size. One that
# differs by more than a factor of two counts as that factor, so that one slow step does not keep others away for long.
_LEAST_WEIGHT, _MOST_CHANGE = 0.1, 2.0
# With each step, the ratios of steps of as many requests, but more or fewer drafts, move by this share to that share of
# its own: so what was slow for a while, or at the start, is tried again. What is known of few steps with drafts is
# forgotten sooner: one that was slow by chance would keep others away. And sooner while steps rest: then nothing is
# lost by it.
_FORGETTING, _OPTIMISM, _FEW_STEPS, _FORGETTING_AT_REST = 0.001, 0.8, 10, 0.01
_FORGETTING_HOST = 0.05  # the same of the host's seconds, which single steps are far off
_FIRST_OF_HOST = 0.1  # of the first seconds of the host that are more than 0, so that a single slow step is not all

Key = tuple[int, int]  # what steps that are alike have in common: of their requests, and of their drafts
Measured = Mapping[tuple[int, int], float]  # seconds by (requests, tokens) of a decode bucket


class DecodeCosts:
    """Seconds of steps that decode: what the device takes, and what a user waits for besides.

    Args:
        seconds: ((requests, tokens), seconds) of greedy steps that fill a decode bucket, as measured at the start.
            Empty: nothing was measured.
        sampling: of sampling in such a bucket where requests are not greedy, as measured at the start.
        pads: whether a step takes the time of its whole bucket, however many tokens it has.

    Attributes:
        measured: ``seconds``, by (requests, tokens).
    """

    def __init__(
        self,
        seconds: Sequence[tuple[tuple[int, int], float]] = (),
        sampling: Sequence[tuple[tuple[int, int], float]] = (),
        *,
        pads: bool = True,
    ) -> None:
        self.measured, more = dict(seconds), dict(sampling)
        made = _Buckets if pads else _Curves
        sampled = {sizes: value + more.get(sizes, 0.0) for sizes, value in seconds}
        self._start = made(self.measured), made(sampled)
        # Of greedy steps and others: the ratio, and how many steps it is of, by the two parts of their key.
        self._ratios: tuple[dict[int, dict[int, tuple[float, float]]], ...] = ({}, {})
        self._host: dict[tuple[int, bool], float] = {}

    def __bool__(self) -> bool:
        return bool(self.measured)

    def key(self, num_requests: int, num_drafts: int) -> Key:
        """That of steps like this one."""
        return self._start[False].key(num_requests, num_drafts)

    def device(self, num_requests: int, num_drafts: int, samples: bool) -> float:
        """Seconds of the device; infinite for more drafts than there is room for.

        ``samples``: whether some request of the step is not greedy.
        """
        start = self._start[samples]
        size, drafts = start.key(num_requests, num_drafts)
        return start.seconds(num_requests, num_drafts) * self._ratio(self._ratios[samples].get(size, {}), drafts)

    def shared(self, num_requests: int, samples: bool) -> float:
        """The share of a plain step that is no request's own: that is spent however many there are. 0 to 1.

        As measured at the start, since later steps of one request and of several are of different times. Two requests
        or more.
        """
        one, all_of_them = (self._start[samples].seconds(count, 0) for count in (1, num_requests))
        if all_of_them <= 0.0:
            return 0.0
        own = max(0.0, all_of_them - one) / (num_requests - 1)
        return max(0.0, 1.0 - num_requests * own / all_of_them)

    @staticmethod
    def _ratio(known: Mapping[int, tuple[float, float]], drafts: int) -> float:
        """Of steps that were not seen, it is that of those with fewer drafts, and less the more of these ran."""
        if drafts in known:
            return known[drafts][0]
        fewer = max((each for each in known if each < drafts), default=None)
        if fewer is None:
            return 1.0
        ratio, count = known[fewer]
        return ratio * (_OPTIMISM + (1.0 - _OPTIMISM) * (1.0 - _FORGETTING) ** count)

    def host(self, num_requests: int, has_drafts: bool) -> float:
        """Seconds from a step's beginning to that of the next one, without those of the device and looks for drafts."""
        size = self.key(num_requests, 0)[0]
        return self._host.get((size, has_drafts), self._host.get((size, False), 0.0))

    def record(self, num_requests: int, num_drafts: int, seconds: float, samples: bool = False) -> None:
        """A step took the device ``seconds``.

        One of a size that was not measured is ignored, and on a CPU the first that has about so many drafts.
        """
        start = self._start[samples]
        size, drafts = start.key(num_requests, num_drafts)
        expected = start.seconds(num_requests, num_drafts)
        if not 0.0 < expected < math.inf:
            return
        of_size = self._ratios[samples].setdefault(size, {})
        if start.first_is_cold and drafts and drafts not in of_size:
            of_size[drafts] = self._ratio(of_size, drafts), start.num_steps
            return
        ratio, count = of_size.get(drafts, (self._ratio(of_size, drafts), start.num_steps))
        bounded = min(max(seconds / expected, ratio / _MOST_CHANGE), ratio * _MOST_CHANGE)
        ratio += max(_LEAST_WEIGHT, 1.0 / (count + 1)) * (bounded - ratio)
        of_size[drafts] = ratio, count + 1
        for other, (value, number) in of_size.items():
            if other != drafts:
                share = _FORGETTING * (max(1.0, _FEW_STEPS / number) if other else 1.0)
                of_size[other] = value + share * (_OPTIMISM * ratio - value), number

    def rest(self, num_requests: int, count: int, samples: bool) -> None:
        """So many steps without drafts are over that were not measured: others that were slow then are tried again."""
        of_size = self._ratios[samples].get(self.key(num_requests, 0)[0], {})
        plain, _ = of_size.get(0, (1.0, 0.0))
        for drafts, (ratio, number) in of_size.items():
            if drafts and ratio > _OPTIMISM * plain:
                stays = (1.0 - _FORGETTING_AT_REST) ** count
                of_size[drafts] = _OPTIMISM * plain + (ratio - _OPTIMISM * plain) * stays, left_of(number, count)

    def record_host(self, num_requests: int, has_drafts: bool, seconds: float) -> None:
        """As ``host``, of a step that is over."""
        size = self.key(num_requests, 0)[0]
        # One slow step with drafts does not keep the next ones away: the first is seen beside those without.
        known = self._host.get((size, has_drafts), self._host.get((size, False)))
        # From 0, of a step that took no longer than the device, an average of factors of two would never rise.
        found = seconds if known is None else moved(known or _FIRST_OF_HOST * seconds, seconds)
        self._host[size, has_drafts] = found
        # What steps with drafts took for a while is forgotten, so that they are tried again.
        if not has_drafts and (other := self._host.get((size, True))) is not None:
            self._host[size, True] = other + _FORGETTING_HOST * (found - other)


class _Buckets:
    """What was measured, where a step takes the time of its bucket. The key is that bucket, (requests, tokens)."""

    num_steps = 9  # as good as so many, of one size
    first_is_cold = False

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self._sizes = sorted({size for size, _ in measured})
        self._tokens = {size: sorted(tokens for own, tokens in measured if own == size) for size in self._sizes}

    def key(self, num_requests: int, num_drafts: int) -> Key:
        """Its tokens are 0 where no bucket has room."""
        size = next(size for size in self._sizes if size >= num_requests)
        # The first of a size has no room for drafts.
        tokens = self._tokens[size][1:] if num_drafts else self._tokens[size]
        return size, next((count for count in tokens if count >= num_requests + num_drafts), 0)

    def seconds(self, num_requests: int, num_drafts: int) -> float:
        return self._measured.get(self.key(num_requests, num_drafts), math.inf)


class _Curves:
    """What was measured, where a step has its own size.

    A step is on the curve of the largest batch size that was measured and is not larger than its own, and beyond the
    end of that, where it has many drafts, on those of larger ones.
    """

    num_steps = 1  # as good as so many: it is between what was measured, in longer or shorter contexts
    first_is_cold = True  # the first step of its kind takes memory that the others find, and says little of them

    def __init__(self, measured: Measured) -> None:
        sizes = sorted({size for size, _ in measured})
        curves = {size: self._curve(size, measured) for size in sizes}
        self._curves: list[list[float]] = []  # by number of requests
        for count in range(max(sizes, default=-1) + 1):
            below = [size for size in sizes if size <= count]
            self._curves.append(curves[below[-1] if below else sizes[0]])

    def key(self, num_requests: int, num_drafts: int) -> Key:
        return (num_requests - 1).bit_length(), num_drafts.bit_length()

    def seconds(self, num_requests: int, num_drafts: int) -> float:
        curve, tokens = self._curves[num_requests], num_requests + num_drafts
        return curve[tokens] if tokens < len(curve) else math.inf

    @staticmethod
    def _curve(size: int, measured: Measured) -> list[float]:
        """Seconds by number of tokens, on lines between those measured.

        None takes longer than one of as many requests and tokens or more: other programs make steps slower, not faster.
        """
        points: dict[int, float] = {}
        for own, tokens in sorted(measured):
            if own >= size and tokens > max(points, default=0):
                points[tokens] = min(
                    seconds for (others, more), seconds in measured.items() if others >= own and more >= tokens
                )
        first = next(iter(points))
        curve, before = [points[first]] * (first + 1), first
        for tokens, seconds in points.items():
            step = (seconds - points[before]) / max(1, tokens - before)
            curve += [points[before] + step * (n - before) for n in range(before + 1, tokens + 1)]
            before = tokens
        return curve
