"""States of layers that compress what they have seen: slots for them, and which slots requests need. Plain Python.

A state belongs to a number of tokens: that of a request's first 100 is of no use to one that shares 99 of them, and a
state that has gone on cannot go back. So steps write states to slots of their own where somebody may still need the
ones that they read: another request, or a snapshot, which is a state at the end of a full block that can be found under
the block's digest. Nothing is ever copied for that.

A step reads each request's state from one slot and writes it to one: to the slot that it read, if nobody else needs
what is there. A request that is about to be forked also keeps the state before the last token of its prompt, which its
forks compute themselves. Besides, a step writes snapshots at the ends of full blocks: where a prompt's last full block
ends, where another request waits for one or found its prefix computed but no snapshot, and where a decode passes such
an end. A request keeps no more than one snapshot of its own output; those of prompts stay until their slots are needed.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from compiled_llm.scheduling.output_builder import SchedulerOutputBuilder
from compiled_llm.scheduling.request import HeldState, Request, Status

MOST_SNAPSHOTS = 2  # states that a step writes for a request besides its own


class StatePool:
    """Slots ``1..num_slots``; slot 0 is the sink. Plain counterpart of ``BlockPool``, of one slot at a time.

    Used: as many requests need a slot as its reference count says. Cached: none does, but it is a snapshot. Empty:
    neither. ``num_free`` counts the last two: what ``allocate`` can give.

    Attributes:
        num_evictions: snapshots whose slot was given away.
        peak_used: most slots in use at once.
        swapped_out: (slot, host slot) pairs that the next step copies.
        on_evict: called with the slot and the digest of a snapshot before its slot is given away.
    """

    on_evict: Callable[[int, bytes], None] | None = None

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
            self.withdraw(slot)
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
        """The slots that hold nothing."""
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

    def evict(self, digest: bytes) -> None:
        """The block of ``digest`` is evicted, and so is its snapshot, if there is one."""
        slot = self._slot_of.get(digest)
        if slot is not None and self.on_evict is not None:
            self.on_evict(slot, digest)
        self.forget(digest)

    def withdraw(self, slot: int) -> None:
        """``slot`` is no snapshot any more: it is about to be written to."""
        digest = self._digest_of.pop(slot)
        del self._slot_of[digest]
        if self.on_evict is not None:
            self.on_evict(slot, digest)

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


class StateSlots:
    """Gives requests slots of a ``StatePool``, as ``RunningSet`` gives them blocks; nothing where that has no slots.

    What it changes belongs to the pools and the requests.

    Attributes:
        on_publish: told of each new snapshot: its slot, its digest, and whether it is the last one of a prompt or an
            output, which is of use for longest.
    """

    on_publish: Callable[[int, bytes, bool], None] | None = None

    def __init__(
        self, pool: StatePool, block_size: int, keeps_snapshots: bool, host_pool: StatePool | None = None
    ) -> None:
        """``host_pool``: slots in host memory, for states of preempted requests."""
        self.pool, self.host_pool, self.block_size = pool, host_pool or StatePool(0), block_size
        self.keeps_snapshots = keeps_snapshots
        self.are_used = pool.num_slots > 0

    # -- Admission

    def longest_hit(self, digests: Sequence[bytes], count: int) -> int:
        """Of the first ``count`` blocks of a request, the most that end with a snapshot."""
        if not self.are_used:
            return count
        return next((end for end in range(count, 0, -1) if self.pool.lookup(digests[end - 1]) is not None), 0)

    def has_room(self, digest: bytes | None, is_below: bool = False) -> bool:
        """Whether a request can start: from the snapshot of ``digest``, from one in a lower tier, or as it is."""
        slot = None if digest is None else self.pool.lookup(digest)
        taken = is_below or (slot is not None and self.pool.num_references(slot) == 0)
        return not self.are_used or self.pool.num_free >= 1 + taken

    def enter(
        self,
        request: Request,
        digest: bytes | None,
        host_slot: int,
        output: SchedulerOutputBuilder,
        num_tokens: int | None = None,
    ) -> None:
        """A request starts to run: from the state in ``host_slot``, from the snapshot of ``digest``, or from nothing.

        ``num_tokens``: after which the state in ``host_slot`` is a snapshot; None: it is the request's own.
        """
        if not self.are_used:
            return
        held = request.state
        if host_slot:
            slot = self.pool.allocate()
            assert slot is not None
            output.states.swapped_in.append((slot, host_slot))
            held.slot = slot
            if num_tokens is not None:  # others find it when the step has ended
                self.pool.share(slot)
                held.snapshots.append((num_tokens, slot))
        elif digest is not None:
            slot = self.pool.lookup(digest)
            assert slot is not None
            self.pool.share(slot)
            held.slot = slot
        self.free_host(request)

    # -- A step

    def make_writable(self, request: Request) -> bool:
        """A slot for the state that a step leaves. False: there is none; the request can run in a later step."""
        held = request.state
        if held.target or not self.are_used:
            return True
        slot, pool = held.slot, self.pool
        if slot and pool.num_references(slot) == 1 and not pool.is_snapshot(slot):
            held.target = slot
            return True
        new = pool.allocate()
        if new is not None:
            held.target = new
            return True
        own = [entry for entry in held.snapshots if entry[1] == slot]
        if not slot or pool.num_references(slot) != 1 + len(own):
            return False
        if pool.is_snapshot(slot):  # rather lost than in the way
            pool.withdraw(slot)
        for entry in own:
            held.snapshots.remove(entry)
            pool.free(slot)
        held.target = slot
        return True

    def make_writable_for_drafts(self, request: Request, count: int, reserve: int) -> int:
        """Slots for the states after each of up to ``count`` drafts. Returns for how many of them there are some."""
        if not self.are_used:
            return count
        held = request.state
        while len(held.drafted) < count and self.pool.num_free > reserve:
            slot = self.pool.allocate()
            assert slot is not None
            held.drafted.append(slot)
        return len(held.drafted)

    def send(
        self,
        requests: Sequence[Request],
        awaited: Iterable[Sequence[int]],
        reserve: int,
        output: SchedulerOutputBuilder,
    ) -> None:
        """Tell the worker where the states of a step's requests come from and go to.

        Args:
            requests: those of the step, in the order of its columns. Each is ``make_writable``.
            awaited: for each the ends of blocks, in tokens, for which others are held back.
            reserve: slots that snapshots leave free.
        """
        if not self.are_used:
            return
        left = []  # read in this step, so nothing else of it may be written there
        columns = output.num_computed_tokens, output.num_scheduled_tokens
        for request, ends, start, count in zip(requests, awaited, *columns, strict=True):
            held = request.state
            target, held.target = held.target, 0
            assert target, "a step has nowhere to leave a state"
            writes = [(target, 1), *((slot, 2 + place) for place, slot in enumerate(held.drafted))]
            if not held.drafted:
                writes = [(target, count)]
                writes += self._before_last(request, start, start + count, reserve)
                if self.keeps_snapshots:
                    most = 1 + MOST_SNAPSHOTS - len(writes)
                    writes += self._snapshots(request, start, start + count, target, ends, reserve, most)
            output.states.reads.append(held.slot)
            output.states.writes.append(tuple(writes))
            if held.slot and held.slot != target:
                left.append(held.slot)
            held.slot = target
            if held.drafted:
                held.drafted.insert(0, target)
                self.pool.share(target)
        for slot in left:
            self.pool.free(slot)

    def _before_last(self, request: Request, start: int, end: int, reserve: int) -> list[tuple[int, int]]:
        """(slot, tokens of the step) of the state before the last token of a prompt, if it is to be kept for forks."""
        last = len(request.prompt_token_ids) - 1
        is_snapshot = self.keeps_snapshots and last % self.block_size == 0
        if not request.keeps_blocks or is_snapshot or not start < last < end or self.pool.num_free <= reserve:
            return []
        slot = self.pool.allocate()
        assert slot is not None
        assert not request.state.before_last
        request.state.before_last = slot
        return [(slot, last - start)]

    def _snapshots(
        self, request: Request, start: int, end: int, target: int, awaited: Sequence[int], reserve: int, most: int
    ) -> list[tuple[int, int]]:
        """(slot, tokens of the step) of up to ``most`` snapshots that a step writes besides the state itself."""
        held, size = request.state, self.block_size
        writes: list[tuple[int, int]] = []
        last = end - end % size
        ends = [last]
        if last == end == len(request.prompt_token_ids):  # one with the same prompt computes the last token itself
            ends.append(end - size)
        ends += sorted({*awaited, held.wanted} - {*ends}, reverse=True)
        for tokens in ends:
            if not start < tokens <= end:
                continue
            if tokens == end:
                self.pool.share(target)
                held.snapshots.append((tokens, target))
            elif self.pool.num_free > reserve and len(writes) < most:
                slot = self.pool.allocate()
                assert slot is not None
                held.snapshots.append((tokens, slot))
                writes.append((slot, tokens - start))
        if held.wanted <= end:
            held.wanted = 0
        return writes

    # -- Results

    def publish(self, request: Request, digests: Sequence[bytes]) -> None:
        """The blocks of ``digests``, the first ones of a running request, can be found: and so can its snapshots."""
        held, later = request.state, []
        for tokens, slot in held.snapshots:
            index = tokens // self.block_size - 1
            if index >= len(digests):
                later.append((tokens, slot))
                continue
            self._publish(request, digests[index], slot, tokens)
            self.pool.free(slot)
        held.snapshots = later

    def _publish(self, request: Request, digest: bytes, slot: int, tokens: int) -> None:
        held, prompt_len = request.state, len(request.prompt_token_ids)
        self.pool.publish(slot, digest)
        if self.pool.lookup(digest) != slot:
            return
        if self.on_publish is not None:
            is_last = (prompt_len - 1) // self.block_size <= tokens // self.block_size <= prompt_len // self.block_size
            self.on_publish(slot, digest, is_last)
        if tokens > prompt_len:
            if held.own_snapshot:
                self.pool.forget(held.own_snapshot)
            held.own_snapshot = digest

    def accept(self, request: Request, num_accepted: int, start: int) -> None:
        """Of the tokens of a step that verified drafts, the first ``num_accepted`` count; ``start`` were before it.

        Its state is what the step left after the last token that counts. Ends of blocks among them become snapshots.
        """
        held = request.state
        if not held.drafted:
            return
        drafted, held.drafted = held.drafted, []
        first = held.slot
        held.slot = drafted[num_accepted - 1]
        self.pool.share(held.slot)
        if self.keeps_snapshots:
            for place, slot in enumerate(drafted[:num_accepted]):
                if (start + place + 1) % self.block_size == 0:
                    self.pool.share(slot)
                    held.snapshots.append((start + place + 1, slot))
        for slot in (first, *drafted):
            self.pool.free(slot)

    # -- Leaving

    def release(self, request: Request) -> None:
        """A request is about to lose its blocks, and so its state."""
        own = self.pool.lookup(request.state.own_snapshot)
        if self.on_publish is not None and own is not None:
            self.on_publish(own, request.state.own_snapshot, True)
        for slot in request.state.slots():
            self.pool.free(slot)
        request.state = HeldState()

    def can_swap_out(self) -> bool:
        """Whether there is a host slot for a state."""
        return not self.are_used or self.host_pool.num_free > 0

    def swap_out(self, request: Request) -> None:
        """The state of a request that is preempted is copied to a host slot, of which one is free."""
        if not self.are_used:
            return
        slot = self.host_pool.allocate()
        assert slot is not None
        request.host_slot = slot
        self.pool.swapped_out.append((request.state.slot, slot))

    def free_host(self, request: Request) -> None:
        """A request needs its state on the host no more."""
        if request.host_slot:
            self.host_pool.free(request.host_slot)
            request.host_slot = 0

    def forget_swap(self, request: Request) -> None:
        """A swapped-out request has ended."""
        self.pool.swapped_out = [pair for pair in self.pool.swapped_out if pair[1] != request.host_slot]
        self.free_host(request)

    def fork(self, parent: Request, child: Request, count: int) -> bool:
        """``child`` gets the state after ``count`` tokens. False: ``parent`` does not have that state."""
        if not self.are_used:
            return True
        held = parent.state
        slot = held.before_last if count == len(parent.prompt_token_ids) - 1 else 0
        if not slot:
            if held.drafted or held.target or not held.slot or count != parent.num_computed_tokens:
                return False
            slot = held.slot
        self.pool.share(slot)
        child.state = HeldState(slot)
        return True

    def end_forking(self, request: Request) -> None:
        """``request`` will not be forked any more."""
        held = request.state
        if held.before_last:
            self.pool.free(held.before_last)
            held.before_last = 0

    # -- Invariants

    def check_invariants(self, holders: Iterable[Request], waiting: Iterable[Request]) -> None:
        """Assert that the pools agree with the requests that have slots, and with those that have some on the host."""
        needed: Counter[int] = Counter()
        for request in holders:
            held = request.state
            needed.update(held.slots())
            if request.status is Status.RUNNING and self.are_used:
                assert bool(held.slot) == (request.num_computed_tokens > 0), "a state is missing"
                assert not held.target
        self.pool.check_invariants(needed)
        self.host_pool.check_invariants(Counter(request.host_slot for request in waiting if request.host_slot))
