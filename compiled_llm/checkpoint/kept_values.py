"""What transformers made of a model's small files, kept for later starts: to import it takes longer than to use it.

An entry is a file ``NAME-DIGEST.kept``: the SHA-256 of the rest, and a pickle. The digest in its name is of the files,
of the packages that read them and of this project's own code, so an entry never outlives any of them. A pickle can be
code, as all in the cache directory is: nobody else may write there. Entries that no start used for a month are deleted.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from compiled_llm.models.files import MAX_TOKENIZER_BYTES, open_file
from compiled_llm.ops.native import cache_directory
from compiled_llm.ops.trusted_paths import check_trusted, make_directory
from compiled_llm.ops.user_warnings import warn
from compiled_llm.system.whole_files import write_whole

_PACKAGE = Path(__file__).parents[1]
_SOURCES = ("models/*.py", "models/*.json", "models/fallback/*.py", "text/*.py")  # what reads the files
_READERS = ("tokenizers", "torch", "transformers")
_UNUSED_SECONDS = 30 * 24 * 3600

Value = TypeVar("Value")


def kept(name: str, files: Iterable[Path], make: Callable[[], Value]) -> Value:
    """``make()``, or what it returned in an earlier start on the same ``files``; with the warnings that it gave.

    ``make`` depends on nothing else. Files that are missing count as such. What ``make`` raises is not kept.

    Raises:
        ValueError: others may write to the cache directory.
    """
    directory = cache_directory() / "models"
    try:
        path = directory / f"{name}-{_digest(files)[:32]}.kept"
    except (OSError, ValueError):  # a file that cannot be read, which ``make`` tells better
        return make()
    found = _read(path)
    if found is None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = make()
        found = value, [(str(warning.message), warning.category) for warning in caught]
        _write(path, pickle.dumps(found))
    value, given = found
    for message, category in given:
        warn(message, category)
    return value


_version = functools.cache(importlib.metadata.version)  # it reads a file of the package for several ms


def _digest(files: Iterable[Path]) -> str:
    hashed = hashlib.sha256(repr([_version(package) for package in _READERS]).encode())
    hashed.update(_own_code())
    for path in sorted(files):
        if not os.path.lexists(path):
            continue
        with open_file(path, MAX_TOKENIZER_BYTES) as file:
            content = file.read(MAX_TOKENIZER_BYTES + 1)
        hashed.update(f"\n{path} {len(content)}\n".encode() + content)
    return hashed.hexdigest()


@functools.cache
def _own_code() -> bytes:
    return b"".join(
        source.read_bytes() for source in sorted(source for pattern in _SOURCES for source in _PACKAGE.glob(pattern))
    )


def _read(path: Path) -> tuple | None:
    try:
        check_trusted(path.parent, below=False)  # which may not be sticky, as directories on the way may
        check_trusted(path)
        digest, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(content).hexdigest().encode() != digest:
        return None  # damaged: it is written again
    with contextlib.suppress(OSError):  # a read-only disk
        os.utime(path)
    return pickle.loads(content)


def _write(path: Path, content: bytes) -> None:
    """Where it cannot be written, the next start makes it again."""
    with contextlib.suppress(OSError):
        make_directory(path.parent)
        check_trusted(path.parent, below=False)
        oldest = time.time() - _UNUSED_SECONDS
        with os.scandir(path.parent) as others:
            for other in others:
                with contextlib.suppress(FileNotFoundError):  # another process is quicker
                    if other.stat().st_mtime < oldest:
                        os.unlink(other)
        write_whole(path, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
