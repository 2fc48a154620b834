"""Compiled functions kept on disk, each under a readable key of everything that its code depends on.

An entry is two files: ``NAME-DIGEST.json`` with the key's fields, and ``NAME-DIGEST.bin``, which torch wrote and reads.
A start that finds its entries neither traces nor compiles. One that does not can say which field was another the last
time.

An entry is code. The directory belongs to the user alone, and nothing of another origin gets there but a bundle that
the user names (see compile_bundle.py).
"""

import dataclasses
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from compiled_llm.argument_specs import specs_of
from compiled_llm.config import Limits
from compiled_llm.machine import hardware
from compiled_llm.models.config import ModelConfig
from compiled_llm.ops import native

_PACKAGE = Path(__file__).parent
# Whose text decides what is traced: a change of any of them misses.
_SOURCES = (
    "models/*.py",
    "ops/*.py",
    "step.py",
    "sampler.py",
    "kv_cache.py",
    "compiler.py",
    "argument_specs.py",
    "compile_ahead.py",
    "compile_cache.py",
)

_DIGESTS = ("arguments", "code")  # they follow from other fields

Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A compiled function on disk: its key's fields, and what torch made of it."""

    fields: Fields
    facts: Fields
    payload: bytes


class CompileCache:
    """The entries of one machine and one model. ``fields``: JSON values that all functions of an engine share."""

    def __init__(self, directory: Path, fields: Fields) -> None:
        self.directory = directory
        self.fields = json.loads(json.dumps(dict(fields)))  # tuples become lists, as they are read from disk
        # Functions that other processes compiled in this start: why, and in how many seconds.
        self.built: dict[str, tuple[str, float]] = {}
        # Files of the entries that were found or stored.
        self.used: list[Path] = []

    def key_of(self, name: str, function: FunctionType, args: tuple) -> dict[str, Any]:
        """All fields of one function's key; its own code and the arguments' kinds go in as digests."""
        code = function.__code__
        closed_over = [_text(cell.cell_contents) for cell in function.__closure__ or ()]
        return {
            "function": name,
            **self.fields,
            "code": digest({"code": code.co_code.hex(), "names": list(code.co_names), "closed_over": closed_over})[:16],
            "arguments": hashlib.sha256(repr(specs_of(args)).encode()).hexdigest()[:16],
        }

    def find(self, key: Fields) -> Entry | str:
        """The entry of a key, or the reason why there is none."""
        path = self._path(key)
        try:
            header = json.loads(path.with_suffix(".json").read_text())
            payload = path.with_suffix(".bin").read_bytes()
        except (OSError, ValueError):
            return self._reason(key)
        if dict(key) != header.get("fields"):
            return self._reason(key)
        if hashlib.sha256(payload).hexdigest() != header.get("sha256"):
            return "the stored file is damaged"
        self._note(path)
        return Entry(header["fields"], header["facts"], payload)

    def store(self, key: Fields, payload: bytes, facts: Fields) -> None:
        """Keep what torch made. ``facts``: JSON values about it that are no part of the key."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(key)
        header = {"fields": dict(key), "facts": dict(facts), "sha256": hashlib.sha256(payload).hexdigest()}
        write_whole(path.with_suffix(".bin"), payload)
        write_whole(path.with_suffix(".json"), json.dumps(header, indent=1).encode())  # last: it makes the entry
        self._note(path)

    def _note(self, path: Path) -> None:
        files = [path.with_suffix(suffix) for suffix in (".json", ".bin")]
        self.used.extend(file for file in files if file not in self.used)

    def _path(self, key: Fields) -> Path:
        return self.directory / f"{key['function']}-{digest(key)[:16]}.any"

    def _reason(self, key: Fields) -> str:
        """Why a key misses: what differs from the entry of the same function that differs least."""
        stored = []
        for path in self.directory.glob(f"{key['function']}-*.json"):
            try:
                stored.append(json.loads(path.read_text())["fields"])
            except (OSError, ValueError, KeyError):
                continue
        if not stored:
            return "nothing of that name is stored"
        nearest = min((differences(fields, key) for fields in stored), key=len)
        return "; ".join(nearest) or "the stored file is gone"


def engine_cache(
    model_config: ModelConfig, limits: Limits, dtype: torch.dtype, cache_dtypes: Sequence[torch.dtype]
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
    """ "block_size is 32 and was 16" for each field in which two keys differ, digests only where nothing else does."""
    names = [name for name in {**now, **was} if now.get(name) != was.get(name)]
    readable = [name for name in names if name not in _DIGESTS]
    return [f"{name} is {now.get(name)!r} and was {was.get(name)!r}" for name in readable or names]


def machine_fields() -> dict[str, Any]:
    """What code for this CPU depends on besides the model and the arguments: the same on all machines of a kind."""
    fields = hardware(torch.device("cpu")) | {
        "torch_directory": str(Path(torch.__file__).parent),  # the generated code's build names torch's headers
        "python": sys.version.split()[0],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "compiler": native.compiler(),
        "sources": sources_digest(),
    }
    fields.pop("cpus")  # how many there are decides nothing: the number of threads does
    return fields


def sources_digest() -> str:
    """A digest of the engine's own files that are traced or that trace."""
    hashed = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(_PACKAGE.glob(pattern)):
            hashed.update(f"{path.name}\n".encode() + path.read_bytes())
    return hashed.hexdigest()[:16]


def digest(fields: Fields) -> str:
    """A digest of JSON values that does not depend on their order."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _text(value: Any) -> str:
    """A value that a function closes over, without the address that a function's own text has."""
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, FunctionType) else repr(value)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that no other process ever sees half of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)
