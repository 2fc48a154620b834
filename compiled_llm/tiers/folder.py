"""BlockFolder: files of blocks of one model and layout, bounded in total, shared by engines and kept over restarts.

Any number of engines of one user may share a folder: a file is whole or not there, all engines write the same under a
name, and one that is gone when it is read is computed again. The folder must be this user's own, and nobody else may
write to it or to what is above it. Once an hour those of other keys are looked at: see ``unused_folders.py``.
"""

import contextlib
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from compiled_llm.ops.trusted_paths import check_trusted_directory
from compiled_llm.scheduling.request import BlockSource
from compiled_llm.tiers.block_file import (
    HEADER_BYTES,
    BadFileError,
    digest_of,
    name_of,
    read_file,
    remove_partial,
    write_file,
)
from compiled_llm.tiers.file_thread import Read, Room
from compiled_llm.tiers.unused_folders import open_used, remove_unused

_FREED = 0.95  # of the most bytes are left when files have to make room, so that they need not at each file
_CLEANING_SECONDS, _FIRST_CLEANING = 3600.0, 20.0  # between two looks for unused folders, and until the first
_TOUCHED_SECONDS = 60.0  # a file that was used within so many seconds need not be marked as used again


class BlockFolder:
    """The files of one key. All calls may wait for the disk.

    Args:
        path: above the folders of all keys; made where it is missing, with mode 0700.
        key: SHA-256 of all that a block's bytes depend on besides the facts in its digest.
        most_bytes: of all files of the folder.

    Attributes:
        known: digest -> bytes and time of last use, of the files that the last ``scan`` or this engine made.

    Raises:
        ValueError: others may write to ``path``, or it is not this user's.
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, key: bytes, most_bytes: int) -> None:
        self.path, self.key, self.most_bytes = path / key.hex(), key, most_bytes
        self._folder = open_used(self.path)
        try:
            check_trusted_directory(self.path, "KV blocks", "kv_disk_path")
        except BaseException:
            os.close(self._folder)
            raise
        self._next_cleaning = time.monotonic() + _FIRST_CLEANING
        self.known: dict[bytes, tuple[int, float]] = {}
        self._total = 0  # bytes of these

    def close(self) -> None:
        os.close(self._folder)

    def scan(self) -> tuple[set[bytes], set[bytes]]:
        """Look at all files again. Returns the digests of those that others have made and removed since.

        Files that a writer left behind when it was killed are removed, and now and then folders that nobody uses.
        """
        if time.monotonic() >= self._next_cleaning:
            self._next_cleaning = time.monotonic() + _CLEANING_SECONDS
            with contextlib.suppress(OSError):
                remove_unused(self.path.parent, self.most_bytes)
        found: dict[bytes, tuple[int, float]] = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                digest = digest_of(entry.name)
                if digest is None:
                    remove_partial(self._folder, entry.name)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                        found[digest] = status.st_size, status.st_mtime
        before, self.known = self.known, found
        self._total = sum(size for size, _ in found.values())
        return found.keys() - before.keys(), before.keys() - found.keys()

    def read_all(self, blocks: Sequence[Room], source: BlockSource | None) -> list[Read]:
        """See ``BlockStore``."""
        assert source is None, "files are this machine's"
        return [self.read(*block) for block in blocks]

    def read(self, digest: bytes, own: memoryview, of_windows: Sequence[memoryview]) -> tuple[int, ...] | None:
        """Read a block, see ``read_file``. None: there is no file, or none that can be used: it is removed then."""
        try:
            windows = read_file(self._folder, self.key, digest, own, of_windows)
        except BadFileError as error:
            if error.is_own:
                self._remove(digest)
            self._forget(digest)
            return None
        except OSError:
            self._forget(digest)
            return None
        size, used = self.known.get(digest, (sum(map(len, (own, *of_windows))), 0.0))
        now = time.time()
        if now - used > _TOUCHED_SECONDS:
            with contextlib.suppress(OSError):
                os.utime(name_of(digest), dir_fd=self._folder, follow_symlinks=False)
        self._note(digest, size, now)
        return windows

    def write(self, digest: bytes, parts: Sequence[memoryview], windows: Sequence[int]) -> tuple[bool, list[bytes]]:
        """Write a block, and make room for it. Returns whether it is there, and the digests of files that made room."""
        gone = self._make_room(HEADER_BYTES + sum(map(len, parts)))
        try:
            size = write_file(self._folder, self.key, digest, parts, windows)
        except OSError:  # the disk is full, or not there any more
            return False, gone
        self._note(digest, size, time.time())
        return True, gone

    def _make_room(self, size: int) -> list[bytes]:
        """Remove the least recently used files until ``size`` bytes more are within the bound."""
        if self._total + size <= self.most_bytes:
            return []
        before = set(self.known)
        self.scan()  # others may have used, written and removed some
        if self._total + size > self.most_bytes:
            for digest in sorted(self.known, key=lambda digest: self.known[digest][1]):
                if self._total + size <= _FREED * self.most_bytes:
                    break
                self._remove(digest)
                self._forget(digest)
        return list(before - self.known.keys())

    def _note(self, digest: bytes, size: int, used: float) -> None:
        self._forget(digest)
        self.known[digest] = size, used
        self._total += size

    def _forget(self, digest: bytes) -> None:
        self._total -= self.known.pop(digest, (0, 0.0))[0]

    def _remove(self, digest: bytes) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name_of(digest), dir_fd=self._folder)
