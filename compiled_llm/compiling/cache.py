"""Compiled functions kept on disk, each under a readable key of everything that its code depends on.

An entry is one file ``NAME-DIGEST.graph``, so that it exists whole or not at all: a line with the SHA-256 of the rest,
a line of JSON with the key's fields, and torch's bytes. A start that finds its entries neither traces nor compiles. One
that does not find them can tell which field was different the last time. Entries that no start used for a month are
deleted.

An entry is code. Only the user can write to the directory (``check_trusted``, before a start), and the only entries
from elsewhere are those of a bundle that the user names (see bundle.py).
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

from compiled_llm.compiling.argument_specs import settings, specs_of
from compiled_llm.config import EngineLimits
from compiled_llm.hardware import hardware
from compiled_llm.models.config import ModelConfig
from compiled_llm.ops import native
from compiled_llm.ops.torch_private import compiler_settings
from compiled_llm.ops.user_warnings import warn

_PACKAGE = Path(__file__).parents[1]
# Files whose text decides what is traced: after a change of any of them no entry is found.
_SOURCES = ("models/**/*.py", "ops/**/*.py", "step/*.py", "compiling/*.py")

_DIGESTS = ("arguments", "code")  # fields that mean nothing to a reader
_SUFFIX = ".graph"
_UNUSED_SECONDS = 30 * 24 * 3600

Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A compiled function on disk: its key's fields, facts about it, and the code as ``compiler.to_bytes`` gives it."""

    fields: Fields
    facts: Fields
    payload: bytes


class CompileCache:
    """Entries of one machine and one model. ``fields``: JSON, the part of the key that all functions share."""

    def __init__(self, directory: Path, fields: Fields) -> None:
        self.directory = directory
        self.fields = json.loads(json.dumps(dict(fields)))  # tuples become lists, as they are read from disk
        self.built: dict[str, tuple[str, float]] = {}  # what other processes compiled in this start: why, seconds
        self.used: list[Path] = []  # files of the entries that were found or stored
        self._unwritten: dict[Path, Entry] = {}  # entries that could not be written to disk, for this start alone

    def key_of(self, name: str, function: FunctionType, args: tuple) -> dict[str, Any]:
        """All fields of one function's key; its own code and the arguments' specs are digests."""
        closed_over = [_text(cell.cell_contents) for cell in function.__closure__ or ()]
        defaults = [*map(_text, function.__defaults__ or ()), *map(_text, (function.__kwdefaults__ or {}).items())]
        code = {"code": _code(function.__code__), "closed_over": closed_over, "defaults": defaults}
        return {
            "function": name,
            **self.fields,
            "code": digest(code)[:16],
            "arguments": hashlib.sha256(repr(specs_of(args)).encode()).hexdigest()[:16],
        }

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
        stored = []
        for path in self.directory.glob(f"{key['function']}-*{_SUFFIX}"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError), path.open("rb") as file:
                file.readline()
                stored.append(dict(json.loads(file.readline())["fields"]))
        if not stored:
            return "nothing of that name is stored"
        nearest = min((differences(fields, key) for fields in stored), key=len)
        return "; ".join(nearest) or "the stored file is gone"


def engine_cache(
    model_config: ModelConfig, limits: EngineLimits, dtype: torch.dtype, cache_dtypes: Sequence[torch.dtype]
) -> CompileCache:
    """The cache of an engine on this CPU, in the user's cache directory."""
    fields = {
        **machine_fields(),
        **{f"model.{name}": value for name, value in dataclasses.asdict(model_config).items()},
        "dtype": str(dtype),
        "kv_cache_dtypes": [str(layer) for layer in cache_dtypes],
        "block_size": limits.block_size,
        "max_model_len": limits.max_model_len,
        "largest_decode_bucket": limits.decode_bucket_sizes[-1],
    }
    return CompileCache(native.cache_directory() / "graphs", fields)


def differences(was: Fields, now: Fields) -> list[str]:
    """The fields in which two keys differ, as "block_size is 32 and was 16"; digests only if nothing else differs."""
    names = [name for name in {**now, **was} if now.get(name) != was.get(name)]
    readable = [name for name in names if name not in _DIGESTS]
    return [f"{name} is {now.get(name)!r} and was {was.get(name)!r}" for name in readable or names]


def machine_fields() -> dict[str, Any]:
    """What code for this CPU depends on besides the model and the arguments: equal on all machines of a kind."""
    fields = hardware(torch.device("cpu")) | {
        "torch_directory": str(Path(torch.__file__).parent),  # the generated code's build names torch's headers
        "python": sys.version.split()[0],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "compiler": native.compiler(),
        "sources": sources_digest(),
        **code_settings(),
    }
    fields.pop("cpus")  # code depends on the number of threads, not of CPUs
    fields.pop("isa", None)  # the kernels that it limits are called by compiled code, and are no part of it
    return fields


def sources_digest() -> str:
    """A digest of the engine's files that are traced or that compile."""
    hashed = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(_PACKAGE.glob(pattern)):
            hashed.update(f"{path.name}\n".encode() + path.read_bytes())
    return hashed.hexdigest()[:16]


def code_settings() -> dict[str, Any]:
    """torch's settings in this process that go into compiled code, besides its number of threads: JSON values."""
    return {**settings(), "default device": str(torch.get_default_device()), "torch_config": compiler_settings()}


def digest(fields: Fields) -> str:
    """A digest of JSON values that does not depend on their order."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _text(value: Any) -> str:
    """The text of a value that a function closes over; for a function without its address."""
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, FunctionType) else repr(value)


def _code(code: CodeType) -> list[Any]:
    """The instructions, names and constants of a code object, without its own name, file and lines."""
    constants = [_code(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that no other process ever sees half of it. After an ``OSError`` nothing is left of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
