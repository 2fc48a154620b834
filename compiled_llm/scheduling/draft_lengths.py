"""How many drafts pay: from measured acceptance of each request's drafts and measured seconds of steps. Plain Python.

A draft is worth the chance that it and those before it are right. A step with more of them takes longer, in the sizes
of the buckets. So of the buckets that hold a step the one is taken that gives the most tokens a second, filled with the
drafts that are worth most. Where that is the one without room for drafts, the step is one without.

Whether drafts were right is known without verifying them: what was proposed is compared with the tokens that come.
"""

import dataclasses
from collections.abc import Sequence

from compiled_llm.scheduling.costs import moved
from compiled_llm.scheduling.draft_trees import DraftTree

_PRIOR, _PRIOR_WEIGHT = 0.6, 2.0  # acceptance before anything is known, and for how many drafts that counts
_MEMORY = 0.85  # of what is known of a request, what stays with each observation
_LEAST_GAIN = 1.1  # that a larger bucket has to promise
_LEAST_WORTH = 0.1  # of a draft, though it costs nothing
_WORTH_BESIDE_PROMPTS = 0.5  # there a token costs about as much as in the largest steps
# Of a bucket that is not used, the known seconds become less by this share with each step, down to that share of the
# measured ones: so a bucket that was slow for a while is tried again.
_FORGETTING, _OPTIMISM = 0.001, 0.8
_LOOKING = 0.003  # of the time of steps, that looking for drafts of no use may take
_MOST_SKIPPED = 64  # steps


class DecodeCosts:
    """Seconds of steps in decode buckets, by (requests, tokens) of the bucket; those measured at the start at first.

    Empty: nothing was measured.
    """

    def __init__(self, seconds: Sequence[tuple[tuple[int, int], float]] = ()) -> None:
        self._measured = dict(seconds)
        self.seconds = dict(seconds)

    def record(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """A step in a decode bucket took ``seconds``. One that was not measured is ignored."""
        for sizes, known in self.seconds.items():
            if sizes == (num_requests, num_tokens):
                self.seconds[sizes] = moved(known, seconds)
            elif sizes[0] == num_requests:
                self.seconds[sizes] = known + _FORGETTING * (_OPTIMISM * self._measured[sizes] - known)


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


@dataclasses.dataclass(slots=True)
class History:
    """Of one request: what was proposed last, and how its drafts fared.

    Attributes:
        proposal: what was proposed when its output had ``num_output_tokens``; empty once it is compared.
        num_useless: looks for drafts since the last one that a step took some of.
        num_skipped: steps that are still to go by before the next look.
        waits: whether the host has to know its last token for another reason than drafts.
    """

    waits: bool
    acceptance: Acceptance = dataclasses.field(default_factory=lambda: Acceptance(0.0, 0.0))
    proposal: Sequence[int] = ()
    num_output_tokens: int = 0
    num_useless: int = 0
    num_skipped: int = 0

    def compare(self, output: Sequence[int], of_all: Acceptance) -> None:
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
        self.acceptance.observe(right, ends_wrong)
        of_all.observe(right, ends_wrong, 0.99)
        self.proposal = ()


def lengths(
    chances: Sequence[float],
    available: Sequence[int],
    num_requests: int,
    sizes: Sequence[tuple[int, int]],
    seconds: dict[tuple[int, int], float],
    most: int,
    *,
    fills_first: bool,
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
    """
    worths = sorted(
        (
            (-(chance**place), index)
            for index, (chance, count) in enumerate(zip(chances, available, strict=True))
            for place in range(1, count + 1)
            if chance**place >= _LEAST_WORTH
        ),
    )[:most]
    best, best_rate, taken, tokens = 0, 0.0, 0, float(num_requests)
    for size in sizes:
        while (fills_first or size != sizes[0]) and taken < len(worths) and num_requests + taken < size[1]:
            tokens -= worths[taken][0]
            taken += 1
        rate = tokens / seconds[size]
        if best_rate == 0.0 or rate > _LEAST_GAIN * best_rate:
            best, best_rate = taken, rate
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


def num_skipped(num_useless: int, look_seconds: float, step_seconds: float, least: int) -> int:
    """After so many looks of no use in a row: how many steps go by before the next one.

    Args:
        look_seconds: that the looks of a step take together.
        step_seconds: that a step without drafts takes.
        least: steps that may go by however short a look is.
    """
    most = max(least, int(look_seconds / (_LOOKING * step_seconds)) if step_seconds else 0)
    return min(most, _MOST_SKIPPED, 2 ** min(num_useless, 10) - 1)
