"""FileThread: moves blocks beside the steps, from and to files or other engines; rows of host memory are the worker's.

``BlockStore`` is what it moves them from and to.
"""

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from compiled_llm.scheduling.request import BlockSource
from compiled_llm.scheduling.scheduler_output import FileOutput
from compiled_llm.scheduling.worker import FileResult

_SCAN_SECONDS = 30.0  # between two looks at what other engines have written
_MOST_READS = 16  # blocks that are asked for at once

_ASK_SECONDS = 0.01  # until another engine is asked again for what it has not computed yet

_Job = tuple[bytes, int, BlockSource | None, Callable[[], object]]


class Room(NamedTuple):
    """Memory for a block of this digest: of layers without a window, and of those with each."""

    digest: bytes
    own: memoryview
    of_windows: Sequence[memoryview]


class NotYet(NamedTuple):
    """A block of another engine that is not there yet. ``is_coming``: this engine is known to compute it."""

    is_coming: bool


Read = tuple[int, ...] | NotYet | None  # numbers of the windows whose keys were read; None: there is no such block


class BlockStore(Protocol):
    """A place of blocks below host memory: ``BlockFolder``, or other engines (``BlockExchange``). Calls may wait.

    Attributes:
        key: SHA-256 of all that a block's bytes depend on besides its digest.
        known: digests of the blocks that are there.
    """

    key: bytes

    @property
    def known(self) -> Collection[bytes]: ...

    def read_all(self, blocks: Sequence[Room], source: BlockSource | None) -> list[Read]:
        """Copy blocks to where there is room for them.

        ``source``: the engine that has them; None: they are here.
        """
        ...

    def write(self, digest: bytes, parts: Sequence[memoryview], windows: Sequence[int]) -> tuple[bool, list[bytes]]:
        """Keep a copy of a block. Returns whether it is there, and the digests of blocks that made room."""
        ...

    def scan(self) -> tuple[set[bytes], set[bytes]]:
        """Digests that came and went by others' doing since the last call."""
        ...

    def close(self) -> None: ...


class FileThread:
    """A thread that does what steps ask for, reads before writes, each in their order.

    Args:
        rows: gives of a host block its memory: that of layers without a window, and of those with each.
    """

    def __init__(self, folder: BlockStore, rows: Callable[[int], tuple[memoryview, Sequence[memoryview]]]) -> None:
        self.folder, self._rows = folder, rows
        self._reads: deque[_Job] = deque()
        self._asked_again: dict[BlockSource | None, float] = {}  # whose next block was not there: when, at the earliest
        self._writes: deque[tuple[bytes, int, tuple[int, ...], Callable[[], object]]] = deque()
        self._changed = threading.Condition()
        self._is_busy = self._is_closed = False
        self._result = FileResult()
        self._next_scan = time.monotonic() + _SCAN_SECONDS
        self._thread = threading.Thread(target=self._run, name="compiled-llm files", daemon=True)
        self._thread.start()

    def submit(self, files: FileOutput, wait: Callable[[], object]) -> None:
        """Begin the reads and writes of a step; ``wait`` returns when the step's copies are done."""
        with self._changed:
            self._reads += ((digest, row, source, wait) for digest, row, source in files.reads)
            self._writes += ((digest, row, windows, wait) for digest, row, windows in files.writes)
            self._changed.notify_all()

    def reset(self) -> None:
        """Drop all reads and writes, and wait for the one under way: then no row is used any more."""
        with self._changed:
            self._reads.clear()
            self._writes.clear()
            self._changed.wait_for(lambda: not self._is_busy)
            self._reads.clear()  # what was to be asked for again
            self._asked_again.clear()
            self._result = self._result._replace(read=(), written=())

    def take_result(self, wait_seconds: float = 0.0) -> FileResult:
        """What has ended since the last call. Waits so long for something to end, if anything is to be done."""
        with self._changed:
            if wait_seconds:
                self._changed.wait_for(lambda: self._has_news or not self._is_working, wait_seconds)
            result, self._result = self._result, FileResult()
            return result

    def close(self) -> None:
        """Drop what is not begun, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self.folder.close()

    @property
    def _has_news(self) -> bool:
        return bool(self._result.read or self._result.written)

    @property
    def _is_working(self) -> bool:
        return bool(self._reads or self._writes or self._is_busy)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                while not (reads := self._next_reads()) and not (self._writes or self._is_closed):
                    waiting = (self._asked_again[source] for _, _, source, _ in self._reads)
                    left = min([self._next_scan, *waiting]) - time.monotonic()
                    if self._next_scan <= time.monotonic():
                        break
                    self._changed.wait(max(left, 1e-4))
                if self._is_closed:
                    return
                self._is_busy = True
                write = self._writes.popleft() if self._writes and not reads else None
            began = time.perf_counter()
            if reads:
                news = self._read(reads)
            elif write is not None:
                news = self._write(*write)
            else:
                news = self._scan()
            with self._changed:
                last = self._result
                self._result = FileResult(
                    last.read + news.read,
                    last.written + news.written,
                    last.found + news.found,
                    last.lost + news.lost,
                    last.num_evicted + news.num_evicted,
                    last.file_seconds + time.perf_counter() - began,
                    is_coming=last.is_coming or news.is_coming,
                )

    def _next_reads(self) -> list[_Job]:
        """The next read; from another engine, a few that follow, since each way there and back takes time.

        One whose next block was not there yet is asked for that alone, after a while.
        """
        now = time.monotonic()
        first = next((one for one in self._reads if self._asked_again.get(one[2], 0.0) <= now), None)
        if first is None:
            return []
        most = 1 if first[2] is None or first[2] in self._asked_again else _MOST_READS
        reads = list(itertools.islice((one for one in self._reads if one[2] == first[2]), most))
        for one in reads:
            self._reads.remove(one)
        return reads

    def _read(self, reads: Sequence[_Job]) -> FileResult:
        for *_, wait in reads:
            wait()
        began, source = time.perf_counter(), reads[0][2]
        found = self.folder.read_all([Room(digest, *self._rows(row)) for digest, row, *_ in reads], source)
        seconds = (time.perf_counter() - began) / len(reads)
        read, left = list[tuple[bytes, tuple[int, ...] | None, float]](), list[_Job]()
        for one, windows in zip(reads, found, strict=True):
            if isinstance(windows, NotYet):
                left.append(one)
            else:
                read.append((one[0], windows, seconds))
        with self._changed:
            self._asked_again.pop(source, None)
            if left:
                self._asked_again[source] = time.monotonic() + _ASK_SECONDS
                self._reads.extendleft(reversed(left))
        is_coming = any(isinstance(one, NotYet) and one.is_coming for one in found)
        return FileResult(read=tuple(read), is_coming=is_coming)

    def _write(self, digest: bytes, row: int, windows: tuple[int, ...], wait: Callable[[], object]) -> FileResult:
        wait()
        own, of_windows = self._rows(row)
        is_written, gone = self.folder.write(digest, [own, *(of_windows[number] for number in windows)], windows)
        return FileResult(written=((digest, is_written),), lost=tuple(gone), num_evicted=len(gone))

    def _scan(self) -> FileResult:
        self._next_scan = time.monotonic() + _SCAN_SECONDS
        with contextlib.suppress(OSError):
            found, lost = self.folder.scan()
            return FileResult(found=tuple(found), lost=tuple(lost))
        return FileResult()
