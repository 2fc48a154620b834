"""Folders of blocks that no engine uses any more: of other models, versions or machines. They are removed in time.

An engine holds a shared lock on its own folder as long as it runs. Whoever can lock a folder alone knows that nobody
uses it, and that nobody begins to until it is removed.
"""

import contextlib
import fcntl
import os
import re
import stat
import time
from pathlib import Path

from compiled_llm.ops.trusted_paths import make_directory
from compiled_llm.tiers.block_file import digest_of, remove_partial

UNUSED_SECONDS = 30 * 86400.0  # after which a folder is removed, however small
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_used(path: Path) -> int:
    """A descriptor of the folder ``path``, made where it is missing: it is used until that is closed."""
    while True:
        make_directory(path)
        with contextlib.suppress(FileNotFoundError):  # it was removed just now
            folder = os.open(path, _OPEN)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(folder, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(folder), os.stat(path)):
                    return folder
            os.close(folder)


def remove_unused(parent: Path, most_bytes: int) -> int:
    """Remove those folders of ``parent`` that nobody has used for 30 days, and the least recently used of the others.

    Only files of blocks are removed, and folders that have nothing else in them.

    Args:
        most_bytes: that the unused ones that are left may have together.

    Returns:
        How many files were removed.

    Raises:
        OSError: ``parent`` cannot be read.
    """
    with contextlib.ExitStack() as stack:
        above = os.open(parent, _OPEN & ~os.O_NOFOLLOW)  # a link to it is the user's choice
        stack.callback(os.close, above)
        unused = list[tuple[float, int, int, str]]()  # last use, bytes, descriptor, name
        for name in os.listdir(above):
            with contextlib.suppress(OSError):
                if re.fullmatch("[0-9a-f]{64}", name):
                    folder = os.open(name, _OPEN, dir_fd=above)
                    stack.callback(os.close, folder)
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(folder).st_uid == os.geteuid():
                        unused.append((*_use_of(folder), folder, name))
        num_removed, left = 0, sum(size for _, size, *_ in unused)
        for used, size, folder, name in sorted(unused):
            if left <= most_bytes and time.time() - used < UNUSED_SECONDS:
                continue
            left -= size
            num_removed += _empty(folder)
            with contextlib.suppress(OSError):  # something else is in it
                os.rmdir(name, dir_fd=above)
        return num_removed


def _use_of(folder: int) -> tuple[float, int]:
    """When its files were used last, and their bytes."""
    used, size = os.fstat(folder).st_mtime, 0
    with os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            used, size = max(used, status.st_mtime), size + status.st_size
    return used, size


def _empty(folder: int) -> int:
    num_removed = 0
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if digest_of(name) is None:
                remove_partial(folder, name)
            elif stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder)
                num_removed += 1
    return num_removed
