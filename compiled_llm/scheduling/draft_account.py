"""DraftAccount: what drafts have saved and lost, and so whether more are looked for. Plain Python.

Its unit is the time that a step takes in which nothing is looked for or drafted, as a user waits for it: from its
beginning to that of the next one. Steps of each decode bucket, greedy and sampled, have a time of their own. Each step
with drafts, with a look for some or with the work of a network enters what it saved or lost. Every step enters a small
share of itself besides: that much may be lost. When the account is empty, nothing is looked for until it has enough
for a while of looking, in which a method can show that it pays again.
"""

import dataclasses
from typing import NamedTuple

from compiled_llm.scheduling.costs import moved

SHARE = 0.01  # of all steps, that may be lost
MOST = 8.0  # steps that the account has at most, and at the start
OPENS_AT = 4.0  # steps, once it was empty
_LEAST_KNOWN = 3  # plain steps of a kind before anything is looked for
# After so many steps without a plain one, steps in which a look found nothing stand in; after so many there is one.
_STALE, _TOO_OLD = 64, 128

Kind = tuple[int, bool]  # of a step: requests of its decode bucket, and whether some request is not greedy


class DoneStep(NamedTuple):
    """A step in a decode bucket.

    Attributes:
        kind: of it.
        num_tokens: of the bucket.
        has_drafts: whether it verified some.
        seconds: from its beginning to that of the next one, without those of ``looked`` and ``network``.
        looked: seconds in looking for drafts.
        network: seconds in which a network drafted behind it.
        reads: whether this network had not drafted behind the step before: it read all tokens that it lacked.
        gained: by how many tokens drafts have shortened what is to be computed.
    """

    kind: Kind
    num_tokens: int
    has_drafts: bool
    seconds: float
    looked: float = 0.0
    network: float = 0.0
    reads: bool = False
    gained: float = 0.0

    @property
    def is_plain(self) -> bool:
        return not (self.has_drafts or self.looked or self.network)


@dataclasses.dataclass(slots=True)
class _Plain:
    """Steps of a kind in which nothing is looked for or drafted: seconds, how many there were, and the last of them."""

    seconds: float
    count: int
    last: int


class DraftAccount:
    """Whether to look for drafts.

    Args:
        one_graph: whether a step without drafts takes as long where somebody looks for some: on a GPU a look keeps the
            next step from starting while this one runs.

    Attributes:
        balance: steps that may be lost.
        balance_with_reading: the same, where what a network takes to read prompts, and what else it lacks, has been
            lost as well. So a network that was worth it reads the next request, and one that has read a request goes
            on as long as its drafts save more than they take.
    """

    def __init__(self, *, one_graph: bool) -> None:
        self.balance = self.balance_with_reading = MOST
        self._one_graph, self._is_open, self._num_steps = one_graph, True, 0
        self._plain: dict[Kind, _Plain] = {}
        # Averages: of steps that are not plain, by (kind, tokens, whether with drafts), of looks and of a network.
        self._seconds: dict[tuple[Kind, int, bool], float] = {}
        self._look: dict[Kind, float] = {}
        self._network: dict[tuple[Kind, bool], float] = {}

    def looks(self, kind: Kind, *, goes_on: bool) -> bool:
        """Whether the next step, of this kind, looks for drafts or has a network make some.

        ``goes_on``: whether that network has drafted behind the last step, so that it lacks little.
        """
        plain = self._plain.get(kind)
        if plain is None or plain.count < _LEAST_KNOWN or self._num_steps - plain.last >= _TOO_OLD:
            return False
        if self._is_open:
            self._is_open = self.balance > 0.0
        else:
            self._is_open = self.balance >= OPENS_AT and self.balance_with_reading >= OPENS_AT
        return self._is_open and (goes_on or self.balance_with_reading > 0.0)

    def enter(self, step: DoneStep) -> None:
        """A step is over."""
        self._num_steps += 1
        plain = self._plain.get(step.kind)
        if step.is_plain:
            if plain is None:
                plain = self._plain[step.kind] = _Plain(step.seconds, 0, 0)
            plain.seconds = moved(plain.seconds, step.seconds)
            plain.count, plain.last = plain.count + 1, self._num_steps
            self._add(SHARE, 0.0)
        elif plain is not None and plain.seconds > 0.0:
            saved, reading = self._saved(step, plain.seconds)
            self._add(SHARE + saved / plain.seconds, reading / plain.seconds)
            is_stale = self._num_steps - plain.last >= _STALE
            if is_stale and self._one_graph and not (step.has_drafts or step.network):
                plain.seconds = moved(plain.seconds, step.seconds)
                plain.last = self._num_steps - _STALE

    def enter_reading(self, kind: Kind, seconds: float) -> None:
        """A network took ``seconds`` behind a step that computes prompts. ``kind``: of steps that follow."""
        plain = self._plain.get(kind)
        if plain is not None and plain.seconds > 0.0:
            self._add(0.0, seconds / plain.seconds)

    def _add(self, saved: float, reading: float) -> None:
        self.balance = min(MOST, self.balance + saved)
        self.balance_with_reading = min(MOST, self.balance_with_reading + saved - reading)

    def _saved(self, step: DoneStep, plain: float) -> tuple[float, float]:
        """Seconds that a step saved, and those in which a network read what it lacked.

        A step counts as the average of those like it, so that a single slow one does not matter much.
        """
        key = step.kind, step.num_tokens, step.has_drafts
        known = self._seconds.get(key, plain)
        seconds = self._seconds[key] = moved(known, step.seconds)
        looked = 0.0
        if step.looked:
            looked = self._look[step.kind] = moved(self._look.get(step.kind, step.looked), step.looked)
        drafting = reading = 0.0
        if step.network:
            usual = self._network.get((step.kind, False))
            average = moved(self._network.get((step.kind, step.reads), step.network), step.network)
            self._network[step.kind, step.reads] = average
            drafting = average if not step.reads else min(usual or 0.0, step.network)
            if step.reads:  # which takes longer for a long prompt: no average
                reading = step.network - drafting
        return step.gained * plain - max(0.0, seconds - plain) - looked - drafting, reading
