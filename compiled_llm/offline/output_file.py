"""OutputFile: the lines of a run, in a file that one process at a time writes and a later one resumes.

A line is written when its row ends, with one write, so it survives the end of the process at any moment. What the
machine itself loses when it goes down is bounded by an fsync every few seconds.
"""

import contextlib
import fcntl
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from compiled_llm.offline.answers import index_of, is_error
from compiled_llm.offline.process import naming
from compiled_llm.offline.row_set import RowSet

SYNC_SECONDS = 5.0
_STARTS = (b'{"index": ', b'{"id": "batch_req_')  # of all lines that a run writes


class OutputFile:
    """The file, locked from the moment it is opened until it is closed.

    As a context manager: if an exception ends the run, it says on stderr how many rows there are, or removes a new,
    empty file.

    Args:
        path: a new file; with ``resume`` also one that an earlier run wrote. Its last line, if a crash cut it off, is
            removed.
        retry_errors: remove the lines of errors too, by way of a new file that takes the place of the old one.

    Attributes:
        done: rows that it has a line of.
        num_failed: how many of these are errors.
        is_new: it was not there.

    Raises:
        ValueError: the file exists and ``resume`` is False, another process writes to it, or it has lines that no run
            writes. It is left as it is.
        OSError: it cannot be created, read or written.
    """

    def __init__(self, path: Path, *, resume: bool, retry_errors: bool = False) -> None:
        self.path = path
        self.done = RowSet()
        self.num_failed = 0
        with naming(f"--output {path}"):
            self._descriptor, self.is_new = _open(path)
        try:
            self._lock()
            if not self.is_new and not resume:
                raise ValueError(f"--output {path} exists: give --resume to go on with it, or another name")
            self._size = self._read()
            with naming(f"--output {path}"):
                os.ftruncate(self._descriptor, self._size)
                if retry_errors and self.num_failed:
                    self._remove_errors()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._synced = time.monotonic()

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None and kind is not SystemExit and self.done:
            print(self.describe(), file=sys.stderr)
        elif kind is not None and self.is_new and not self.done:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self.close()

    def write(self, index: int, line: bytes, failed: bool) -> None:
        """Append the line of row ``index``, that of an error if it ``failed``.

        ``OSError`` if it cannot be; then no part of it is left in the file.
        """
        assert index not in self.done, f"row {index} ends twice"
        written = 0
        with naming(f"--output {self.path}"):
            try:
                while written < len(line):
                    written += os.write(self._descriptor, line[written:])
            except BaseException:
                os.ftruncate(self._descriptor, self._size)
                raise
            self._size += len(line)
            self.done.add(index)
            self.num_failed += failed
            now = time.monotonic()
            if now - self._synced >= SYNC_SECONDS:
                os.fsync(self._descriptor)
                self._synced = now

    def describe(self) -> str:
        """For a run that ends before its rows do."""
        return f"{self.path} holds {len(self.done)} rows; --resume serves the others"

    def close(self) -> None:
        """Close it and give up the lock. ``OSError`` if the file system could not keep what was written."""
        try:
            with naming(f"--output {self.path}"):
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    # -- What an earlier run left

    def _lock(self) -> None:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"--output must be a regular file, given {self.path}")
        _take_lock(self._descriptor, self.path)
        if not os.path.exists(self.path) or not os.path.samestat(status, os.stat(self.path)):
            raise ValueError(f"--output {self.path} was removed or replaced by another process: run again")

    def _lines(self) -> Iterator[bytes]:
        with open(os.dup(self._descriptor), "rb", 2**20) as file:
            file.seek(0)
            yield from file

    def _read(self) -> int:
        """Note the rows that the file holds; returns its size without a last line that was cut off."""
        size = 0
        for number, line in enumerate(self._lines(), 1):
            if not line.endswith(b"\n") and any(line.startswith(start[: len(line)]) for start in _STARTS):
                break
            try:
                index = index_of(line)
                if not line.endswith(b"}\n"):
                    raise ValueError("it does not end as a JSON object")
                if not self.done.add(index):
                    raise ValueError(f"row {index} was there in an earlier line")
            except ValueError as error:
                raise ValueError(f"--output {self.path}, line {number}: {error}. The file is left as it is") from error
            self.num_failed += is_error(line)
            size += len(line)
        return size

    def _remove_errors(self) -> None:
        """Go on with a new file without the lines of errors, which takes the name of the old one when it is whole."""
        kept = self.path.with_name(f"{self.path.name}.kept")
        descriptor = os.open(kept, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            _take_lock(descriptor, kept)
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(self._descriptor).st_mode))
            done, size = RowSet(), 0
            with open(os.dup(descriptor), "wb", 2**20) as file:
                for line in self._lines():
                    if not is_error(line):
                        done.add(index_of(line))
                        size += file.write(line)
            os.fsync(descriptor)
            os.replace(kept, self.path)
            sync_directory(self.path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor, self._size, self.done, self.num_failed = descriptor, size, done, 0


def sync_directory(directory: Path) -> None:
    """Let the names of files in a directory survive that the machine goes down."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
