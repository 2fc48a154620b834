"""FileThread: moves blocks beside the steps, from and to files or other engines; rows of host memory are the worker's.

``BlockStore`` is what it moves them from and to.
"""

import contextlib
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

_Read = tuple[bytes, int, BlockSource | None, Callable[[], object]]


class Room(NamedTuple):
    """Memory for a block of this digest: of layers without a window, and of those with each."""

    digest: bytes
    own: memoryview
    of_windows: Sequence[memoryview]


class BlockStore(Protocol):
    """A place of blocks below host memory: ``BlockFolder``, or other engines (``BlockExchange``). Calls may wait.

    Attributes:
        key: SHA-256 of all that a block's bytes depend on besides its digest.
        known: digests of the blocks that are there.
    """

    key: bytes

    @property
    def known(self) -> Collection[bytes]: ...

    def read_all(self, blocks: Sequence[Room], source: BlockSource | None) -> list[tuple[int, ...] | None]:
        """Copy blocks to where there is room for them; returns the numbers of each one's windows; None: not there.

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
        self._reads: deque[_Read] = deque()
        self._writes: deque[tuple[bytes, int, tuple[int, ...], Callable[[], object]]] = deque()
        self._changed = threading.Condition()
        self._is_busy = self._is_closed = False
        self._result = FileResult()
        self._next_scan = time.monotonic() + _SCAN_SECONDS
        self._thread = threading.Thread(target=self._run, name="compiled-llm files", daemon=True)
        self._thread.start()

    def submit(self, files: FileOutput, wait: Callable[[], object]) -> None:
        """Begin what a step asks for; ``wait`` returns when the step's copies are done."""
        with self._changed:
            if files.resets:
                self._reads.clear()
                self._writes.clear()
                self._changed.wait_for(lambda: not self._is_busy)
                self._result = self._result._replace(read=(), written=())
            self._reads += ((digest, row, source, wait) for digest, row, source in files.reads)
            self._writes += ((digest, row, windows, wait) for digest, row, windows in files.writes)
            self._changed.notify_all()

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
                while not (self._reads or self._writes or self._is_closed):
                    left = self._next_scan - time.monotonic()
                    if left <= 0 or not self._changed.wait(left):
                        break
                if self._is_closed:
                    return
                self._is_busy = True
                reads = self._next_reads()
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
                )

    def _next_reads(self) -> list[_Read]:
        """The next read; from another engine, a few that follow, since each way there and back takes time."""
        reads = [self._reads.popleft()] if self._reads else []
        while self._reads and reads[0][2] is not None and self._reads[0][2] == reads[0][2] and len(reads) < _MOST_READS:
            reads.append(self._reads.popleft())
        return reads

    def _read(self, reads: Sequence[_Read]) -> FileResult:
        for *_, wait in reads:
            wait()
        began = time.perf_counter()
        found = self.folder.read_all([Room(digest, *self._rows(row)) for digest, row, *_ in reads], reads[0][2])
        seconds = (time.perf_counter() - began) / len(reads)
        return FileResult(read=tuple((one[0], windows, seconds) for one, windows in zip(reads, found, strict=True)))

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
