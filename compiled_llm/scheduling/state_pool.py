"""StatePool: slots for the states of layers that compress what they have seen. Plain Python.

A state belongs to a number of tokens: that of a request's first 100 is of no use to one that shares 99 of them, and a
state that has gone on cannot go back. So steps write states to slots of their own where somebody may still need the
ones that they read: another request, or a snapshot, which is a state at the end of a full block that can be found under
the block's digest. Nothing is ever copied for that.
"""

import dataclasses
from collections import Counter, OrderedDict


class StatePool:
    """Slots ``1..num_slots``; slot 0 is the sink. Plain counterpart of ``BlockPool``, of one slot at a time.

    Used: as many requests need a slot as its reference count says. Cached: none does, but it is a snapshot. Empty:
    neither. ``num_free`` counts the last two: what ``allocate`` can give.

    Attributes:
        num_evictions: snapshots whose slot was given away.
        peak_used: most slots in use at once.
        swapped_out: (slot, host slot) pairs that the next step copies.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evictions = self.peak_used = 0
        self.swapped_out: list[tuple[int, int]] = []
        self._empty = list(range(num_slots, 0, -1))
        self._references = [0] * (num_slots + 1)
        self._slot_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_slots - self.num_free

    def allocate(self) -> int | None:
        """A slot to write to, for one request. None: all are in use."""
        if not self._empty:
            if not self._cached:
                return None
            slot, _ = self._cached.popitem(last=False)
            del self._slot_of[self._digest_of.pop(slot)]
            self._empty.append(slot)
            self.num_evictions += 1
        slot = self._empty.pop()
        self._references[slot] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return slot

    def share(self, slot: int) -> None:
        """One more request needs ``slot``: a used one, or a snapshot."""
        if self._references[slot] == 0:
            del self._cached[slot]  # a KeyError: the slot holds nothing
            self.peak_used = max(self.peak_used, self.num_used)
        self._references[slot] += 1

    def free(self, slot: int) -> None:
        """A request needs ``slot`` no more."""
        self._references[slot] -= 1
        assert self._references[slot] >= 0, f"slot {slot} is not in use"
        if self._references[slot] == 0:
            if slot in self._digest_of:
                self._cached[slot] = None
            else:
                self._empty.append(slot)

    def num_references(self, slot: int) -> int:
        return self._references[slot]

    def empty_slots(self) -> set[int]:
        """Those that hold nothing."""
        return set(self._empty)

    # -- Snapshots

    def lookup(self, digest: bytes) -> int | None:
        """The snapshot at the end of the block with this digest."""
        return self._slot_of.get(digest)

    def digests(self) -> list[bytes]:
        """Of all snapshots."""
        return list(self._slot_of)

    def is_snapshot(self, slot: int) -> bool:
        return slot in self._digest_of

    def publish(self, slot: int, digest: bytes) -> None:
        """Make a used slot the snapshot of ``digest``, unless there is one."""
        assert self._references[slot] > 0, f"slot {slot} is published but not in use"
        if digest not in self._slot_of and slot not in self._digest_of:
            self._slot_of[digest], self._digest_of[slot] = slot, digest

    def forget(self, digest: bytes) -> None:
        """The snapshot of ``digest``, if there is one, is none any more. Requests that need its slot still have it."""
        slot = self._slot_of.pop(digest, None)
        if slot is not None:
            del self._digest_of[slot]
            if slot in self._cached:
                del self._cached[slot]
                self._empty.append(slot)

    def withdraw(self, slot: int) -> None:
        """``slot``, which one request needs, is no snapshot any more: it is about to be written to."""
        del self._slot_of[self._digest_of.pop(slot)]

    def forget_all(self) -> None:
        for digest in list(self._slot_of):
            self.forget(digest)

    def check_invariants(self, needed: Counter[int]) -> None:
        """Assert that the pool agrees with ``needed``: slot -> requests that need it."""
        assert not needed[0], "the sink was handed out"
        counts = [needed[slot] for slot in range(self.num_slots + 1)]
        assert counts == self._references, "reference counts are not the numbers of requests that need the slots"
        assert sum(map(bool, counts)) + self.num_free == self.num_slots, "slots are lost, or free twice"
        used = {slot for slot, count in enumerate(counts) if count}
        assert not used & {*self._empty, *self._cached}, "a slot is both used and free"
        assert not set(self._empty) & self._cached.keys(), "a slot is both empty and cached"
        assert {slot: digest for digest, slot in self._slot_of.items()} == self._digest_of
        assert self._cached.keys() <= self._digest_of.keys(), "a cached slot cannot be found"
        assert not set(self._empty) & self._digest_of.keys(), "an empty slot can be found"


@dataclasses.dataclass(slots=True)
class HeldState:
    """The slots that a request needs.

    Attributes:
        slot: its state after ``num_computed_tokens``; 0: nothing is computed.
        target: the slot that the step which is being scheduled writes the state to; 0 between steps.
        drafted: while a step verifies drafts: its state after each token of that step.
        snapshots: (tokens, slot) that steps in flight write, to be published with their blocks.
        wanted: where the next snapshot is of use to others that share the prefix, in tokens; 0: nowhere.
        before_last: its state before the last token of its prompt, for forks that compute that token themselves; 0: it
            is not kept.
        own_snapshot: the digest of the snapshot of its own output; b"": there is none.
    """

    slot: int = 0
    target: int = 0
    drafted: list[int] = dataclasses.field(default_factory=list)
    snapshots: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    wanted: int = 0
    before_last: int = 0
    own_snapshot: bytes = b""

    def slots(self) -> list[int]:
        """All that it needs, some twice."""
        targets = [self.target] if self.target and self.target != self.slot else []
        held = self.slot, self.before_last, *targets, *self.drafted, *(slot for _, slot in self.snapshots)
        return [slot for slot in held if slot]
