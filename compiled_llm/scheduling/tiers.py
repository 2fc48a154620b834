"""KVTiers: blocks and states that left the device's prefix cache, in host memory and on disk. Plain Python.

A block that is evicted is copied to a row of host memory as the next step begins, before anything is written to it; a
request that finds it there gets it copied back as its first step begins. With a disk, each block that is published is
copied to the host soon after, and from there written to a file, so that a later engine finds it. A file is read into a
row of host memory by a thread of the worker while its request waits and others pass. Where reading is estimated to take
longer than computing, or does, the tokens are computed.

What moves is known by the digest of a block, which stands for all that its keys and values depend on. Rows that a copy
or a file in flight uses are pinned: they are neither given to another block nor counted as free until it has ended,
whatever becomes of the requests.

Where layers keep a state, a request goes on after a block only with the state at its end. Snapshots of states move as
blocks do, in rows of their own size and under names of their own, and are fetched together with the blocks.
"""

import itertools
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from compiled_llm.scheduling.block_pool import BlockPool
from compiled_llm.scheduling.costs import StepCosts
from compiled_llm.scheduling.host_blocks import Found, HostBlock, MoveCosts, Part, Step, TierCounts, Wait, state_name
from compiled_llm.scheduling.output_builder import SchedulerOutputBuilder
from compiled_llm.scheduling.request import BlockSource, Request
from compiled_llm.scheduling.scheduler_output import FileOutput
from compiled_llm.scheduling.worker import FileResult

_PEER_WAIT = 2.0  # seconds without a block from another engine, after which what is left is computed
_LATE = 4.0  # a file is late after so many times what the others took
_MOST_IDLE_WAIT = 0.02  # seconds that a step without requests waits for a file: new requests wait as long


class KVTiers:
    """The lower tiers of one ``BlockPool``, which tells of evictions.

    Args:
        rows: of host memory.
        on_disk: digests of the blocks that have a file; None: there is no disk.
        block_bytes: of a row.
        slots: for states in host memory.
        state_bytes: of one of them.

    Attributes:
        counts: what was moved, and why not.
        least_wait: seconds after which a file may be late.
        to_give: digests of blocks that other engines are to get as soon as they are published; None: all that are
            published go to the disk.
        on_taken: told of a request's source when it fetches no more from there.
        on_disk: digests of the blocks that are known to have a file.
    """

    least_wait = 0.25

    def __init__(
        self,
        pool: BlockPool,
        rows: Sequence[int],
        block_size: int,
        costs: StepCosts,
        on_disk: Iterable[bytes] | None,
        block_bytes: int = 1,
        slots: Sequence[int] = (),
        state_bytes: int = 1,
    ) -> None:
        self.pool, self.block_size = pool, block_size
        self.num_rows, self.num_slots, self.has_disk = len(rows), len(slots), on_disk is not None
        self.costs = MoveCosts(block_size, block_bytes, state_bytes, costs.swap_seconds)
        self.on_disk = set(on_disk or ())
        self.to_give: Counter[bytes] | None = None
        self.on_taken: Callable[[BlockSource], object] = lambda source: None
        self.counts = TierCounts()
        self._empty = {False: list(reversed(rows)), True: [-slot for slot in reversed(slots)]}  # of blocks, of states
        self._rows = frozenset(itertools.chain(*self._empty.values()))
        self._blocks: OrderedDict[bytes, HostBlock] = OrderedDict()  # least recently used first
        self._dropped: set[HostBlock] = set()  # forgotten, but pinned
        # Of the next step: pairs as in ``SchedulerOutput``, and what it pins.
        self._out: list[tuple[int, int]] = []
        self._windows_out: list[list[tuple[int, int]]] = [[] for _ in pool.windows]
        self._states_out: list[tuple[int, int]] = []
        self._step, self._steps = Step(), deque[Step]()
        self._unstored: dict[bytes, int] = {}  # published blocks that are still to be copied to the host
        self._unstored_states: dict[bytes, int] = {}  # by the digest of the block; as those
        self._unwritten: dict[bytes, HostBlock] = {}
        self._writing: dict[bytes, HostBlock] = {}
        self._reading: dict[bytes, HostBlock] = {}
        self._to_read: list[tuple[bytes, int, BlockSource | None]] = []
        self._waits: dict[Request, Wait] = {}
        self._last_read = 0.0  # when a file was read last
        self._fetched: dict[Request, Wait] = {}  # those that need not wait any more, until they are admitted
        self._resets_files = False
        if self.num_rows:
            pool.on_evict = self.store
            pool.states.on_evict = self.store_state
            for window in pool.windows:
                window.on_evict = self._store_evicted

    @property
    def num_used(self) -> int:
        """Rows that hold a block, or are about to."""
        return self.num_rows - len(self._empty[False])

    def names(self, digests: list[bytes]) -> list[bytes]:
        """Of all that another engine is to get with the blocks of these digests."""
        return digests + [state_name(digest) for digest in digests[-1:] if self.pool.states.num_slots]

    # -- Downwards

    def store(self, block: int, digest: bytes) -> None:
        """``block``, published under ``digest``, is about to be given away: the next step copies it to the host."""
        self._unstored.pop(digest, None)
        if not self._store(block, digest, makes_room=True):
            self.counts.num_stores_without_room += 1

    def publish(self, block: int, digest: bytes) -> None:
        """``block`` can be found from now on: with a disk, it is to get there."""
        wanted = self.has_disk if self.to_give is None else self.to_give[digest] > 0
        if wanted and digest not in self._blocks and digest not in self.on_disk:
            self._unstored[digest] = block

    def store_state(self, slot: int, digest: bytes) -> None:
        """The snapshot in ``slot``, of the block of ``digest``, is about to be given away: as ``store``."""
        self._unstored_states.pop(digest, None)
        if not self._store_state(slot, digest, makes_room=True):
            self.counts.num_stores_without_room += 1

    def publish_state(self, slot: int, digest: bytes, is_last: bool) -> None:
        """A snapshot can be found from now on: with a disk, it is to get there, if ``is_last`` of its request."""
        name = state_name(digest)
        wanted = self.has_disk and is_last if self.to_give is None else self.to_give[name] > 0
        if wanted and name not in self._blocks and name not in self.on_disk:
            self._unstored_states[digest] = slot

    def give(self, digests: Sequence[bytes]) -> int:
        """Blocks of these digests are to be given to other engines. Returns how many are on their way."""
        num_left = sum(self._give(one, one, self.pool.lookup(one), self._unstored) for one in digests)
        for last in digests[-1:]:
            num_left += self._give(state_name(last), last, self.pool.states.lookup(last), self._unstored_states)
        return num_left

    def _give(self, name: bytes, digest: bytes, place: int | None, unstored: dict[bytes, int]) -> bool:
        """Whether a block or a state is on its way to other engines; ``place``: on the device."""
        if name in self.on_disk:
            return False
        held = self._blocks.get(name)
        if held is not None and held.is_there:
            if name not in self._writing and not any(held in step.stored for step in (*self._steps, self._step)):
                self._unwritten[name] = held
            return True
        if place is not None:
            unstored[digest] = place
        return place is not None

    def _store_evicted(self, block: int) -> None:
        """A window is about to give the place of ``block`` away."""
        digest = self.pool.digest(block)
        if digest is not None:
            self._store(block, digest, makes_room=True)

    def _store(self, block: int, digest: bytes, *, makes_room: bool) -> bool:
        """False: there is no row for it, or none but that of a block which is not written yet: ``makes_room``."""
        windows = frozenset(number for number, window in enumerate(self.pool.windows) if window.has(block))
        held = self._blocks.get(digest)
        if held is None:
            row = self._take_row(makes_room=makes_room)
            if row is None:
                return False
            held = self._blocks[digest] = HostBlock(digest, row)
            self._out.append((block, row))
            self.counts.host_stored_bytes += self.costs.num_bytes(held)
        elif held.pins or windows <= held.windows:
            self._blocks.move_to_end(digest)
            return True
        for number in windows - held.windows:
            self._windows_out[number].append((self.pool.windows[number].place(block), held.row))
        held.windows |= windows
        self._blocks.move_to_end(digest)
        self._pin_for_step(held)
        self._step.stored.append(held)
        return True

    def _store_state(self, slot: int, digest: bytes, *, makes_room: bool) -> bool:
        """As ``_store``."""
        name = state_name(digest)
        if name not in self._blocks:
            row = self._take_row(makes_room=makes_room, is_state=True)
            if row is None:
                return False
            held = self._blocks[name] = HostBlock(name, row)
            self._states_out.append((slot, -row))
            self.counts.host_stored_bytes += self.costs.num_bytes(held)
            self._pin_for_step(held)
            self._step.stored.append(held)
        self._blocks.move_to_end(name)
        return True

    def _take_row(self, *, makes_room: bool = True, is_state: bool = False) -> int | None:
        """A row to write to: an empty one, or that of the least recently used block, rather of one that has a file."""
        empty = self._empty[is_state]
        if empty:
            return empty.pop()
        free = (held for held in self._blocks.values() if not held.pins and held.is_state is is_state)
        first = next(free, None)
        if first is None:
            return None
        if first.digest in self._unwritten:
            first = next((held for held in free if held.digest not in self._unwritten), first if makes_room else None)
            if first is None:
                return None
        self._forget(first)
        self.counts.num_host_evictions += 1
        return empty.pop()

    def _forget(self, held: HostBlock) -> None:
        """The row is free, at once or when its last pin is gone."""
        del self._blocks[held.digest]
        self._unwritten.pop(held.digest, None)
        if held.pins:
            self._dropped.add(held)
        else:
            self._empty[held.is_state].append(held.row)

    def _unpin(self, held: HostBlock) -> None:
        held.pins -= 1
        assert held.pins >= 0, "a row is not pinned"
        if not held.pins and held in self._dropped:
            self._dropped.remove(held)
            self._empty[held.is_state].append(held.row)

    def _pin_for_step(self, held: HostBlock) -> None:
        held.pins += 1
        self._step.pinned.append(held)

    # -- Upwards

    def find(self, request: Request, digests: Sequence[bytes]) -> list[HostBlock] | None:
        """Blocks in host memory that hold the next tokens of ``request``, after those found on the device.

        Args:
            digests: of these tokens.

        Returns:
            They are to be fetched by ``fetch``. None: ``request`` waits for files from now on; ``take_ready`` returns
            it.
        """
        return self._reach(request, self._chain(request, digests))

    def find_with_state(
        self, request: Request, digests: Sequence[bytes], on_device: list[int], usable: list[int]
    ) -> Found | None:
        """As ``find``, where layers keep a state: all that ``request`` can go on with, and the state after that.

        Args:
            digests: of its first tokens, as far as any may be found.
            on_device: blocks that hold the first of them.
            usable: the first of these, with a snapshot on the device at their end.
        """
        chain = self._chain(request, digests[len(on_device) :])
        for end in range(len(on_device) + len(chain), len(usable), -1):
            is_below = self.pool.states.lookup(digests[end - 1]) is None
            state = self._at(request, state_name(digests[end - 1])) if is_below else None
            if is_below and state is None:
                continue
            chain = chain[: max(0, end - len(on_device))]
            states = [] if state is None else [state]
            found = self._reach(request, chain + states, states, end - len(usable))
            if found is None:
                return None
            if len(found) < len(chain) + len(states):
                break
            return Found(on_device[:end], found[: len(chain)], found[-1] if is_below else None)
        return Found(usable)

    def _chain(self, request: Request, digests: Sequence[bytes]) -> list[Part]:
        """The first of these blocks: in host memory, or digests of those that may be read."""
        found = (self._at(request, digest) for digest in digests)
        return [part for part in itertools.takewhile(bool, found) if part]

    def _at(self, request: Request, name: bytes) -> Part | None:
        """A block or state in host memory, or its name where it may be read, if ``request`` has not waited for it."""
        held = self._blocks.get(name)
        may_be_there = name in self.on_disk or request.source is not None
        if (held is None and not may_be_there) or (request in self._fetched and not (held and held.is_there)):
            return None
        return held or name

    def _reach(
        self, request: Request, chain: list[Part], states: Sequence[Part] = (), num_blocks: int = 0
    ) -> list[HostBlock] | None:
        """Those of ``chain`` that are in host memory, if fetching them pays. None: ``request`` waits for others.

        Args:
            states: those of them that are no blocks.
            num_blocks: that need not be computed if all are fetched, and fewer are of no use; 0: as many as are.
        """

        def cost(those: Sequence[Part]) -> float:
            return sum(self.costs.of(one in states) for one in those)

        away = [one for one in chain if isinstance(one, bytes) or not one.is_there]
        seconds = self.costs.read_seconds * (cost(away) + len(self._reading))
        if away and (request.source or self.costs.pays(seconds, num_blocks or len(away))):
            if self._wait(request, chain, states, num_blocks):
                return None
        elif away:
            self.counts.num_fetches_dearer += len(away)
        found = list[HostBlock]()
        for one in chain:
            if isinstance(one, bytes) or not one.is_there:
                break
            found.append(one)
        if found and not (
            request.source or self.costs.pays(self.costs.copy_seconds * cost(found), num_blocks or len(found))
        ):
            self.counts.num_fetches_dearer += len(found)
            return []
        return found

    def fetch(self, request: Request, found: Sequence[HostBlock], state: HostBlock | None = None) -> None:
        """The next step copies these to the device. ``request``, which runs from now on, keeps no others pinned."""
        for held in [*([] if state is None else [state]), *reversed(found)]:
            num_tokens = 0 if held.is_state else self.block_size
            self.counts.host_loaded_bytes += self.costs.num_bytes(held)
            if held.source == "disk":
                self.counts.disk_hit_tokens += num_tokens
            elif held.source == "peer":
                self.counts.peer_hit_tokens += num_tokens
            else:
                self.counts.host_hit_tokens += num_tokens
            held.source = ""  # the next time it is found in host memory
            self._pin_for_step(held)
            self._blocks.move_to_end(held.digest)
        self.forget(request)

    def _wait(self, request: Request, chain: Sequence[Part], states: Sequence[Part] = (), num_blocks: int = 0) -> bool:
        """Let ``request`` wait until the blocks of ``chain`` are in host memory, as many as there is room for.

        False: there is no room for those that are not. Arguments as of ``_reach``.
        """
        blocks: list[HostBlock] = [held for held in chain if isinstance(held, HostBlock)]
        if num_blocks:  # all, or none
            free = Counter(held.is_state for held in self._blocks.values() if not held.pins)
            free.subtract(held.is_state for held in blocks if not held.pins)
            wanted = Counter(one in states for one in chain if isinstance(one, bytes))
            if any(wanted[kind] > free[kind] + len(empty) for kind, empty in self._empty.items()):
                return False
        for held in blocks:
            held.pins += 1  # before rows are taken
        taken, away = list[HostBlock](), 0
        for one in chain:
            read = self._read(one, request.source, is_state=one in states) if isinstance(one, bytes) else one
            if read is None:
                break
            read.add_source(request.source)
            read.pins += isinstance(one, bytes)
            away += not read.is_there
            taken.append(read)
        kept = set(taken)
        for held in blocks:
            if held not in kept:
                self._unpin(held)
        if not away:
            for held in taken:
                self._unpin(held)
            return False
        self._waits[request] = Wait(taken, time.monotonic(), num_blocks)
        return True

    def _read(self, digest: bytes, source: BlockSource | None, *, is_state: bool) -> HostBlock | None:
        """Begin to read the file of a block, or to fetch it from ``source``. None: there is no row for it."""
        held = self._reading.get(digest)
        if held is not None:  # for a request before ``forget_host``: what comes is right for this one, too
            self._dropped.remove(held)
            self._blocks[digest] = held
            return held
        row = self._take_row(is_state=is_state)
        if row is None:
            return None
        held = self._blocks[digest] = HostBlock(digest, row, pins=1, is_there=False)
        held.add_source(source)
        held.num_asked = int(digest not in self.on_disk)
        self._ask(held, source if held.num_asked else None)
        return held

    def _ask(self, held: HostBlock, source: BlockSource | None) -> None:
        """The next step asks the disk or ``source`` for the keys of ``held``."""
        held.source = "disk" if source is None else "peer"
        self._reading[held.digest] = held
        self._to_read.append((held.digest, held.row, source))

    # -- Requests that wait

    def held_back(self) -> list[Request]:
        return list(self._waits)

    def take_ready(self) -> list[Request]:
        """Requests whose blocks are in host memory, or that have waited too long."""
        now, ready = time.monotonic(), []
        for request, wait in list(self._waits.items()):
            left = [held for held in wait.blocks if not (held.is_there or held in self._dropped)]
            is_over = not left
            seconds = self.costs.read_seconds * sum(self.costs.of(held.is_state) for held in left)
            is_dear = request.source is None and not self.costs.pays(seconds, wait.num_blocks or len(left))
            if is_over or now >= self._late_at(request, wait) or is_dear:
                self.counts.num_fetches_late += not is_over
                self.counts.tier_wait_seconds += now - wait.began
                self._fetched[request] = self._waits.pop(request)
                ready.append(request)
        return ready

    def _late_at(self, request: Request, wait: Wait) -> float:
        """When ``wait`` ends, if nothing is read until then."""
        least = self.least_wait if request.source is None else _PEER_WAIT
        most = max(1.0, self.costs.of(any(held.is_state for held in wait.blocks)))
        return max(wait.began, self._last_read) + max(least, _LATE * self.costs.read_seconds * most)

    def forget(self, request: Request) -> bool:
        """``request`` runs, or has ended: nothing is pinned for it. Returns whether it was held back."""
        was_held_back = request in self._waits
        wait = self._waits.pop(request, None) or self._fetched.pop(request, None)
        for held in wait.blocks if wait is not None else ():
            self._unpin(held)
        if request.source is not None:
            self.on_taken(request.source)
            request.source = None
        return was_held_back

    # -- Steps

    def send(self, output: SchedulerOutputBuilder) -> None:
        """Tell the worker what the next step moves. All of its blocks are chosen."""
        for digest, block in list(self._unstored.items()):
            if self.pool.lookup(digest) != block or self._store(block, digest, makes_room=False):
                del self._unstored[digest]
            else:
                break  # for want of a row
        for digest, slot in list(self._unstored_states.items()):
            if self.pool.states.lookup(digest) != slot or self._store_state(slot, digest, makes_room=False):
                del self._unstored_states[digest]
        output.swapped_out += self._out
        output.states.swapped_out += self._states_out
        for told, pairs in zip(output.windows, self._windows_out, strict=True):
            told.swapped_out += pairs
        self._out, self._windows_out, self._states_out = [], [[] for _ in self._windows_out], []
        self._steps.append(self._step)
        self._step = Step()
        writes = list[HostBlock]()
        for is_state, count in ((False, self.num_rows), (True, self.num_slots)):
            room = max(1, count // 2)  # the other half stays for what comes and goes
            room -= sum(held.is_state is is_state for held in self._writing.values())
            free = (
                held
                for held in self._unwritten.values()
                if held.is_state is is_state and not held.pins and held.digest not in self._writing
            )
            writes += itertools.islice(free, max(0, room))
        for held in writes:
            del self._unwritten[held.digest]
            self._writing[held.digest] = held
            held.pins += 1
        output.files = FileOutput(
            tuple(self._to_read),
            tuple((held.digest, held.row, tuple(sorted(held.windows))) for held in writes),
            self._resets_files,
        )
        self._to_read, self._resets_files = [], False

    def idle_seconds(self) -> float:
        """How long a step without requests may wait for files; 0: nobody waits for any."""
        if not self._waits:
            return 0.0
        left = min(itertools.starmap(self._late_at, self._waits.items())) - time.monotonic()
        return min(_MOST_IDLE_WAIT, max(left, 1e-4))

    @property
    def is_moving(self) -> bool:
        """Whether blocks are still on their way to the disk."""
        return self.has_disk and bool(
            self._unstored
            or self._unstored_states
            or self._unwritten
            or self._writing
            or any(step.stored for step in (*self._steps, self._step))
        )

    def end_step(
        self, result: FileResult | None, num_tokens: int, seconds: float, copied: float, idle_seconds: float = 0.0
    ) -> None:
        """The oldest step that was sent has ended.

        Args:
            num_tokens, seconds: that it computed, where it was one of prompts, and how long it took; 0: it was not.
            copied: blocks that it swapped, and states by their ``cost``.
            idle_seconds: that a step without requests waited.
        """
        step = self._steps.popleft()
        self.counts.tier_idle_seconds += idle_seconds
        for held in step.pinned:
            self._unpin(held)
        if self.has_disk:
            for held in step.stored:
                wanted = self.to_give is None or self.to_give[held.digest] > 0
                if wanted and held.digest not in self.on_disk and self._blocks.get(held.digest) is held:
                    self._unwritten[held.digest] = held
        if num_tokens:
            self.costs.record_tokens(seconds / num_tokens)
        if result is None:
            return
        if copied and result.copy_seconds:
            self.costs.record_copy(result.copy_seconds / copied)
            self.counts.tier_copy_seconds += result.copy_seconds
        if result.is_coming:
            self._last_read = time.monotonic()  # nothing of what is waited for is late
        for digest, windows, taken in result.read:
            self._end_read(digest, windows, taken)
        for digest, is_written in result.written:
            held = self._writing.pop(digest)
            self._unpin(held)
            of_write = {"is_written": is_written, "to_disk": self.to_give is None}
            self.counts.add_written(self.costs.num_bytes(held), **of_write)
            if is_written:
                self.on_disk.add(digest)
        self.on_disk |= set(result.found)
        self.on_disk -= set(result.lost)
        self.counts.num_disk_evictions += result.num_evicted if self.to_give is None else 0
        self.counts.tier_file_seconds += result.file_seconds

    def _end_read(self, digest: bytes, windows: tuple[int, ...] | None, seconds: float) -> None:
        held, self._last_read = self._reading.pop(digest), time.monotonic()
        self.costs.record_read(seconds / self.costs.of(held.is_state))
        other = held.next_source(self._waits) if windows is None else None
        of_read = {"is_there": windows is not None, "is_peers": held.source == "peer", "is_asked_again": bool(other)}
        self.counts.add_read(self.costs.num_bytes(held), **of_read)
        if windows is None:
            self.on_disk.discard(digest)
            if other:
                return self._ask(held, other)
            if held not in self._dropped:
                self._forget(held)
        else:
            held.is_there, held.windows = True, frozenset(windows)
        self._unpin(held)

    # -- Faults

    def start_over(self) -> list[Request]:
        """Steps broke: what they were to move is not known. Returns the requests that waited for files."""
        unsure = {held for step in (*self._steps, self._step) for held in step.stored}
        unsure |= {*self._reading.values()}
        for held in (*self._blocks.values(), *self._dropped):
            held.pins = 0
        for held in self._dropped:
            self._empty[held.is_state].append(held.row)
        self._dropped.clear()
        for held in unsure:
            if self._blocks.get(held.digest) is held:
                self._forget(held)
        self._steps.clear()
        self._step = Step()
        self._out, self._windows_out, self._states_out = [], [[] for _ in self._windows_out], []
        for queue in (self._writing, self._reading, self._unstored, self._unstored_states):
            queue.clear()
        self._to_read, self._resets_files = [], True
        waiting = list(self._waits)
        self._waits.clear()
        self._fetched.clear()
        return waiting

    def forget_host(self) -> None:
        """Forget what host memory holds. Files stay: what they hold is right for whoever finds it."""
        self._unstored.clear()
        self._unstored_states.clear()
        if self.to_give is not None:
            self.on_disk.clear()
        for held in list(self._blocks.values()):
            self._forget(held)

    def take_over(self, other: "KVTiers") -> None:
        """Take the place of ``other``, whose scheduler broke: what is on disk is known, what it moved is not."""
        self.on_disk, self.counts, self._resets_files = other.on_disk, other.counts, True
        self.to_give, self.on_taken = other.to_give, other.on_taken

    def check_invariants(self) -> None:
        """Assert that no two blocks have a row, and that what is in flight is pinned."""
        held = [*self._blocks.values(), *self._dropped]
        rows = [*(one.row for one in held), *itertools.chain(*self._empty.values())]
        assert sorted(rows) == sorted(self._rows), "a row has two owners, or none"
        pins = dict.fromkeys(held, 0)
        waits = (*self._waits.values(), *self._fetched.values())
        users = [one for step in (*self._steps, self._step) for one in step.pinned]
        users += [*self._writing.values(), *self._reading.values(), *(one for wait in waits for one in wait.blocks)]
        for one in users:
            assert one in pins, "a row in use was given away"
            pins[one] += 1
        assert all(one.pins == count for one, count in pins.items()), "pins are not what is in flight"
        assert all(self._blocks[digest].digest == digest for digest in self._blocks)
        assert all(one.pins for one in self._dropped), "a row is lost"
        assert all(one.is_there or one.digest in self._reading for one in self._blocks.values())
