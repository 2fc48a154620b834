"""DraftAccount: what drafts have saved and lost, and so whether more are looked for. Plain Python.

Its unit is a *plain* step, in which nothing is looked for or drafted. It lasts from its beginning to that of the next
one, which is what a user waits for. Each other step enters what it saved or lost: one with drafts, with a look for
some, or behind which a network of the worker drafts. Each step of any kind enters a small share of a plain one besides:
that much may be lost, and half of it, at last a quarter, where the account was emptied again and again without having
been full. While the account is empty, nothing is looked for. Steps of about as many requests have an account of their
own, greedy ones and others: what pays for one request need not for many.

A machine becomes slower and faster, and while every step has drafts nobody sees what plain ones take by now. So after
other steps, as many plain ones are measured, up to 16. Those that follow *rest*: none of them is measured by itself,
since measuring a step takes time, too. Their shares are entered all at once, and so is what they took on average.
"""

import dataclasses
from typing import NamedTuple

from compiled_llm.scheduling.costs import moved
from compiled_llm.scheduling.decode_costs import Key

SHARE, LEAST_SHARE = 0.0075, 0.001875  # of all steps, that may be lost; at least, where the last tries paid nothing
MOST = 8.0  # steps that an account has at most, and at the start
_LEAST = -32.0  # it is never emptier than that while steps rest; the least shares of 17,100 make up for it
MOST_RESTED = 64  # steps in a row
_MOST_DUE = 16  # plain steps that are measured before others rest
_LEAST_KNOWN = 3  # plain steps before anything is looked for
# So many steps without drafts come before a plain one that is measured. Behind drafts the first few take longer: what
# they read is no longer in the caches, and a step of another size fills all buffers. Behind those of an EAGLE-3 head on
# a CPU they took 1.46, 1.22, 1.12, 1.06 and 1.03 times as long.
SETTLED = 4
# Steps since a plain one was measured. After so many of them, those in which a look found nothing are taken for plain,
# on a CPU; after so many, nothing is looked for until some were measured. The first ones that were are not much to go
# by, such as those of an engine that has just started: after them it is sooner.
_STALE, _TOO_OLD, _TOO_OLD_AT_FIRST = 64, 256, 32
_AT_FIRST, _WEIGHT_AT_FIRST = 9, 0.3  # plain steps that were measured, and the share by which one moves their average
# A step moves the average of those like it by this share, at first by more, and counts as so many times that at most.
_LEAST_WEIGHT, _MOST_TIMES = 0.1, 2.0
_WEIGHT_OF_REST = 0.5  # the share by which the average of steps that rest moves that of plain ones

# Of steps that have one account: their number of requests, rounded up to a power of two, and whether one is not greedy.
Kind = tuple[int, bool]


class DoneStep(NamedTuple):
    """A step that decodes.

    Attributes:
        kind: which account it goes to.
        num_requests: that it has.
        alike: what steps have in common that take about as long, see ``DecodeCosts.key``.
        has_drafts: whether it verified some.
        seconds: from its beginning to that of the next one, without those of ``looked`` and ``network``.
        looked: seconds in looking for drafts.
        network: seconds in which a network of the worker drafted behind it.
        reads: whether that network drafted behind neither of the two steps before, so that ``network`` has the time in
            which it computed all tokens that it lacked, such as the prompt.
        gained: how many plain steps its right drafts have saved.
    """

    kind: Kind
    num_requests: int
    alike: Key
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
class _Steps:
    """The account of steps of one kind.

    Attributes:
        plain: seconds of a plain step; an average, as all seconds here. What is entered of a step is the average of
            those like it, so that a single slow one does not matter much.
        num_plain: plain steps that were measured.
        num_before: the last steps, as far as they had no drafts.
        age: steps since the last plain one that was measured.
        num_due: plain steps that are to be measured before any rest.
        num_new: plain steps that are to be measured before more is looked for.
        share: of a plain step, that each step enters.
        was_full: whether the account was, since it was empty.
        balance: plain steps that may be lost. What a network takes to compute tokens that it lacks, such as prompts, is
            not entered: one that has read a prompt goes on as long as its drafts save more than they take.
        with_reading: the same, with what that takes: a network reads other prompts only if this is above 0.
        others: seconds of other steps and how many there were, by what is alike and whether they have drafts. The first
            may be slow for no reason that stays, so the average begins with a plain step.
        look, network: seconds of a look, and of a network that lacked nothing.
    """

    plain: float
    num_plain: int = 0
    num_before: int = 0
    age: int = 0
    num_due: int = 0
    num_new: int = 0
    share: float = SHARE
    was_full: bool = True
    balance: float = MOST
    with_reading: float = MOST
    others: dict[tuple[Key, bool], tuple[float, int]] = dataclasses.field(default_factory=dict)
    look: float = 0.0
    network: float = 0.0

    @property
    def left(self) -> float:
        """Steps that may be lost, whatever for."""
        return min(self.balance, self.with_reading)

    def add(self, saved: float, reading: float = 0.0) -> None:
        before = self.left
        self.balance = max(_LEAST, min(MOST, self.balance + saved))
        # Not bounded below here: else a long prompt's reading would be forgiven, and what drafts save behind it would
        # seem to pay for it.
        self.with_reading = min(MOST, self.with_reading + saved - reading)
        if self.left == MOST:
            self.was_full, self.share = True, SHARE
        elif before > 0.0 >= self.left:
            self.share = SHARE if self.was_full else max(LEAST_SHARE, self.share / 2)
            self.was_full = False

    def enter_plain(self, seconds: float) -> None:
        if self.num_before >= SETTLED:
            if self.num_plain < _LEAST_KNOWN and _MOST_TIMES * seconds < self.plain:
                self.plain = seconds  # those before were slow for no reason that stays
            else:
                bounded = min(max(seconds, self.plain / _MOST_TIMES), _MOST_TIMES * self.plain)
                weight = _WEIGHT_AT_FIRST if self.num_plain < _AT_FIRST else _LEAST_WEIGHT
                self.plain += weight * (bounded - self.plain)
            self.num_plain, self.age, self.num_due = self.num_plain + 1, 0, max(0, self.num_due - 1)
            self.num_new = max(0, self.num_new - 1)
        self.num_before += 1
        self.add(self.share)

    def enter(self, step: DoneStep) -> None:
        """A step that is not plain."""
        self.age += 1
        if self.age >= (_TOO_OLD_AT_FIRST if self.num_plain < _AT_FIRST else _TOO_OLD):
            self.num_new = _LEAST_KNOWN
        self.num_before = 0 if step.has_drafts or step.network else self.num_before + 1
        self.num_due = min(_MOST_DUE, max(self.num_due, self.age))
        key = step.alike, step.has_drafts
        seconds, count = self.others.get(key, (self.plain, 1))
        weight = max(_LEAST_WEIGHT, 1.0 / (count + 1))
        seconds += weight * (min(step.seconds, _MOST_TIMES * seconds) - seconds)
        self.others[key] = seconds, count + 1
        saved = step.gained * self.plain - max(0.0, seconds - self.plain)
        reading = 0.0
        if step.looked:
            self.look = moved(self.look or step.looked, step.looked)
            saved -= self.look
        if step.network and step.reads:
            reading = max(0.0, step.network - self.network)  # it takes longer for a long prompt: no average
            saved -= step.network - reading
        elif step.network:
            self.network = moved(self.network or step.network, step.network)
            saved -= self.network
        self.add(self.share + saved / self.plain, reading / self.plain)


class DraftAccount:
    """Whether to look for drafts.

    Args:
        one_graph: whether a step in which a look found nothing takes as long as a plain one, without the look. Not so
            on a GPU, where a look keeps the next step from starting while this one runs.
    """

    def __init__(self, *, one_graph: bool) -> None:
        self._one_graph = one_graph
        self._steps: dict[Kind, _Steps] = {}

    def looks(self, kind: Kind, *, goes_on: bool) -> bool:
        """Whether the next step, of this kind, looks for drafts or has a network make some.

        ``goes_on``: whether that network has drafted behind one of the last two steps, so that it lacks little.
        """
        steps = self._steps.get(kind)
        if steps is None or steps.num_plain < _LEAST_KNOWN or steps.balance <= 0.0:
            return False
        if steps.with_reading <= 0.0:  # no plain step in between: the network would have to read again
            return goes_on
        return not steps.num_new

    def rest(self, kind: Kind) -> int:
        """How many plain steps of a kind are to follow unmeasured. What they enter is entered now.

        After these, one is measured before others rest, unless ``enter_rest`` says what they took.
        """
        steps = self._steps.get(kind)
        if steps is None or steps.num_plain < _LEAST_KNOWN or steps.num_due:
            return 0
        steps.with_reading = max(_LEAST, steps.with_reading)
        count = min(MOST_RESTED, int(-steps.left / steps.share))
        if count <= 0:
            return 0
        steps.num_before, steps.num_due = SETTLED, 1
        steps.add(steps.share * count)
        return count

    def enter_rest(self, kind: Kind, seconds: float) -> None:
        """The steps that ``rest`` has entered are over, and nothing came between. ``seconds``: of one, on average.

        To measure a step changes what it takes: its code is in no cache. This does not.
        """
        steps = self._steps.get(kind)
        if steps is not None and seconds > 0.0:
            bounded = min(max(seconds, steps.plain / _MOST_TIMES), _MOST_TIMES * steps.plain)
            steps.plain += _WEIGHT_OF_REST * (bounded - steps.plain)
            steps.num_plain, steps.age, steps.num_due = steps.num_plain + 1, 0, 0

    def end_rest(self, kind: Kind, count: int) -> None:
        """Of the steps that ``rest`` has entered, ``count`` are not to rest after all."""
        steps = self._steps[kind]
        # Not by ``add``: where a rounding error left the account just above 0, no try has emptied it.
        steps.balance -= steps.share * count
        steps.with_reading -= steps.share * count

    def enter(self, step: DoneStep) -> None:
        """A step is over. One of no time, by a clock that does not tell such short ones, says nothing."""
        steps = self._steps.get(step.kind)
        if not step.seconds > 0.0:
            return
        if step.is_plain:
            if steps is None:
                steps = self._steps[step.kind] = _Steps(step.seconds)
            steps.enter_plain(step.seconds)
        elif steps is not None:
            steps.enter(step)
            if step.looked and not self._one_graph:
                steps.num_before = 0  # the next one did not start while this one ran
            if steps.age >= _STALE and self._one_graph and steps.num_before > SETTLED:
                steps.plain, steps.age, steps.num_new = moved(steps.plain, step.seconds), _STALE, 0

    def enter_reading(self, kind: Kind, seconds: float) -> None:
        """A network took ``seconds`` behind a step that computes prompts. ``kind``: of the decode steps that follow."""
        steps = self._steps.get(kind)
        if steps is not None:
            steps.add(0.0, seconds / steps.plain)
