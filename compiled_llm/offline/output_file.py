"""OutputFile: the lines of a run, in a file that one process at a time writes and a later one resumes.

A line is written when its row ends, with one write, so it survives the end of the process at any moment. What the
machine itself loses when it goes down is bounded by an fsync every few seconds.
"""

import contextlib
import errno
import fcntl
import os
import stat
import sys
import time
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from compiled_llm.offline.files import naming, replacing, sync_directory
from compiled_llm.offline.formats import LONGEST_START, index_of, is_error

SYNC_SECONDS = 5.0
_STARTS = (b'{"index": ', b'{"id": "batch_req_')  # of all lines that a run writes
_WRITTEN_BYTES = 2**20
_CHUNK_BITS = 2048  # in an integer of 300 bytes


class RowSet:
    """A set of row numbers, a bit each: 10,000,000 take 2 MB, a few 300 bytes each at most, however large they are."""

    def __init__(self) -> None:
        self._chunks: dict[int, int] = {}  # number // _CHUNK_BITS -> a bit for each of its numbers
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, index: int) -> bool:
        return bool(self._chunks.get(index // _CHUNK_BITS, 0) >> index % _CHUNK_BITS & 1)

    def add(self, index: int) -> bool:
        """Put it in; returns whether it is new."""
        if index in self:
            return False
        number = index // _CHUNK_BITS
        self._chunks[number] = self._chunks.get(number, 0) | 1 << index % _CHUNK_BITS
        self._count += 1
        return True

    @property
    def highest(self) -> int | None:
        """The largest number; None of an empty set."""
        last = max(self._chunks, default=None)
        return None if last is None else last * _CHUNK_BITS + self._chunks[last].bit_length() - 1


class OutputFile:
    """The file, locked from the moment it is opened until it is closed.

    As a context manager: if an exception ends the run, it says on stderr how many rows there are, or removes a new,
    empty file.

    Args:
        path: a new file; with ``resume`` also one that an earlier run wrote. Its last line, if a crash cut it off, is
            removed.

    Attributes:
        done: rows that it has a line of.
        num_failed: how many of the lines are errors.
        is_new: it was not there.

    Raises:
        ValueError: the file exists and ``resume`` is False, another process writes to it, or it has lines that no run
            writes. It is left as it is.
        OSError: it cannot be created, read or written.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self.done = RowSet()
        self.num_failed = 0
        self._size = 0
        self._is_in_order = True
        with naming(f"--output {path}"):
            self._descriptor, self.is_new = _open(path)
        try:
            self._lock()
            if not self.is_new and not resume:
                raise ValueError(f"--output {path} exists: give --resume to go on with it, or another name")
            self._read()
            with naming(f"--output {path}"):
                if self.is_new:
                    sync_directory(self._target().parent)
                elif self._size != os.fstat(self._descriptor).st_size:
                    os.ftruncate(self._descriptor, self._size)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._is_synced, self._synced = True, time.monotonic()

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None and self.is_new and not self.done:
            with contextlib.suppress(OSError):
                if self._has_name():  # else it is the file of somebody else
                    self.path.unlink()  # before the lock is free, so that no other run has begun with it
            os.close(self._descriptor)
            return
        if kind is not None and kind is not SystemExit and self.done:
            print(self.describe(), file=sys.stderr)
        self.close()

    def write(self, index: int, line: bytes, failed: bool) -> None:
        """Append the line of row ``index``, that of an error if it ``failed``.

        ``OSError`` if it cannot be; then no part of it is left in the file.
        """
        assert index not in self.done, f"row {index} ends twice"
        with naming(f"--output {self.path}"):
            try:
                _write_all(self._descriptor, line)
            except BaseException:
                os.ftruncate(self._descriptor, self._size)
                raise
            self._size += len(line)
            self._is_in_order &= index == len(self.done)
            self.done.add(index)
            self.num_failed += failed
            self._is_synced = False
        self.sync_if_due()

    def sync_if_due(self) -> None:
        """Let what was written survive that the machine goes down, some seconds after the last time.

        ``OSError`` if it does not, or is not in the file of that name.
        """
        if not self._is_synced and time.monotonic() - self._synced >= SYNC_SECONDS:
            with naming(f"--output {self.path}"):
                self._sync()

    def remove_errors(self) -> None:
        """Remove the lines of errors, so that their rows are served again.

        Raises:
            OSError: they cannot be removed; the file is left as it is.
        """
        if self.num_failed:
            self._replace(line for line in self._lines() if not is_error(line))

    def put_in_order(self) -> None:
        """Put the lines in the order of their rows, when every row has one.

        Raises:
            ValueError: some row has none.
            OSError: the file cannot be written anew; it is left as it is.
        """
        if not self._is_in_order:
            self._replace(_lines_in_order(self._descriptor, self._lines(), len(self.done)))

    def describe(self) -> str:
        """For a run that ends before its rows do."""
        return f"{self.path} holds {len(self.done)} rows; --resume serves the others"

    def close(self) -> None:
        """Close it and give up the lock. ``OSError`` if what was written is not in the file of that name."""
        try:
            with naming(f"--output {self.path}"):
                self._sync()
        finally:
            os.close(self._descriptor)

    def _sync(self) -> None:
        """Let what was written survive that the machine goes down, and look that nobody else touched the file."""
        os.fsync(self._descriptor)
        self._is_synced, self._synced = True, time.monotonic()
        if not self._has_name():
            raise OSError(errno.ESTALE, "it was removed or replaced while the run wrote to it, and its rows are lost")
        if os.fstat(self._descriptor).st_size != self._size:
            raise OSError(errno.ESTALE, "another program changed it while the run wrote to it")

    # -- What an earlier run left

    def _target(self) -> Path:
        """The file itself, where ``path`` is a symbolic link."""
        return Path(os.path.realpath(self.path))

    def _has_name(self) -> bool:
        """Whether the open file is the one at ``path``."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise ValueError(f"--output must be a regular file, given {self.path}")
        _take_lock(self._descriptor, self.path)
        if not self._has_name():
            raise ValueError(f"--output {self.path} was removed or replaced by another process: run again")

    def _lines(self) -> Iterator[bytes]:
        with open(os.dup(self._descriptor), "rb", 2**20) as file:
            file.seek(0)
            start = file.read(LONGEST_START)
            if not _may_be_ours(start.rstrip(b"\0")):
                index_of(start)  # it raises; a file that no run wrote may be one line of any length
            file.seek(0)
            yield from file

    def _read(self) -> None:
        """Note the rows that the file holds, and its size without a last line that was cut off."""
        self.done, self.num_failed, self._size, self._is_in_order = RowSet(), 0, 0, True
        number = 1
        try:
            for line in self._lines():
                if not line.endswith(b"\n") and _may_be_ours(line.rstrip(b"\0")):
                    break
                self._note(line)
                number += 1
        except ValueError as error:
            raise ValueError(
                f"--output {self.path}, line {number}: {error}. The file is left as it is: give another --output"
            ) from error

    def _note(self, line: bytes) -> None:
        """A line of an earlier run. ``ValueError`` if no run writes it."""
        index = index_of(line)
        if not line.endswith(b"}\n"):
            raise ValueError("it does not end as a JSON object")
        self._is_in_order &= index == len(self.done)
        if not self.done.add(index):
            raise ValueError(f"row {index} was there in an earlier line")
        self.num_failed += is_error(line)
        self._size += len(line)

    def _replace(self, lines: Iterable[bytes]) -> None:
        """Go on with a file that has ``lines`` alone, and takes the place of this one when it is whole."""
        target = self._target()
        with naming(f"--output {target}"):
            with replacing(target, "kept", 0o600) as descriptor:
                _take_lock(descriptor, self.path)
                _write_lines(descriptor, lines)
                os.fchmod(descriptor, stat.S_IMODE(os.fstat(self._descriptor).st_mode))
            os.close(self._descriptor)
            self._descriptor = descriptor
            sync_directory(target.parent)
        self._read()


def _may_be_ours(start: bytes) -> bool:
    """Whether ``start`` may be the start of a line of a run, cut off anywhere; it may be empty.

    What follows a line that was cut off when a machine went down may be zeros: a file system may know the size of a
    file before its content is on the disk.
    """
    return any(start.startswith(known[: len(start)]) for known in _STARTS)


def _lines_in_order(descriptor: int, lines: Iterable[bytes], num_rows: int) -> Iterator[bytes]:
    """The lines of an output file in the order of their rows, each read a second time from its place: 16 bytes a row.

    Args:
        descriptor: of the file.
        lines: all its lines, from its start on.
        num_rows: the file must have the rows from 0 to ``num_rows`` - 1.

    Raises:
        ValueError: it has other rows.
        OSError: it cannot be read.
    """
    starts, sizes = array("q", bytes(8 * num_rows)), array("q", bytes(8 * num_rows))
    start = 0
    for line in lines:
        index = index_of(line)
        if index >= num_rows:
            raise ValueError(f"row {index} is in the file, and one of the first {num_rows} rows is not")
        starts[index], sizes[index] = start, len(line)
        start += len(line)
    for start, size in zip(starts, sizes, strict=True):
        yield os.pread(descriptor, size, start)


def _write_lines(descriptor: int, lines: Iterable[bytes]) -> None:
    """In large writes."""
    held, size = [], 0
    for line in lines:
        held.append(line)
        size += len(line)
        if size >= _WRITTEN_BYTES:
            _write_all(descriptor, b"".join(held))
            held, size = [], 0
    _write_all(descriptor, b"".join(held))


def _write_all(descriptor: int, content: bytes) -> None:
    written = 0
    while written < len(content):
        written += os.write(descriptor, content[written:])


def _take_lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _lock_holder(os.fstat(descriptor))
        raise ValueError(f"--output {path} is being written by {holder}: wait for it, or give another name") from None
    except OSError as error:
        raise OSError(f"--output {path} cannot be locked: {error.strerror}") from error


def _open(path: Path) -> tuple[int, bool]:
    """(file descriptor, whether the file is new). Opening never waits, whatever ``path`` is."""
    flags = os.O_RDWR | os.O_APPEND | os.O_NONBLOCK
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        return os.open(path, flags), False


def _lock_holder(status: os.stat_result) -> str:
    """The process that holds the lock on a file, if Linux shows it."""
    device = status.st_dev
    key = f"{os.major(device):02x}:{os.minor(device):02x}:{status.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():  # "1: FLOCK ADVISORY WRITE 1234 fe:00:5678 0 EOF"
            _, kind, *_, process, file, _, _ = line.split()
            if kind == "FLOCK" and file == key and int(process) > 0:
                return f"process {process}"
    return "another process"
