"""A GGUF file as a directory in the layout of the hub: small files made of its header, and links to the file itself.

The directory lies in the cache, and is made once for a file; its name has a digest of the file's place, size and time.
Those that no start used for a month are deleted.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compiled_llm.checkpoint.gguf.architectures import config_of
from compiled_llm.checkpoint.gguf.header import Header, TensorPlace, read_header, tensor_bytes
from compiled_llm.checkpoint.gguf.names import Place, places
from compiled_llm.checkpoint.gguf.tokenizer import end_of_text_ids, read_vocabulary, tokenizer_config, tokenizer_json
from compiled_llm.checkpoint.stored_tensors import CheckpointError, StoredTensor, listed
from compiled_llm.models.config_file import parse_config
from compiled_llm.models.files import MAX_JSON_BYTES, read_json
from compiled_llm.models.quantized.ggml import BLOCKS, EXPERT, PLAIN
from compiled_llm.models.registry import family_of
from compiled_llm.ops.native import cache_directory
from compiled_llm.ops.trusted_paths import check_trusted, make_directory

_INDEX = "gguf.json"  # names in the hub's layout -> places in the files, as ``_as_json`` writes them
_UNUSED_SECONDS = 30 * 24 * 3600
_LONGEST = 80  # characters of a file's name in that of its directory
_FORMAT = 2  # of the directory: another one is made where this changes


def is_gguf(path: Path) -> bool:
    """Whether ``path`` is a GGUF file, or a directory of such, in which no other format has weights."""
    if path.suffix == ".gguf":
        return path.is_file()
    return path.is_dir() and not (path / "config.json").exists() and any(path.glob("*.gguf"))


def directory_of(path: Path) -> Path:
    """The directory for ``path``, as ``is_gguf`` knows it; made if there is none yet.

    Raises:
        ValueError: the file is damaged, or of a kind that is not supported; the message says what.
    """
    first = path if path.is_file() else _first(path)
    status = first.stat()
    identity = json.dumps([_FORMAT, str(first.resolve()), status.st_size, status.st_mtime_ns, _own_code()])
    parent = _parent()
    directory = parent / f"{first.stem[:_LONGEST]}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if parent.is_dir():
        check_trusted(parent)
    if not directory.is_dir():
        make_directory(parent)
        check_trusted(parent)
        _delete_unused(parent)
        with tempfile.TemporaryDirectory(dir=parent) as made:
            header = read_header(first)
            try:
                _write(Path(made) / "model", header)
            except CheckpointError:
                raise
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise CheckpointError(f"{first}: its metadata describe no model that can be read: {error}") from error
            try:
                os.rename(Path(made) / "model", directory)
            except OSError:
                if not directory.is_dir():  # else another process was faster
                    raise
    with contextlib.suppress(OSError):  # a read-only disk
        os.utime(directory)
    return directory


def _parent() -> Path:
    return cache_directory() / "gguf"


def _delete_unused(parent: Path) -> None:
    """Delete what no start used for a month."""
    for other in parent.iterdir():
        with contextlib.suppress(OSError):  # another process was faster
            if other.stat().st_mtime < time.time() - _UNUSED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)


def _first(directory: Path) -> Path:
    files = sorted(directory.glob("*.gguf"))
    first = [file for file in files if "-of-" not in file.name or "-00001-of-" in file.name]
    if len(first) != 1:
        raise CheckpointError(
            f"{directory}: holds {len(first)} models: {listed(one.name for one in first)}. Give one of the files"
        )
    return first[0]


def _own_code() -> str:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def _write(directory: Path, header: Header) -> None:
    architecture, config = config_of(header)
    vocabulary = read_vocabulary(header.metadata, str(header.paths[0]))
    made = parse_config(config)
    description = family_of(made).describe(made)
    found, left = places(header, architecture, made, description.stored)
    missing = [name for name, part in description.stored.items() if part.required and name not in found]
    stored = {name: _stored(header, name, place) for name, place in found.items()}
    beside: dict[str, list[Place]] = {}
    for place in found.values():
        beside.setdefault(place.tensor, []).append(place)
    wrong = [name for name, one in found.items() if not _fits(header.tensors[one.tensor], one, beside[one.tensor])]
    if missing or left or wrong:
        kinds_of_problem = (("lacks", missing), ("holds besides", left), ("has in another size", wrong))
        problems = [f"{what}: {listed(names)}" for what, names in kinds_of_problem if names]
        raise CheckpointError(
            f"{header.paths[0]}: is not the {architecture.name} that its metadata say: it {'; '.join(problems)}"
        )
    if kinds := _kinds(header, found):
        config["quantization_config"] = {"quant_method": "gguf", "kinds": kinds}
    directory.mkdir()
    for path in header.paths:
        (directory / path.name).symlink_to(path.resolve())
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": end_of_text_ids(vocabulary)})
    _write_json(directory / _INDEX, {name: _as_json(one) for name, one in stored.items()})
    if vocabulary is not None:
        _write_json(directory / "tokenizer_config.json", tokenizer_config(vocabulary))
        (directory / "tokenizer.json").write_text(tokenizer_json(vocabulary))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1))


def _kinds(header: Header, found: dict[str, Place]) -> dict[str, list[str]]:
    """Kind of blocks -> the layers whose weights are of it; the experts of a layer by one name."""
    kinds: dict[str, dict[str, None]] = {}
    for name, place in found.items():
        kind = header.tensors[place.tensor].kind
        if kind in BLOCKS:
            kinds.setdefault(kind, {})[EXPERT.sub(".experts.*.", name.removesuffix(".weight"))] = None
    return {kind: [*names] for kind, names in sorted(kinds.items())}


# -- Tensors


def has_index(directory: Path) -> bool:
    """Whether ``directory_of`` made it: no other place is believed to say where tensors lie."""
    return directory.parent == _parent() and (directory / _INDEX).exists()


def locate_gguf(directory: Path) -> dict[str, StoredTensor]:
    """Name in the hub's layout -> place of every tensor, for a directory that ``directory_of`` made."""
    index = read_json(directory / _INDEX, MAX_JSON_BYTES)
    return {
        name: StoredTensor(name, directory / file, dtype, tuple(shape), offset, heads, change)
        for name, (file, dtype, shape, offset, heads, change) in index.items()
    }


def _as_json(one: StoredTensor) -> list[Any]:
    return [one.path.name, one.dtype, one.shape, one.offset, one.heads, one.change]


def _stored(header: Header, name: str, place: Place) -> StoredTensor:
    held = header.tensors[place.tensor]
    elements = (place.part or 0) * math.prod(held.shape[1:]) + place.first * math.prod(place.shape[1:])
    dtype, shape, offset = held.kind, place.shape, held.offset + tensor_bytes(held.kind, (elements,))
    if held.kind in BLOCKS:
        dtype, shape = "U8", (*shape[:-1], tensor_bytes(held.kind, shape[-1:]))
    return StoredTensor(name, held.path, dtype, shape, offset, place.heads, place.change)


def _fits(held: TensorPlace, place: Place, beside: Sequence[Place]) -> bool:
    """Whether ``held`` has the size that the config implies of ``place`` and all that is in it, ``beside``.

    It has a matrix for each expert; dimensions of 1 are of no account.
    """
    shape = held.shape if place.part is None else held.shape[1:]
    if place.part is not None and held.shape[0] != len({other.part for other in beside}):
        return False
    rows = sum(math.prod(other.shape[:-1] or other.shape) for other in beside if other.part == place.part)
    if len(place.shape) == 1:
        return held.kind in PLAIN and math.prod(shape) == rows
    return (math.prod(shape[:-1]), shape[-1]) == (rows, place.shape[-1])
