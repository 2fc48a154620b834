"""A model of how programs of several GPUs exchange pieces (``triton_exchange.py``), with ranks in any order.

One channel: programs of other channels share nothing with it. A rank has a list of lists of things to do: all of a list
in any order, as the threads of a program do what lies between two barriers, then those of the next. A flag is on its
way until it lands, at any time; flags of a rank for the same rank land in their order, as writes to one address do.
Memory has in it whose piece it is in the place of numbers, so who reads the wrong one is seen.
"""

import copy
import dataclasses
import random
from collections.abc import Sequence
from typing import NamedTuple


class Action(NamedTuple):
    """Of a rank. ``kind``: "write" to its own memory, "read" from that of ``other``, "flag" to it, or "wait"."""

    kind: str
    place: tuple = ()  # in a rank's memory
    what: object = None  # that is written, or should be read; or the number of the meeting
    other: int = 0


@dataclasses.dataclass(frozen=True)
class Rules:
    """How pieces are exchanged. The defaults are those of the kernels; each other one is a fault."""

    slots: int = 2
    data_before_flag: bool = True
    waits: bool = True
    waits_for_all: bool = True  # and not for the next rank alone
    meetings_apart: bool = True  # the second one of a two-shot piece has a number of its own
    sums_behind: bool = True  # the piece, where nobody reads before that meeting


def program(rank: int, size: int, two_shots: Sequence[bool], rules: Rules) -> list[list[Action]]:
    """What ``rank`` does for pieces that are two-shot or not."""
    done: list[list[Action]] = []

    def meeting(number: int) -> list[list[Action]]:
        flags = [Action("flag", what=number, other=other) for other in range(size)]
        return [flags, [Action("wait", what=number)]] if rules.waits else [flags]

    for piece, is_two_shot in enumerate(two_shots, 1):
        slot = piece % rules.slots
        data = [Action("write", (slot, section), ("data", piece)) for section in range(size)]
        flags, *wait = meeting(2 * piece)
        done += [data, flags, *wait] if rules.data_before_flag else [flags, data, *wait]
        sections = [rank] if is_two_shot else range(size)
        done.append([Action("read", (slot, n), ("data", piece), other) for n in sections for other in range(size)])
        if is_two_shot:
            sums = (slot, "sums") if rules.sums_behind else (slot, 0)
            done.append([Action("write", sums, ("sum", piece))])
            done += meeting(2 * piece + rules.meetings_apart)
            done.append([Action("read", sums, ("sum", piece), other) for other in range(size)])
    return done


class Ranks:
    """Ranks on their way through their programs."""

    def __init__(self, size: int, two_shots: Sequence[bool], rules: Rules) -> None:
        self.rules, self.size = rules, size
        self.programs = [program(rank, size, two_shots, rules) for rank in range(size)]
        self.at = [0] * size
        self.left = [list(own[0]) for own in self.programs]  # of the list that a rank is at
        self.memory: list[dict[tuple, object]] = [{} for _ in range(size)]
        self.flags = [[0] * size for _ in range(size)]  # of a rank: what it has from each
        self.on_the_way: dict[tuple[int, int], list[int]] = {}  # (from, to) -> flags

    def choices(self) -> list[tuple]:
        """What may happen next."""
        of_ranks: list[tuple] = [
            (rank, number)
            for rank, left in enumerate(self.left)
            for number, action in enumerate(left)
            if action.kind != "wait" or self._have_come(rank, action.what)
        ]
        return of_ranks + [("lands", *way) for way, flags in self.on_the_way.items() if flags]

    def happen(self, choice: tuple) -> str:
        """What is wrong with it, or ""."""
        if choice[0] == "lands":
            _, sender, to = choice
            flag = self.on_the_way[sender, to].pop(0)
            self.flags[to][sender] = flag
            return ""
        rank, number = choice
        action = self.left[rank].pop(number)
        if not self.left[rank] and self.at[rank] + 1 < len(self.programs[rank]):
            self.at[rank] += 1
            self.left[rank] = list(self.programs[rank][self.at[rank]])
        if action.kind == "write":
            self.memory[rank][action.place] = action.what
        elif action.kind == "flag":
            self.on_the_way.setdefault((rank, action.other), []).append(action.what)
        elif action.kind == "read" and (found := self.memory[action.other].get(action.place)) != action.what:
            return f"rank {rank} reads {found} of rank {action.other}, not {action.what}"
        return ""

    def is_done(self) -> bool:
        return not any(self.left)

    def key(self) -> tuple:
        """What tells two states apart."""
        ways = tuple(sorted((way, tuple(flags)) for way, flags in self.on_the_way.items() if flags))
        memory = tuple(tuple(sorted(own.items(), key=str)) for own in self.memory)
        return tuple(self.at), tuple(map(tuple, self.left)), memory, tuple(map(tuple, self.flags)), ways

    def _have_come(self, rank: int, number: int) -> bool:
        others = range(self.size) if self.rules.waits_for_all else [(rank + 1) % self.size]
        return all(self.flags[rank][other] >= number for other in others)


def run_in_some_order(size: int, two_shots: Sequence[bool], rules: Rules, rng: random.Random) -> str:
    """The first thing that is wrong, or "". Some ranks, and some flags, are much slower than others."""
    ranks = Ranks(size, two_shots, rules)
    slowness = {("lands", a, b): rng.choice((1, 1, 30)) for a in range(size) for b in range(size)}
    of_ranks = [rng.choice((1, 1, 30)) for _ in range(size)]
    while choices := ranks.choices():
        weights = [1 / (slowness[choice] if choice[0] == "lands" else of_ranks[choice[0]]) for choice in choices]
        if wrong := ranks.happen(rng.choices(choices, weights)[0]):
            return wrong
    return "" if ranks.is_done() else "ranks wait for ever"


def run_in_every_order(size: int, two_shots: Sequence[bool], rules: Rules) -> tuple[int, str]:
    """How many states there are, and the first thing that is wrong, or ""."""
    first = Ranks(size, two_shots, rules)
    known, to_go = {first.key()}, [first]
    while to_go:
        ranks = to_go.pop()
        choices = ranks.choices()
        if not choices and not ranks.is_done():
            return len(known), "ranks wait for ever"
        for choice in choices:
            after = copy.copy(ranks)
            after.at, after.left = list(ranks.at), [list(left) for left in ranks.left]
            after.memory, after.flags = [dict(own) for own in ranks.memory], [list(own) for own in ranks.flags]
            after.on_the_way = {way: list(flags) for way, flags in ranks.on_the_way.items()}
            if wrong := after.happen(choice):
                return len(known), wrong
            if (key := after.key()) not in known:
                known.add(key)
                to_go.append(after)
    return len(known), ""
