"""KVTiers: blocks that left the device's prefix cache, in host memory and on disk. Plain Python.

A block that is evicted is copied to a row of host memory as the next step begins, before anything is written to it; a
request that finds it there gets it copied back as its first step begins. With a disk, each block that is published is
copied to the host soon after, and from there written to a file, so that a later engine finds it. A file is read into a
row of host memory by a thread of the worker while its request waits and others pass. Where reading is estimated to take
longer than computing, or does, the tokens are computed.

What moves is known by the digest of a block, which stands for all that its keys and values depend on. Rows that a copy
or a file in flight uses are pinned: they are neither given to another block nor counted as free until it has ended,
whatever becomes of the requests.
"""

import dataclasses
import itertools
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from compiled_llm.scheduling.block_pool import BlockPool
from compiled_llm.scheduling.costs import StepCosts, moved
from compiled_llm.scheduling.output_builder import SchedulerOutputBuilder
from compiled_llm.scheduling.request import BlockSource, Request
from compiled_llm.scheduling.scheduler_output import FileOutput
from compiled_llm.scheduling.worker import FileResult

_BYTES_A_SECOND = 200e6  # of reading files, until some were read: a slow disk's
_PEER_WAIT = 2.0  # seconds without a block from another engine, after which what is left is computed
_LATE = 4.0  # a file is late after so many times what the others took
_MOST_IDLE_WAIT = 0.02  # seconds that a step without requests waits for a file: new requests wait as long


@dataclasses.dataclass
class TierCounts:
    """What was moved between tiers since the engine was made; ``EngineStats`` says what each of the counts is."""

    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    num_host_stores: int = 0
    num_host_loads: int = 0
    num_host_evictions: int = 0
    num_stores_without_room: int = 0
    num_disk_writes: int = 0
    num_disk_reads: int = 0
    num_disk_failures: int = 0
    num_disk_evictions: int = 0
    num_fetches_dearer: int = 0
    num_fetches_late: int = 0
    peer_hit_tokens: int = 0
    num_blocks_given: int = 0
    num_blocks_taken: int = 0
    num_takes_failed: int = 0
    tier_copy_seconds: float = 0.0
    tier_file_seconds: float = 0.0
    tier_idle_seconds: float = 0.0
    tier_wait_seconds: float = 0.0


@dataclasses.dataclass(eq=False, slots=True)
class HostBlock:
    """A block in host memory.

    Attributes:
        row: of the worker's host memory, numbered as blocks of the swap space.
        windows: numbers of the windows whose keys are there too.
        pins: copies and files in flight that use the row, and requests that wait for it.
        is_there: whether its keys are in the row, or will be before anything that a step does with them.
        source: where they were read from, until they are first used: "disk", "peer" (another engine) or "" (neither).
    """

    digest: bytes
    row: int
    windows: frozenset[int] = frozenset()
    pins: int = 0
    is_there: bool = True
    source: str = ""


@dataclasses.dataclass(slots=True)
class _Wait:
    """A request that waits for files, and the blocks in host memory that are pinned for it."""

    blocks: list[HostBlock]
    began: float


@dataclasses.dataclass(slots=True)
class _Step:
    """What a step moves: blocks that it pins, and those of them that it copies to the host."""

    pinned: list[HostBlock] = dataclasses.field(default_factory=list)
    stored: list[HostBlock] = dataclasses.field(default_factory=list)


class KVTiers:
    """The lower tiers of one ``BlockPool``, which tells of evictions.

    Args:
        rows: of host memory.
        on_disk: digests of the blocks that have a file; None: there is no disk.
        block_bytes: of a row.

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
        block_bytes: int = 0,
    ) -> None:
        self.pool, self.block_size = pool, block_size
        self.num_rows, self.has_disk = len(rows), on_disk is not None
        self.on_disk = set(on_disk or ())
        self.to_give: Counter[bytes] | None = None
        self.on_taken: Callable[[BlockSource], None] = _nothing
        self.counts = TierCounts()
        self._empty = list(reversed(rows))
        self._rows = frozenset(rows)
        self._blocks: OrderedDict[bytes, HostBlock] = OrderedDict()  # least recently used first
        self._dropped: set[HostBlock] = set()  # forgotten, but pinned
        # Of the next step: pairs as in ``SchedulerOutput``, and what it pins.
        self._out: list[tuple[int, int]] = []
        self._windows_out: list[list[tuple[int, int]]] = [[] for _ in pool.windows]
        self._step, self._steps = _Step(), deque[_Step]()
        self._unstored: dict[bytes, int] = {}  # published blocks that are still to be copied to the host
        self._unwritten: dict[bytes, HostBlock] = {}
        self._writing: dict[bytes, HostBlock] = {}
        self._reading: dict[bytes, HostBlock] = {}
        self._to_read: list[tuple[bytes, int, BlockSource | None]] = []
        self._waits: dict[Request, _Wait] = {}
        self._last_read = 0.0  # when a file was read last
        self._fetched: dict[Request, _Wait] = {}  # those that need not wait any more, until they are admitted
        self._copy_seconds = costs.swap_seconds  # of a block, a moving average, as these; 0: not measured
        self._read_seconds, self._token_seconds = block_bytes / _BYTES_A_SECOND, 0.0
        self._resets_files = False
        if self.num_rows:
            pool.on_evict = self.store
            for window in pool.windows:
                window.on_evict = self._store_evicted

    @property
    def num_used(self) -> int:
        """Rows that hold a block, or are about to."""
        return self.num_rows - len(self._empty)

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

    def give(self, digests: Iterable[bytes]) -> int:
        """Blocks of these digests are to be given to other engines. Returns how many are on their way."""
        num_left = 0
        for digest in digests:
            held, block = self._blocks.get(digest), self.pool.lookup(digest)
            if digest in self.on_disk:
                continue
            if held is not None and held.is_there:
                num_left += 1
                if digest not in self._writing and not any(held in step.stored for step in (*self._steps, self._step)):
                    self._unwritten[digest] = held
            elif block is not None:
                num_left += 1
                self._unstored[digest] = block
        return num_left

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
            self.counts.num_host_stores += 1
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

    def _take_row(self, *, makes_room: bool = True) -> int | None:
        """A row to write to: an empty one, or that of the least recently used block, rather of one that has a file."""
        if self._empty:
            return self._empty.pop()
        free = (held for held in self._blocks.values() if not held.pins)
        first = next(free, None)
        if first is None:
            return None
        if first.digest in self._unwritten:
            first = next((held for held in free if held.digest not in self._unwritten), first if makes_room else None)
            if first is None:
                return None
        self._forget(first)
        self.counts.num_host_evictions += 1
        return self._empty.pop()

    def _forget(self, held: HostBlock) -> None:
        """The row is free, at once or when its last pin is gone."""
        del self._blocks[held.digest]
        self._unwritten.pop(held.digest, None)
        if held.pins:
            self._dropped.add(held)
        else:
            self._empty.append(held.row)

    def _unpin(self, held: HostBlock) -> None:
        held.pins -= 1
        assert held.pins >= 0, "a row is not pinned"
        if not held.pins and held in self._dropped:
            self._dropped.remove(held)
            self._empty.append(held.row)

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
        known = request in self._fetched
        chain, away = list[HostBlock | bytes](), 0
        for digest in digests:
            held = self._blocks.get(digest)
            is_there = held is not None and held.is_there
            may_be_there = digest in self.on_disk or request.source is not None
            if (held is None and not may_be_there) or (known and not is_there):
                break
            away += not is_there
            chain.append(held or digest)
        if away and (request.source or self._pays(self._read_seconds * (away + len(self._reading)), away)):
            if self._wait(request, chain):
                return None
            away = 0  # there is no room
        elif away:
            self.counts.num_fetches_dearer += away
        found: list[HostBlock] = []
        for one in chain:
            if isinstance(one, bytes) or not one.is_there:
                break
            found.append(one)
        if found and not (request.source or self._pays(self._copy_seconds * len(found), len(found))):
            self.counts.num_fetches_dearer += len(found)
            return []
        return found

    def fetch(self, request: Request, found: Sequence[HostBlock]) -> None:
        """The next step copies these to the device. ``request``, which runs from now on, keeps no others pinned."""
        self.counts.num_host_loads += len(found)
        for held in reversed(found):
            if held.source == "disk":
                self.counts.disk_hit_tokens += self.block_size
            elif held.source == "peer":
                self.counts.peer_hit_tokens += self.block_size
            else:
                self.counts.host_hit_tokens += self.block_size
            held.source = ""  # the next time it is found in host memory
            self._pin_for_step(held)
            self._blocks.move_to_end(held.digest)
        self.forget(request)

    def _pays(self, seconds: float, num_blocks: int) -> bool:
        """Whether ``seconds`` are less than it takes to compute the tokens of some blocks, as far as that is known."""
        own = self._token_seconds * self.block_size * num_blocks
        return not own or seconds < own

    def _wait(self, request: Request, chain: Sequence[HostBlock | bytes]) -> bool:
        """Let ``request`` wait until the blocks of ``chain`` are in host memory, as many as there is room for.

        False: there is no room for those that are not.
        """
        blocks: list[HostBlock] = [held for held in chain if isinstance(held, HostBlock)]
        for held in blocks:
            held.pins += 1  # before rows are taken
        taken, away = list[HostBlock](), 0
        for one in chain:
            read = self._read(one, request.source) if isinstance(one, bytes) else one
            if read is None:
                break
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
        self._waits[request] = _Wait(taken, time.monotonic())
        return True

    def _read(self, digest: bytes, source: BlockSource | None) -> HostBlock | None:
        """Begin to read the file of a block, or to fetch it from ``source``. None: there is no row for it.

        Nor is there one while what ``forget_host`` forgot is still being read: results are told apart by the digest.
        """
        row = None if digest in self._reading else self._take_row()
        if row is None:
            return None
        kind = "peer" if source is not None and digest not in self.on_disk else "disk"
        held = self._blocks[digest] = HostBlock(digest, row, pins=1, is_there=False, source=kind)
        self._reading[digest] = held
        self._to_read.append((digest, row, source if kind == "peer" else None))
        return held

    # -- Requests that wait

    def held_back(self) -> list[Request]:
        return list(self._waits)

    def take_ready(self) -> list[Request]:
        """Requests whose blocks are in host memory, or that have waited too long."""
        now, ready = time.monotonic(), []
        for request, wait in list(self._waits.items()):
            left = sum(not held.is_there and held not in self._dropped for held in wait.blocks)
            is_over = not left
            is_dear = request.source is None and not self._pays(self._read_seconds * left, left)
            if is_over or now >= self._late_at(request, wait) or is_dear:
                self.counts.num_fetches_late += not is_over
                self.counts.tier_wait_seconds += now - wait.began
                self._fetched[request] = self._waits.pop(request)
                ready.append(request)
        return ready

    def _late_at(self, request: Request, wait: _Wait) -> float:
        """When ``wait`` ends, if nothing is read until then."""
        least = self.least_wait if request.source is None else _PEER_WAIT
        return max(wait.began, self._last_read) + max(least, _LATE * self._read_seconds)

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
        output.swapped_out += self._out
        for told, pairs in zip(output.windows, self._windows_out, strict=True):
            told.swapped_out += pairs
        self._out, self._windows_out = [], [[] for _ in self._windows_out]
        self._steps.append(self._step)
        self._step = _Step()
        room = max(1, self.num_rows // 2) - len(self._writing)  # the other half stays for blocks that come and go
        free = (held for held in self._unwritten.values() if not held.pins and held.digest not in self._writing)
        writes = list(itertools.islice(free, max(0, room)))
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
            or self._unwritten
            or self._writing
            or any(step.stored for step in (*self._steps, self._step))
        )

    def end_step(
        self, result: FileResult | None, num_tokens: int, seconds: float, copied: int, idle_seconds: float = 0.0
    ) -> None:
        """The oldest step that was sent has ended.

        Args:
            num_tokens, seconds: that it computed, where it was one of prompts, and how long it took; 0: it was not.
            copied: blocks that it swapped.
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
            self._token_seconds = _averaged(self._token_seconds, seconds / num_tokens)
        if result is None:
            return
        if copied and result.copy_seconds:
            self._copy_seconds = _averaged(self._copy_seconds, result.copy_seconds / copied)
            self.counts.tier_copy_seconds += result.copy_seconds
        for digest, windows, taken in result.read:
            self._end_read(digest, windows, taken)
        for digest, is_written in result.written:
            held = self._writing.pop(digest)
            self._unpin(held)
            if self.to_give is None:
                self.counts.num_disk_writes += is_written
                self.counts.num_disk_failures += not is_written
            else:
                self.counts.num_blocks_given += is_written
            if is_written:
                self.on_disk.add(digest)
        self.on_disk |= set(result.found)
        self.on_disk -= set(result.lost)
        self.counts.num_disk_evictions += result.num_evicted if self.to_give is None else 0
        self.counts.tier_file_seconds += result.file_seconds

    def _end_read(self, digest: bytes, windows: tuple[int, ...] | None, seconds: float) -> None:
        held, self._last_read = self._reading.pop(digest), time.monotonic()
        self._read_seconds = _averaged(self._read_seconds, seconds)
        is_peers = held.source == "peer"
        if windows is None:
            self.counts.num_disk_failures += not is_peers
            self.counts.num_takes_failed += is_peers
            self.on_disk.discard(digest)
            if held not in self._dropped:
                self._forget(held)
        else:
            self.counts.num_disk_reads += not is_peers
            self.counts.num_blocks_taken += is_peers
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
            self._empty.append(held.row)
        self._dropped.clear()
        for held in unsure:
            if self._blocks.get(held.digest) is held:
                self._forget(held)
        self._steps.clear()
        self._step = _Step()
        self._out, self._windows_out = [], [[] for _ in self._windows_out]
        for queue in (self._writing, self._reading, self._unstored):
            queue.clear()
        self._to_read, self._resets_files = [], True
        waiting = list(self._waits)
        self._waits.clear()
        self._fetched.clear()
        return waiting

    def forget_host(self) -> None:
        """Forget what host memory holds. Files stay: what they hold is right for whoever finds it."""
        self._unstored.clear()
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
        rows = [one.row for one in held] + self._empty
        assert len(rows) == len(set(rows)) == self.num_rows, "a row has two owners, or none"
        assert set(rows) == self._rows
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


def _nothing(source: BlockSource) -> None:
    """Nobody is to be told."""


def _averaged(average: float, value: float) -> float:
    return moved(average, value) if average else value
