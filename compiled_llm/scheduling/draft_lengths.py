"""How many drafts pay: from measured acceptance of each request's drafts and measured seconds of steps. Plain Python.

A draft is worth the chance that it and those before it are right. A step with more of them takes longer, on a GPU in
the sizes of the buckets. So a step takes those that are worth most, as many as give the most tokens a second, or none.

Whether drafts were right is known without verifying them: what was proposed is compared with the tokens that come. Long
proposals are right more often than short ones, since a method that looks for what came before proposes more after a
longer run: so each order of lengths has a chance of its own.
"""

import dataclasses
from collections.abc import Callable, Sequence

from compiled_llm.scheduling.draft_trees import DraftTree

_PRIOR, _PRIOR_WEIGHT = 0.6, 2.0  # acceptance before anything is known, and for how many drafts that counts
_MEMORY = 0.85  # of what is known of a request, what stays with each observation
_LEAST_GAIN = 1.1  # that a step with drafts has to promise
_LEAST_WORTH = 0.05  # of a draft, though it costs nothing
_LEAST_WORTH_OF_NODES = 0.02  # of a tree, which has many that are worth little
_WORTH_BESIDE_PROMPTS = 0.5  # there a token costs about as much as in the largest steps
_ORDERS = 6  # of lengths of proposals


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
        self._by_order: dict[int, Acceptance] = {}  # of the orders that were asked for: few requests are looked at

    def __getitem__(self, length: int) -> Acceptance:
        """Of proposals about as long as ``length``."""
        order = min(length.bit_length(), _ORDERS)
        if order not in self._by_order:
            self._by_order[order] = Acceptance() if self._others is None else Acceptance(0.0, 0.0)
        return self._by_order[order]

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
    seconds: Callable[[int], float],
    most: int,
    *,
    nodes: Sequence[Sequence[float]] = (),
    weights: Sequence[float] = (),
) -> list[int]:
    """How many of its drafts a step takes of each request that has some.

    Args:
        chances: that one more draft of it is right.
        available: its drafts.
        num_requests: of the step, those without drafts included.
        seconds: of the step with so many drafts; infinite where there is no room.
        most: drafts of the step.
        nodes: of each request whose drafts are a tree the chance of each to be right, falling; else nothing.
        weights: what a token of each is worth; empty: as much of one as of another.
    """
    worths = []
    for index, (chance, count) in enumerate(zip(chances, available, strict=True)):
        worth, weight = 1.0, weights[index] if weights else 1.0
        if nodes and nodes[index]:
            worths += [(-worth * weight, index) for worth in nodes[index][:count] if worth >= _LEAST_WORTH_OF_NODES]
            continue
        for _ in range(count):
            worth *= chance
            if worth < _LEAST_WORTH:
                break
            worths.append((-worth * weight, index))
    worths.sort()
    del worths[most:]
    best, tokens, plain = 0, float(num_requests), seconds(0)
    best_rate = _LEAST_GAIN * tokens / plain if plain else 0.0
    for count, (worth, _) in enumerate(worths, 1):
        tokens -= worth
        took = seconds(count)
        if tokens > best_rate * took:
            best, best_rate = count, tokens / took
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
