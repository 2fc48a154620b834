"""How many drafts pay: from measured acceptance of each request's drafts and measured seconds of steps. Plain Python.

A draft is worth the chance that it and those before it are right. A step with more of them takes longer, in the sizes
of the buckets. So of the buckets that hold a step the one is taken that gives the most tokens a second, filled with the
drafts that are worth most. Where that is the one without room for drafts, the step is one without.

Whether drafts were right is known without verifying them: what was proposed is compared with the tokens that come. Long
proposals are right more often than short ones, since a method that looks for what came before proposes more after a
longer run: so each order of lengths has a chance of its own.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from compiled_llm.scheduling.costs import moved
from compiled_llm.scheduling.draft_trees import DraftTree

_PRIOR, _PRIOR_WEIGHT = 0.6, 2.0  # acceptance before anything is known, and for how many drafts that counts
_MEMORY = 0.85  # of what is known of a request, what stays with each observation
_LEAST_GAIN = 1.1  # that a step with drafts has to promise
_LEAST_WORTH = 0.1  # of a draft, though it costs nothing
_LEAST_WORTH_OF_NODES = 0.02  # of a tree, which has many that are worth little
_WORTH_BESIDE_PROMPTS = 0.5  # there a token costs about as much as in the largest steps
# Of a bucket that is not used, the known seconds become less by this share with each step, down to that share of the
# measured ones: so a bucket that was slow for a while is tried again.
_FORGETTING, _OPTIMISM = 0.001, 0.8
_FORGETTING_HOST = 0.05  # the same of the host's seconds, which single steps are far off
_FIRST_OF_HOST = 0.1  # of the first seconds of the host that are more than 0, so that a single slow step is not all
_ORDERS = 6  # of lengths of proposals

Seconds = Mapping[tuple[int, int], float]  # of steps in decode buckets, by (requests, tokens) of the bucket


class DecodeCosts:
    """Seconds of steps in decode buckets: what the device takes, and what a user waits for besides.

    Args:
        seconds: of steps of greedy requests, as measured at the start. Empty: nothing was measured.
        sampling: of sampling in such a bucket where requests are not greedy, as measured at the start.
    """

    def __init__(
        self,
        seconds: Sequence[tuple[tuple[int, int], float]] = (),
        sampling: Sequence[tuple[tuple[int, int], float]] = (),
    ) -> None:
        more = dict(sampling)
        greedy, sampled = dict(seconds), {sizes: value + more.get(sizes, 0.0) for sizes, value in seconds}
        self._measured, self._device = (greedy, sampled), (dict(greedy), dict(sampled))
        self._host: dict[tuple[int, bool], float] = {}
        self._of_size: dict[int, list[tuple[int, int]]] = {}  # the buckets of so many requests
        for sizes in greedy:
            self._of_size.setdefault(sizes[0], []).append(sizes)

    def __bool__(self) -> bool:
        return bool(self._device[0])

    def device(self, samples: bool) -> Seconds:
        """Seconds of the device. ``samples``: whether some request of the step is not greedy."""
        return self._device[samples]

    def host(self, num_requests: int, has_drafts: bool) -> float:
        """Seconds from a step's beginning to that of the next one, without those of the device and looks for drafts."""
        plain = self._host.get((num_requests, False), 0.0)
        return self._host.get((num_requests, has_drafts), plain)

    def record(self, num_requests: int, num_tokens: int, seconds: float, samples: bool = False) -> None:
        """A step in a decode bucket took the device ``seconds``. One that was not measured is ignored."""
        known, measured = self._device[samples], self._measured[samples]
        for sizes in self._of_size.get(num_requests, ()):
            value = known[sizes]
            if sizes[1] == num_tokens:
                known[sizes] = moved(value, seconds)
            else:
                known[sizes] = value + _FORGETTING * (_OPTIMISM * measured[sizes] - value)

    def record_host(self, num_requests: int, has_drafts: bool, seconds: float) -> None:
        """As ``host``, of a step in a bucket of so many requests that is over."""
        # One slow step with drafts does not keep the next ones away: the first is seen beside those without.
        key = num_requests, has_drafts
        known = self._host.get(key, self._host.get((num_requests, False)))
        # From 0, of a step that took no longer than the device, an average of factors of two would never rise.
        self._host[key] = seconds if known is None else moved(known or _FIRST_OF_HOST * seconds, seconds)
        # What steps with drafts took for a while is forgotten, so that they are tried again.
        if not has_drafts and (other := self._host.get((num_requests, True))) is not None:
            self._host[num_requests, True] = other + _FORGETTING_HOST * (self._host[key] - other)


@dataclasses.dataclass(slots=True)
class Acceptance:
    """How often drafts were right, after drafts that were: those of one request, or of all."""

    num_right: float = _PRIOR * _PRIOR_WEIGHT
    num_tried: float = _PRIOR_WEIGHT

    def observe(self, num_right: int, ends_wrong: bool, memory: float = _MEMORY) -> None:
        """So many drafts were right, and then one was wrong, or no more is known."""
        self.num_right = memory * self.num_right + num_right
        self.num_tried = memory * self.num_tried + num_right + ends_wrong

    def chance(self, others: "Acceptance") -> float:
        """That one more draft is right, if those before it are. ``others``: of all requests."""
        prior = others.num_right / others.num_tried if others.num_tried else _PRIOR
        return (self.num_right + prior) / (self.num_tried + 1.0)


class Chances:
    """How often drafts are right, by the order of a proposal's length: 1, 2 to 3, 4 to 7... drafts.

    ``others``: of all requests, which a request is taken to be like; None: these are all.
    """

    def __init__(self, others: "Chances | None" = None) -> None:
        self._others = others
        start = (_PRIOR * _PRIOR_WEIGHT, _PRIOR_WEIGHT) if others is None else (0.0, 0.0)
        self._by_order = [Acceptance(*start) for _ in range(_ORDERS)]

    def __getitem__(self, length: int) -> Acceptance:
        """Of proposals about as long as ``length``."""
        return self._by_order[min(length.bit_length(), _ORDERS) - 1]

    def chance(self, length: int) -> float:
        """That one more draft of so many is right, if those before it are."""
        assert self._others is not None
        return self[length].chance(self._others[length]) if length else 0.0


@dataclasses.dataclass(slots=True)
class History:
    """Of one request: what was proposed last, and how its drafts fared.

    Attributes:
        proposal: what was proposed when its output had ``num_output_tokens``; empty once it is compared.
        waits: whether the host has to know its last token for another reason than drafts.
    """

    waits: bool
    chances: Chances
    proposal: Sequence[int] = ()
    num_output_tokens: int = 0

    def compare(self, output: Sequence[int], of_all: Chances) -> None:
        """Compare the last proposal with the tokens that came since."""
        proposal, start = self.proposal, self.num_output_tokens
        if not proposal or len(output) <= start:
            return
        known = output[start : start + len(proposal)]
        right = 0
        for token_id, draft in zip(known, proposal, strict=False):
            if token_id != draft:
                break
            right += 1
        ends_wrong = right < len(known)
        if isinstance(proposal, DraftTree):
            right, ends_wrong = proposal.num_right(known)
        self.chances[len(proposal)].observe(right, ends_wrong)
        of_all[len(proposal)].observe(right, ends_wrong, 0.99)
        self.proposal = ()


def lengths(
    chances: Sequence[float],
    available: Sequence[int],
    num_requests: int,
    sizes: Sequence[tuple[int, int]],
    seconds: Seconds,
    most: int,
    *,
    fills_first: bool,
    host: tuple[float, float] = (0.0, 0.0),
    nodes: Sequence[Sequence[float]] = (),
) -> list[int]:
    """How many of its drafts a step takes of each request that has some.

    Args:
        chances: that one more draft of it is right.
        available: its drafts.
        num_requests: of the step, those without drafts included.
        sizes: (requests, tokens) of the decode buckets that hold so many requests, of one size in requests, rising.
        seconds: of steps in these.
        most: drafts of the step.
        fills_first: whether the first bucket takes drafts in the place of requests that are missing.
        host: seconds besides of a step without drafts and of one with some.
        nodes: of each request whose drafts are a tree the chance of each to be right, falling; else nothing.
    """
    worths = []
    for index, (chance, count) in enumerate(zip(chances, available, strict=True)):
        worth = 1.0
        if nodes and nodes[index]:
            worths += [(-worth, index) for worth in nodes[index][:count] if worth >= _LEAST_WORTH_OF_NODES]
            continue
        for _ in range(count):
            worth *= chance
            if worth < _LEAST_WORTH:
                break
            worths.append((-worth, index))
    worths.sort()
    del worths[most:]
    plain = seconds[sizes[0]] + host[0]
    best, best_rate = 0, num_requests / plain if plain else 0.0
    taken, tokens = 0, float(num_requests)
    for size in sizes if fills_first else sizes[1:]:
        before = taken
        while taken < len(worths) and num_requests + taken < size[1]:
            tokens -= worths[taken][0]
            taken += 1
        if taken == before:
            continue
        took = seconds[size] + host[1]
        if tokens / took > _LEAST_GAIN * best_rate:
            best, best_rate = taken, tokens / took
    counts = [0] * len(chances)
    for _, index in worths[:best]:
        counts[index] += 1
    return counts


def lengths_beside_prompts(chances: Sequence[float], available: Sequence[int], most: int) -> list[int]:
    """As ``lengths``, in a step that computes prompts, too."""
    counts = []
    for chance, count in zip(chances, available, strict=True):
        taken, worth = 0, chance
        while taken < min(count, most) and worth >= _WORTH_BESIDE_PROMPTS:
            taken, worth = taken + 1, worth * chance
        counts.append(taken)
        most -= taken
    return counts
