"""Mapped weights that do not fit into memory: a part stays, and threads read the rest from disk, ahead of the steps.

A step reads the layers in turn. Left alone, the kernel guesses what to keep, and reads what is missing when a step
already waits for it. Here blocks spread evenly over the model stay, as many as there is memory for; of the others a
window is read ahead, and dropped behind. How far a step has come is asked of the page table, which has a page of this
process from when it is first touched: so no layer and no graph knows of it, and a step that overtakes the threads reads
for itself. Nothing but time depends on any of this.

Blocks are read by mapping them (MADV_POPULATE_READ) as huge pages, where the file system has such: that took a seventh
of the processor time that POSIX_FADV_WILLNEED takes, and a third of the time. They are mapped a second time for it,
since what is mapped for steps says how far these have come.
"""

import contextlib
import ctypes
import itertools
import mmap
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from compiled_llm.checkpoint.kept_weights import KeptWeights, Layer
from compiled_llm.ops.c_library import c_library, madvise

BLOCK_BYTES = 2 << 20  # a huge page: it is in memory as a whole
_PAGE = mmap.PAGESIZE
_POPULATE_READ = 22  # of madvise, from Linux 5.14 on; Python has no name for it
_READERS = 3  # at once: one waits for each block, and the disk waits for it
_LEAST_AHEAD = 64 << 20  # bytes, where that is no quarter of the memory: what a disk gives in some 20 ms
_HEAD_PARTS, _PARTS_USED = 16, 3  # threads take eighths of the head at least, each its own
_POLL_SECONDS = 0.0005
_PARTS_SEEN = 4  # so many parts ahead it is looked whether a step has come to them
_MEASURED = 0.5  # seconds, of the disk


class Piece(NamedTuple):
    """Bytes of a layer, a block at most.

    Attributes:
        layer: its number in the order in which a step reads them.
        part: of the model, counted on. It is a layer, or a sixteenth of the head, which may be larger than all that is
            read ahead, and whose rows are too few to be read twice.
        passes: it is read for each step, and dropped again; else it stays.
    """

    layer: int
    part: int
    offset: int
    nbytes: int
    passes: bool


class Plan(NamedTuple):
    """The pieces of all layers of which a step reads everything, in the order in which it does.

    Tables and experts, of which a step reads some rows and some experts, are read when they are used, and the kernel
    keeps those that are used most.
    """

    pieces: tuple[Piece, ...]
    ahead_bytes: int  # of pieces that pass, most that are in memory; 0: none passes
    layers: tuple[Layer, ...]  # whose pieces these are

    @classmethod
    def of(cls, layers: Sequence[Layer], budget: int, block: int = BLOCK_BYTES) -> "Plan":
        """For ``budget`` bytes of memory. What passes is whole blocks of the file: others share theirs.

        The layer in use and the next, or as much of the head, are to have room in what is read ahead. More than that
        serves nothing, and is read for each step in the place of what could stay.
        """
        whole = [layer for role in ("layer", "head") for layer in layers if layer.role == role]
        cuts = [
            (number, start, min(start // block * block + block, layer.offset + layer.nbytes) - start)
            for number, layer in enumerate(whole)
            for start in (layer.offset, *range((layer.offset // block + 1) * block, layer.offset + layer.nbytes, block))
        ]
        size = sum(layer.nbytes for layer in whole)
        in_part = sum(layer.nbytes for layer in layers) - size
        room = budget if size + in_part <= budget else max(budget - in_part, budget // 2)
        may_pass = max(1, sum(nbytes for *_, nbytes in cuts if nbytes == block))
        in_use = [(_PARTS_USED + 2) / _HEAD_PARTS if layer.role == "head" else 2 for layer in whole]
        largest = max((layer.nbytes * parts for layer, parts in zip(whole, in_use, strict=True)), default=0)
        two_parts = int(largest * min(1.0, (size - room) / may_pass))
        ahead = 0 if size <= room else max(block, min(room // 4, max(_LEAST_AHEAD, two_parts)))
        share = min(1.0, (size - room + ahead) / may_pass) if ahead else 0.0
        pieces, owed, part, before = list[Piece](), 0.0, -1, (-1, 0)
        for number, start, nbytes in cuts:
            head = whole[number] if whole[number].role == "head" else None
            place = number, 0 if head is None else (start - head.offset) * _HEAD_PARTS // head.nbytes
            part, before = part + (place != before), place
            owed += share if nbytes == block else 0
            passes = nbytes == block and owed >= 0.5
            owed -= passes
            pieces.append(Piece(number, part, start, nbytes, passes))
        return cls(tuple(pieces), ahead, tuple(whole))

    def bytes_of(self, passes: bool) -> int:
        """Bytes of the pieces that pass, or of those that stay."""
        return sum(piece.nbytes for piece in self.pieces if piece.passes == passes)


class ReadAhead:
    """Reads ``weights`` for steps, in threads of its own, with ``budget`` bytes of memory; ``close`` ends them.

    Attributes:
        weights, plan: what it reads.
        disk_bytes_per_second: what the disk gave as many readers before there were steps; 0 where all weights stay, or
            all were in memory.
    """

    def __init__(self, weights: KeptWeights, budget: int, block: int = BLOCK_BYTES) -> None:
        self.weights, self.plan = weights, Plan.of(weights.layers, budget, block)
        self._read_before = _bytes_read()
        self._read_memory = mmap.mmap(weights.descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._read_address = np.frombuffer(self._read_memory, np.uint8).ctypes.data
        for memory in (weights.memory, self._read_memory):
            with contextlib.suppress(OSError, ValueError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        self.disk_bytes_per_second = self._disk_rate() if self.plan.ahead_bytes else 0.0
        self._in_step, self._closed = threading.Event(), threading.Event()
        self._in_step.set()  # until steps are told
        self._moved = threading.Condition()  # a step has come further. Its lock is that of the numbers below
        # Pieces, counted on from one step to the next: the first that a step may still need, the next to be read.
        self._first = self._next = 0
        self._passing_before = [0, *itertools.accumulate(piece.nbytes * piece.passes for piece in self.plan.pieces)]
        # Of each part with pieces that pass: these.
        passing: dict[int, list[int]] = {}
        for place, piece in enumerate(self.plan.pieces):
            if piece.passes:
                passing.setdefault(piece.part, []).append(place)
        self._parts = list(passing.values())
        heads = [number for number, layer in enumerate(self.plan.layers) if layer.role == "head"]
        self._num_head_parts = sum(self.plan.pieces[places[0]].layer in heads for places in self._parts)
        # Of these parts, counted on likewise: where a step was last seen, and the first that its threads may still use.
        self._at = self._used = 0
        works = [self._read_on] * _READERS + [self._follow] * bool(self._parts)
        self._threads = [threading.Thread(target=work, name="read-weights-ahead", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        self._in_step.set()
        with self._moved:
            self._moved.notify_all()
        for thread in self._threads:
            thread.join()
        self._read_memory.close()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """While a step runs, the threads follow it."""
        self._in_step.set()
        try:
            yield
        finally:
            self._in_step.clear()

    @property
    def bytes_read(self) -> int:
        """Bytes that this process has read from disks since the start, by these threads or by steps."""
        return _bytes_read() - self._read_before

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights that are in memory now, whoever read them."""
        return min(self.weights.nbytes, _resident(self.weights.address, len(self.weights.memory)))

    def _read_on(self) -> None:
        """Of each reader: piece by piece, as soon as there is room."""
        pieces = self.plan.pieces
        while self._parts or self._next < len(pieces):  # if all stay, once round
            with self._moved:
                while not self._closed.is_set() and not self._has_room(pieces[self._next % len(pieces)]):
                    self._moved.wait()
                if self._closed.is_set():
                    return
                piece = pieces[self._next % len(pieces)]
                self._next += 1
            if not _resident(self.weights.address + piece.offset, _PAGE):
                self._read(piece)

    def _follow(self) -> None:
        """Of one thread: drop what steps leave behind."""
        with open("/proc/self/pagemap", "rb", buffering=0) as page_table:
            while not self._closed.is_set():
                if (at := self._seen(page_table.fileno())) is not None:
                    with self._moved:
                        behind = self._come_to(at)
                        self._moved.notify_all()
                    self._drop(behind)
                else:
                    time.sleep(_POLL_SECONDS)
                    self._in_step.wait()

    def _has_room(self, piece: Piece) -> bool:
        held = self._passing_until(self._next) - self._passing_until(self._first)
        is_full = piece.passes and held and held + piece.nbytes > self.plan.ahead_bytes
        return not is_full and self._next - self._first < len(self.plan.pieces)

    def _passing_until(self, number: int) -> int:
        """Bytes of the pieces that pass, of those before ``number``."""
        turn, place = divmod(number, len(self.plan.pieces))
        return turn * self._passing_before[-1] + self._passing_before[place]

    def _read(self, piece: Piece) -> None:
        """Bring it into the page cache."""
        if madvise(self._read_address + piece.offset, piece.nbytes, _POPULATE_READ) == 0:
            self._read_memory.madvise(mmap.MADV_DONTNEED, piece.offset, _whole_pages(piece.nbytes))
        else:  # an older kernel
            os.preadv(self.weights.descriptor, [bytearray(piece.nbytes)], piece.offset)

    def _disk_rate(self) -> float:
        """Bytes a second of blocks that are not in memory, and are dropped again."""
        end = self.weights.nbytes - BLOCK_BYTES
        absent = iter(
            [
                Piece(0, 0, offset, BLOCK_BYTES, passes=True)
                for offset in range(0, end, BLOCK_BYTES)
                if not _resident(self.weights.address + offset, _PAGE)
            ]
        )
        started = time.perf_counter()

        def read(_: int) -> int:
            count = 0
            while time.perf_counter() - started < _MEASURED and (piece := next(absent, None)) is not None:
                self._read(piece)
                os.posix_fadvise(self.weights.descriptor, piece.offset, piece.nbytes, os.POSIX_FADV_DONTNEED)
                count += piece.nbytes
            return count

        with ThreadPoolExecutor(_READERS) as pool:
            count = sum(pool.map(read, range(_READERS)))
        return count / (time.perf_counter() - started)

    def _seen(self, page_table: int) -> int | None:
        """The next part that a step has come to since it was last seen; None: it is still there."""
        count, after = len(self._parts), self._at + 1
        most = self._used + count  # a part in use is no place of the next step, however few there are
        ahead = range(after, min(after + _PARTS_SEEN, most))
        turn, last = divmod(after + len(ahead) - 1, count)
        begin = (turn + 1) * count
        leaves_out = last >= count - self._num_head_parts  # the head, as a step without sampled tokens does
        for number in (*ahead, *range(begin, min(begin + _PARTS_SEEN * leaves_out, most))):
            _, places = self._part(number)
            if any(self._is_touched(page_table, self.plan.pieces[place]) for place in places):
                return number
        return None

    def _come_to(self, at: int) -> range:
        """A step has come to this part. Numbers of the pieces that it has left behind."""
        pieces, (turn, places) = self.plan.pieces, self._part(at)
        layer = pieces[places[0]].layer
        # Other threads may still be in parts of this layer before.
        for used in range(at - _PARTS_USED, at + 1):
            of, (first, *_) = self._part(used)
            if (of, pieces[first].layer) == (turn, layer):
                break
        begin = turn * len(pieces) + first
        # What a step reads for itself comes back after it was dropped. Touched, it would be taken for a place that the
        # next step has come to: so when one begins, all is dropped that is not read ahead for it, nor soon used.
        is_new = turn > self._part(self._at)[0]
        soon_turn, soon = self._part(at + 2 * _PARTS_SEEN)
        needed = max(self._next, soon_turn * len(pieces) + soon[0])
        behind = range(min(self._first, needed - len(pieces)) if is_new else self._first, begin)
        self._at, self._used, self._first = at, used, begin
        if self._next <= turn * len(pieces) + places[0]:
            # The step is faster: it reads this part, and the next one is read for it.
            turn, places = self._part(at + 1)
            self._next = turn * len(pieces) + places[0]
        return behind

    def _drop(self, numbers: range) -> None:
        for number in numbers:
            piece = self.plan.pieces[number % len(self.plan.pieces)]
            if piece.passes and _resident(self._seen_at(piece), _PAGE):
                self.weights.memory.madvise(mmap.MADV_DONTNEED, piece.offset, piece.nbytes)
                os.posix_fadvise(self.weights.descriptor, piece.offset, piece.nbytes, os.POSIX_FADV_DONTNEED)

    def _part(self, number: int) -> tuple[int, list[int]]:
        """Which step reads a part, and the places of its pieces that pass."""
        turn, part = divmod(number, len(self._parts))
        return turn, self._parts[part]

    def _is_touched(self, page_table: int, piece: Piece) -> bool:
        entry = os.pread(page_table, 8, self._seen_at(piece) // _PAGE * 8)
        return bool(entry) and entry[-1] & 0x80 != 0  # present

    def _seen_at(self, piece: Piece) -> int:
        """The address of which is asked: the kernel may have dropped a part of a piece, and the rest be touched."""
        return self.weights.address + piece.offset + piece.nbytes // 2


def _resident(address: int, size: int) -> int:
    """Bytes of mapped memory that are in the page cache, whole pages."""
    pages = (ctypes.c_ubyte * -(-size // _PAGE))()
    if c_library().mincore(address // _PAGE * _PAGE, size, pages) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return int((np.frombuffer(memoryview(pages), np.uint8) & 1).sum()) * _PAGE


def _bytes_read() -> int:
    found = re.search(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
