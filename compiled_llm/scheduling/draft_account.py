"""DraftAccount: what drafts have saved and lost, and so whether more are looked for. Plain Python.

Its unit is a *plain* step, in which nothing is looked for or drafted. It lasts from its beginning to that of the next
one, which is what a user waits for. Each other step enters what it saved or lost: one with drafts, with a look for
some, or behind which a network of the worker drafts. Each step of any kind enters a small share of a plain one besides:
that much may be lost, and half of it, at last a quarter, where the account was emptied again and again without having
been full. While the account is empty, nothing is looked for. Steps of about as many requests have an account of their
own, greedy ones and others: what pays for one request need not for many.

Steps in which nothing is looked for *rest*: none of them is measured by itself, since that takes time, too, and makes a
step seem longer than it is: its code is in no cache, and that of a step behind drafts or a prompt is in none, either.
What they took is known of all together, as soon as they are over. Before anything is looked for for the first time,
some rest and are measured so. While every step has drafts, nobody sees what plain ones take by now, and a machine
becomes slower and faster; so some rest now and then, ever less often.
"""

import dataclasses
import math
from typing import NamedTuple

from compiled_llm.scheduling.costs import left_of, moved
from compiled_llm.scheduling.decode_costs import Key

SHARE, LEAST_SHARE = 0.0075, 0.001875  # of all steps, that may be lost; at least, where the last tries paid nothing
MOST = 8.0  # steps that an account has at most, and at the start
_DOUBTFUL = 2.0  # at the start, where the last tries for about as many requests paid nothing
_LEAST = -32.0  # it is never emptier than that while steps rest; the least shares of 17,100 make up for it
MOST_RESTED = 64  # steps in a row
MEASURED, _MEASURED_AGAIN = 8, 16  # of them, before anything is looked for; and once drafts have emptied an account
_LEAST_MEASURED = 4  # of them, to be measured together
# So many steps without drafts come before plain ones that are measured. Behind drafts and prompts the first few take
# longer: what they read is no longer in the caches, and a step of another size fills all buffers. Behind those of an
# EAGLE-3 head on a CPU they took 1.46, 1.22, 1.12, 1.06 and 1.03 times as long, and the first behind a prompt twice.
SETTLED = 4
# Steps that are not plain, until plain ones are measured again: at first, and at most.
_FIRST_INTERVAL, _LAST_INTERVAL = 64, 1024
# Where requests come and go so often that steps do not settle, other plain ones count as this share of one measured.
_UNMEASURED = 0.25
# A step moves the average of those like it by this share, at first by more, and counts as so many times that at most.
_LEAST_WEIGHT, _MOST_TIMES = 0.1, 2.0
_WEIGHT_AT_FIRST = 0.3  # the share by which a plain step moves their average, until some were measured together
# What was known of plain steps counts as so many of those that are measured together, where these are faster and where
# they are slower. With a pause of the machine among few of them, drafts would seem to pay: ``_TWICE`` of them may be
# twice as slow as was known, fewer in proportion. And where they seem much slower, others are measured soon.
_KNOWN, _TWICE, _MUCH_MORE = (2, 8), 32, 1.1

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
        is_first: whether the step before it computed prompts.
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
    is_first: bool = False

    @property
    def is_plain(self) -> bool:
        return not (self.has_drafts or self.looked or self.network)


@dataclasses.dataclass(slots=True)
class _Steps:
    """The account of steps of one kind.

    Attributes:
        plain: seconds of a plain step; an average, as all seconds here. What is entered of a step is the average of
            those like it, so that a single slow one does not matter much.
        is_known: whether some were measured together.
        due: plain steps that are to be measured together before more is looked for, or to pass by in larger number.
        num_before: the last steps behind which nothing made the next one slower: drafts, a prompt, on a GPU a look.
        age: steps that were not plain, since plain ones were measured or are due.
        interval: at which ``age`` some are due.
        share: of a plain step, that each step enters.
        was_full: whether the account was, since it was empty.
        balance: plain steps that may be lost. What a network takes to compute tokens that it lacks, such as prompts, is
            not entered: one that has read a prompt goes on as long as its drafts save more than they take.
        with_reading: the same, with what that takes: a network reads other prompts only if this is above 0.
        others: seconds of other steps and how many there were, by what is alike and whether they have drafts. The first
            may be slow for no reason that stays, so the average begins with a plain step. While steps rest, what was
            known counts for less and less.
        look, network: seconds of a look, and of a network that lacked nothing.
        num_networks: of how many that is, as those of ``others``.
    """

    plain: float
    is_known: bool = False
    due: float = MEASURED
    num_before: int = 0
    age: int = 0
    interval: int = _FIRST_INTERVAL
    share: float = SHARE
    was_full: bool = True
    balance: float = MOST
    with_reading: float = MOST
    others: dict[tuple[Key, bool], tuple[float, float]] = dataclasses.field(default_factory=dict)
    look: float = 0.0
    network: float = 0.0
    num_networks: float = 0.0

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
            if self.balance <= 0.0:  # drafts are a loss, or plain steps slower than was known
                self.due = _MEASURED_AGAIN

    def enter_plain(self, seconds: float) -> None:
        if not self.is_known:
            if _MOST_TIMES * seconds < self.plain:
                self.plain = seconds  # those before were slow for no reason that stays
            elif self.num_before >= SETTLED:
                self.plain += _WEIGHT_AT_FIRST * (min(seconds, _MOST_TIMES * self.plain) - self.plain)
        self.num_before += 1
        self.pass_by(1)
        self.add(self.share)

    def enter_together(self, count: int, seconds: float) -> None:
        """So many plain steps in a row took ``seconds`` on average."""
        if self.num_before < SETTLED:
            self.num_before += count
            if not self.is_known:  # and may never be, where requests come all the time
                self.plain = min(self.plain, seconds)
        elif count >= _LEAST_MEASURED:
            most = self.plain * min(_MOST_TIMES, 1.0 + count / _TWICE)
            if self.is_known:
                if seconds > _MUCH_MORE * self.plain:
                    self.interval = _FIRST_INTERVAL
                known = _KNOWN[seconds > self.plain]
                self.plain += count / (count + known) * (min(max(seconds, self.plain / _MOST_TIMES), most) - self.plain)
            else:
                self.plain = min(seconds, most)
            self.is_known, self.age, self.due = True, 0, max(0.0, self.due - count)
            return
        self.pass_by(count)

    def grow_old(self, count: int) -> None:
        """So many plain steps have rested."""
        self.others = {key: (seconds, left_of(number, count)) for key, (seconds, number) in self.others.items()}
        self.num_networks = left_of(self.num_networks, count)

    def pass_by(self, count: int) -> None:
        """So many plain steps were not measured."""
        self.due = max(0.0, self.due - _UNMEASURED * count)

    def enter(self, step: DoneStep) -> None:
        """A step that is not plain."""
        self.age += 1
        if self.age >= self.interval and not self.due:
            self.age, self.due, self.interval = 0, MEASURED, min(_LAST_INTERVAL, 2 * self.interval)
        self.num_before = 0 if step.has_drafts or step.network else self.num_before + 1
        key = step.alike, step.has_drafts
        seconds, count = self.others.get(key, (self.plain, 1))
        # In the place of the first one a plain step would have taken longer, too. But it may be the only one there is.
        if not step.is_first or key not in self.others:
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
            known = self.network or step.network
            weight = max(_LEAST_WEIGHT, 1.0 / (self.num_networks + 1))
            self.network = known + weight * (min(step.network, _MOST_TIMES * known) - known)
            self.num_networks += 1
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
        if steps is None or steps.balance <= 0.0:
            return False
        if steps.with_reading <= 0.0:  # no plain step in between: the network would have to read again
            return goes_on
        return not steps.due

    def network(self, kind: Kind) -> float:
        """Seconds in which a network of the worker drafts behind a step of this kind; 0: none did yet."""
        steps = self._steps.get(kind)
        return steps.network if steps is not None else 0.0

    def gain(self, kind: Kind, saved: float) -> None:
        """Earlier steps of this kind turn out to have saved so many plain steps more than was entered of them."""
        steps = self._steps.get(kind)
        if steps is not None:
            steps.add(saved)

    def rest(self, kind: Kind) -> int:
        """How many plain steps of a kind are to rest now. What they enter is entered at once."""
        steps = self._steps.get(kind)
        if steps is None:
            return 0
        steps.with_reading = max(_LEAST, steps.with_reading)
        due = max(_LEAST_MEASURED, math.ceil(steps.due)) if steps.due else 0
        count = max(due, min(MOST_RESTED, int(-steps.left / steps.share)))
        if count <= 0:
            return 0
        if steps.num_before < SETTLED:
            count = SETTLED - steps.num_before
        steps.add(steps.share * count)
        return count

    def enter_rest(self, kind: Kind, count: int, seconds: float) -> None:
        """``count`` steps that ``rest`` has entered are over, and nothing came between.

        ``seconds``: of one, on average.
        """
        steps = self._steps.get(kind)
        if steps is not None:
            steps.grow_old(count)
            if seconds > 0.0:
                steps.enter_together(count, seconds)

    def pass_by(self, kind: Kind, count: int) -> None:
        """``count`` steps that ``rest`` has entered are over, and what they took is not known."""
        if (steps := self._steps.get(kind)) is not None:
            steps.grow_old(count)
            steps.pass_by(count)

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
                start = self._start(step.kind)
                steps = self._steps[step.kind] = _Steps(step.seconds, balance=start, with_reading=start)
            steps.enter_plain(step.seconds)
        elif steps is not None:
            steps.enter(step)
            if step.looked and not self._one_graph:
                steps.num_before = 0  # the next one did not start while this one ran

    def unsettle(self) -> None:
        """A step has computed prompts: the next plain ones take longer."""
        for steps in self._steps.values():
            steps.num_before = 0

    def _start(self, kind: Kind) -> float:
        """Steps that a new account has: few, where those of about twice or half as many requests have lost theirs."""
        beside = [self._steps.get((size, kind[1])) for size in (2 * kind[0], kind[0] // 2)]
        return _DOUBTFUL if any(steps is not None and steps.share < SHARE for steps in beside) else MOST

    def enter_reading(self, kind: Kind, seconds: float) -> None:
        """A network took ``seconds`` behind a step that computes prompts. ``kind``: of the decode steps that follow."""
        steps = self._steps.get(kind)
        if steps is not None:
            steps.add(0.0, seconds / steps.plain)
