"""Compiled functions kept on disk, each under a readable key of everything that its code depends on.

An entry is one file ``NAME-DIGEST.graph``, so that it exists whole or not at all: a line with the SHA-256 of the rest,
a line of JSON with the key's fields (keys.py), and ready code. A start that finds its entries neither traces nor
compiles. One that does not find them can tell which field was different the last time. Entries that no start used for a
month are deleted.

An entry is code. Only the user can write to the directory (``check_trusted``, before a start), and the only entries
from elsewhere are those of a bundle that the user names (see bundle.py).
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from compiled_llm.compiling.gpu_properties import GpuTarget
from compiled_llm.compiling.keys import (
    Fields,
    differences,
    digest,
    distance,
    gpu_fields,
    key_of,
    machine_fields,
    reason,
)
from compiled_llm.ops import native
from compiled_llm.ops.user_warnings import warn
from compiled_llm.system.whole_files import write_whole

_SUFFIX = ".graph"
_UNUSED_SECONDS = 30 * 24 * 3600
_LOCK_SECONDS = 0.1  # between two looks at a file that another process has locked


@dataclasses.dataclass(frozen=True)
class Entry:
    """A compiled function on disk: its key's fields, facts about it, and the code as ``ready_code`` gives it."""

    fields: Fields
    facts: Fields
    payload: bytes


class CompileCache:
    """Entries of one machine. ``fields``: JSON, the part of the key that all functions share."""

    def __init__(self, directory: Path, fields: Fields) -> None:
        self.directory = directory
        self.fields = json.loads(json.dumps(dict(fields)))  # tuples become lists, as they are read from disk
        self.built: dict[str, tuple[str, float]] = {}  # what other processes compiled in this start: why, seconds
        self.used: list[Path] = []  # files of the entries that were found or stored
        self._unwritten: dict[Path, Entry] = {}  # entries that could not be written to disk, for this start alone

    def key_of(self, name: str, function: FunctionType, args: tuple, depends: Fields) -> dict[str, Any]:
        """The function's key (``keys.key_of``). ``depends``: JSON, its own part beside the one that all share."""
        return key_of(name, function, args, {**self.fields, **json.loads(json.dumps(dict(depends)))})

    def find(self, key: Fields) -> Entry | str:
        """The entry of a key, or the reason why there is none."""
        path = self._path(key)
        if path in self._unwritten:
            return self._unwritten[path]
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return self._reason(key)
        except OSError as error:
            return f"the stored file cannot be read: {error}"
        sha256, _, rest = content.partition(b"\n")
        if hashlib.sha256(rest).hexdigest().encode() != sha256:
            return "the stored file is damaged"
        line, _, payload = rest.partition(b"\n")
        header = json.loads(line)
        if dict(key) != header["fields"]:
            return self._reason(key)
        with contextlib.suppress(OSError):  # on a read-only disk nothing is deleted either
            os.utime(path)
        self._note(path)
        return Entry(header["fields"], header["facts"], payload)

    def lacks(self, name: str, depends: Fields) -> bool:
        """Whether no entry of a function's name has these fields and those that all share, whatever its arguments."""
        wanted = {**self.fields, **json.loads(json.dumps(dict(depends)))}
        return not any(wanted.items() <= fields.items() for _, fields, _ in self.stored(name))

    def store(self, key: Fields, payload: bytes, facts: Fields) -> None:
        """Keep a compiled function. ``facts``: JSON values about it that are no part of the key.

        If it cannot be written to disk, this start alone has it, and a warning is given.
        """
        path, line = self._path(key), json.dumps({"fields": dict(key), "facts": dict(facts)}).encode()
        rest = line + b"\n" + payload
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._drop_unused()
            write_whole(path, hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
        except OSError as error:
            self._unwritten[path] = Entry(**json.loads(line), payload=payload)
            warn(f"{key['function']} is not kept, the next start compiles it again: {error}")
            return
        self._note(path)

    @contextlib.contextmanager
    def building(self, key: Fields, is_given_up: Callable[[], bool]) -> Iterator[None]:
        """No other process is in here with this key: who has waited may find what that has built.

        A process that ends leaves it. Where files cannot be locked, nobody waits.

        Args:
            is_given_up: asked now and then, whether waiting is of no use any more.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                file = stack.enter_context(self._path(key).with_suffix(".lock").open("a"))
                while not is_given_up():
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        time.sleep(_LOCK_SECONDS)
            yield

    def _drop_unused(self) -> None:
        """Delete files that no start used for a month, also those of a start that ended while it wrote."""
        oldest = time.time() - _UNUSED_SECONDS
        for path in self.directory.iterdir():
            with contextlib.suppress(OSError):  # another start deletes it too, or it is a directory
                if path.stat().st_mtime < oldest:
                    path.unlink()

    def _note(self, path: Path) -> None:
        if path not in self.used:
            self.used.append(path)

    def _path(self, key: Fields) -> Path:
        return self.directory / f"{key['function']}-{digest(key)[:16]}{_SUFFIX}"

    def _reason(self, key: Fields) -> str:
        """Why there is no entry: the differences to the most similar entry of the same function."""
        stored = [fields for _, fields, _ in self.stored(key["function"])]
        if not stored:
            return "nothing of that name is stored"
        nearest = min(stored, key=lambda fields: distance(fields, key))
        return reason(differences(nearest, key)) or "the stored file is gone"

    def stored(self, name: str) -> Iterator[tuple[float, Fields, Fields]]:
        """All entries of a function's name, "*" for all, those last used first.

        Of each the moment when it was used, its key, and the facts about it.
        """
        found = []
        for path in self.directory.glob(f"{name}-*{_SUFFIX}"):
            with contextlib.suppress(OSError):  # another start deletes it
                found.append((path.stat().st_mtime, path))
        for moment, path in sorted(found, reverse=True):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError), path.open("rb") as file:
                file.readline()
                header = json.loads(file.readline())
                yield moment, dict(header["fields"]), dict(header["facts"])


def engine_cache(target: GpuTarget | None = None) -> CompileCache:
    """The cache of this CPU, or of a GPU, in the user's cache directory."""
    fields = machine_fields() if target is None else gpu_fields(target)
    return CompileCache(native.cache_directory() / "graphs", fields)
