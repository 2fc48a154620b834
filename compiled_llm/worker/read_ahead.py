"""Mapped weights that do not fit into memory: a part stays, and a thread reads the rest from disk, ahead of the steps.

A step reads the layers in turn. Left alone, the kernel drops the pages that were not used for longest: those that the
next step needs first, so that each step would read all. Here pieces spread evenly over the model stay, as many as
there is memory for; of the others a window is read ahead, and dropped behind. How far a step has come is asked of the
page table, which has a page of this process from when it is first touched: so no layer and no graph knows of it, and a
step that is faster than the thread reads for itself. Nothing but time depends on any of this.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from compiled_llm.checkpoint.kept_weights import KeptWeights, Layer

PIECE_BYTES = 4 << 20
_PAGE = mmap.PAGESIZE
_MOST_AHEAD = 256 << 20  # bytes; more would not make a disk faster
_POLL_SECONDS = 0.0005
_LAYERS_SEEN = 4  # so many layers ahead it is looked whether a step has come to them
_MEASURED = 0.5  # seconds, of the disk


class Piece(NamedTuple):
    """Bytes of a layer. ``layer``: its number in the order in which a step reads them."""

    layer: int
    offset: int
    nbytes: int


class Plan(NamedTuple):
    """Which pieces stay in memory, and which are read again for each step; both in the order of a step.

    Tables and experts, of which a step reads some rows and some experts, are in neither: they are read when they are
    used, and the kernel keeps those that are used most.
    """

    staying: tuple[Piece, ...]
    passing: tuple[Piece, ...]
    ahead_bytes: int  # of pieces that pass, most that are in memory

    @classmethod
    def of(cls, layers: Sequence[Layer], budget: int) -> "Plan":
        """For ``budget`` bytes of memory."""
        whole = [layer for role in ("layer", "head") for layer in layers if layer.role == role]
        pieces = [
            Piece(number, layer.offset + start, min(PIECE_BYTES, layer.nbytes - start))
            for number, layer in enumerate(whole)
            for start in range(0, layer.nbytes, PIECE_BYTES)
        ]
        size = sum(layer.nbytes for layer in whole)
        in_part = sum(layer.nbytes for layer in layers) - size
        room = budget if size + in_part <= budget else max(budget - in_part, budget // 2)
        if size <= room:
            return cls(tuple(pieces), (), 0)
        ahead = min(_MOST_AHEAD, room // 4)
        share, owed = 1 - (room - ahead) / size, 0.0
        staying, passing = [], []
        for piece in pieces:
            owed += piece.nbytes * share
            (passing if owed >= piece.nbytes / 2 else staying).append(piece)
            owed -= piece.nbytes if passing and passing[-1] is piece else 0
        return cls(tuple(staying), tuple(passing), ahead)


class ReadAhead:
    """Reads ``weights`` for steps, in a thread of its own, with ``budget`` bytes of memory; ``close`` ends it.

    Attributes:
        weights, plan: what it reads.
        bytes_read: of pieces that pass, since the start.
        disk_bytes_per_second: what the disk gives one reader that reads on and on past the page cache; 0 where all
            weights stay, or the system does not allow to ask.
    """

    def __init__(self, weights: KeptWeights, budget: int) -> None:
        self.weights, self.plan = weights, Plan.of(weights.layers, budget)
        self.bytes_read = 0
        self.disk_bytes_per_second = _disk_rate(weights) if self.plan.passing else 0.0
        self._in_step, self._closed = threading.Event(), threading.Event()
        self._in_step.set()  # until steps are told
        # Of pieces that pass, counted on from one step to the next: the first that is in memory, the next to be read.
        self._first = self._next = self._held = 0
        self._starts = [place for place, piece in enumerate(self.plan.passing) if self._begins_layer(place)]
        self._at = 0  # of ``_starts``, counted on likewise: the layer that a step was last seen at
        self._thread = threading.Thread(target=self._run, name="read-weights-ahead", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._in_step.set()
        self._thread.join()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """While a step runs, the thread follows it."""
        self._in_step.set()
        try:
            yield
        finally:
            self._in_step.clear()

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights that are in memory now, whoever read them."""
        return resident_bytes(self.weights)

    def _begins_layer(self, place: int) -> bool:
        pieces = self.plan.passing
        return place == 0 or pieces[place].layer != pieces[place - 1].layer

    def _run(self) -> None:
        with open("/proc/self/pagemap", "rb", buffering=0) as page_table:
            self._read_first()
            while self.plan.passing and not self._closed.is_set():
                self._follow(page_table.fileno())
                if not self._read_next():
                    time.sleep(_POLL_SECONDS)
                    self._in_step.wait()

    def _read_first(self) -> None:
        """What stays, in the order of a step, the first that passes among it."""
        for piece in self.plan.staying:
            while self._next < len(self.plan.passing) and self.plan.passing[self._next].layer <= piece.layer:
                if not self._read_next():
                    break
            if self._closed.is_set():
                return
            self._advise(piece, os.POSIX_FADV_WILLNEED)

    def _read_next(self) -> bool:
        """Ask for the next piece that passes; False if there is no room for it."""
        pieces = self.plan.passing
        piece = pieces[self._next % len(pieces)]
        if self._held and self._held + piece.nbytes > self.plan.ahead_bytes or self._next - self._first == len(pieces):
            return False
        self._advise(piece, os.POSIX_FADV_WILLNEED)
        self._held += piece.nbytes
        self.bytes_read += piece.nbytes
        self._next += 1
        return True

    def _follow(self, page_table: int) -> None:
        """Drop the layers that a step has left behind."""
        count, pieces = len(self._starts), self.plan.passing
        for ahead in range(1, min(_LAYERS_SEEN, count - 1) + 1):
            turn, layer = divmod(self._at + ahead, count)
            if not self._is_touched(page_table, self._starts[layer]):
                continue
            self._at += ahead
            begin = turn * len(pieces) + self._starts[layer]
            while self._first < begin:
                piece = pieces[self._first % len(pieces)]
                self.weights.memory.madvise(mmap.MADV_DONTNEED, piece.offset, _whole_pages(piece.nbytes))
                self._advise(piece, os.POSIX_FADV_DONTNEED)
                self._held -= piece.nbytes if self._first < self._next else 0
                self._first += 1
            self._next = max(self._next, self._first)
            return

    def _is_touched(self, page_table: int, start: int) -> bool:
        """Whether a step reads the layer whose first piece that passes is number ``start``: any of its pieces."""
        pieces = self.plan.passing
        for place in range(start, len(pieces)):
            if pieces[place].layer != pieces[start].layer:
                return False
            address = self.weights.address + pieces[place].offset + pieces[place].nbytes // 2
            entry = os.pread(page_table, 8, address // _PAGE * 8)
            if entry and entry[-1] & 0x80:  # present
                return True
        return False

    def _advise(self, piece: Piece, advice: int) -> None:
        os.posix_fadvise(self.weights.descriptor, piece.offset, piece.nbytes, advice)


def resident_bytes(weights: KeptWeights) -> int:
    """Bytes of the file's layers that are in the page cache, as ``mincore`` tells."""
    size = len(weights.memory)
    pages = (ctypes.c_ubyte * -(-size // _PAGE))()
    if _mincore()(weights.address, size, pages) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return min(weights.nbytes, int((np.frombuffer(pages, np.uint8) & 1).sum()) * _PAGE)


@functools.cache
def _mincore() -> "ctypes._NamedFuncPointer":
    function = ctypes.CDLL(None, use_errno=True).mincore
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    return function


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _disk_rate(weights: KeptWeights) -> float:
    """Bytes a second of a reader past the page cache; 0 where the file system has no such reading."""
    buffer, size = mmap.mmap(-1, PIECE_BYTES), os.fstat(weights.descriptor).st_size
    try:
        descriptor = os.open(weights.path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    except OSError:
        return 0.0
    try:
        started, count = time.perf_counter(), 0
        while (taken := time.perf_counter() - started) < _MEASURED:
            count += os.preadv(descriptor, [buffer], count % max(PIECE_BYTES, size // PIECE_BYTES * PIECE_BYTES))
        return count / taken
    except OSError:
        return 0.0
    finally:
        os.close(descriptor)
        buffer.close()
