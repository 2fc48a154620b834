"""The header of a GGUF file: its metadata, and where each tensor lies.

Versions 2 and 3, little-endian: github.com/ggml-org/ggml, docs/gguf.md. Every count, size and offset is checked against
the length of the file before anything is made of it.
"""

import math
import mmap
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compiled_llm.checkpoint.stored_tensors import CheckpointError
from compiled_llm.models.files import open_file
from compiled_llm.models.quantized.ggml import BLOCKS, PLAIN

_MAX_TENSORS, _MAX_KEYS, _MAX_DIMENSIONS = 100_000, 65_536, 4
_MAX_STRING_BYTES = 1 << 24  # a chat template has some 10 KB
_MAX_NESTED = 3  # arrays in arrays
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8"}
_NUMBERS |= {12: "<f8"}
_KINDS = {block.number: kind for kind, block in BLOCKS.items()} | {plain[0]: kind for kind, plain in PLAIN.items()}
_SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")


class TensorPlace(NamedTuple):
    """A tensor of a file.

    Attributes:
        kind: of its elements, as ggml calls it: a name of ``BLOCKS`` or ``PLAIN``.
        shape: in row-major order, the last dimension that of a row.
        offset: of its first byte in the file.
    """

    name: str
    path: Path
    kind: str
    shape: tuple[int, ...]
    offset: int


class Header(NamedTuple):
    """What the headers of a model's files say.

    Attributes:
        paths: the files, more than one where the model is split.
        metadata: of the first file: numbers, strings, lists of strings, numpy arrays of numbers.
        tensors: of all files.
    """

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]


def read_header(path: Path) -> Header:
    """The header of the model that begins with ``path``: its first file, ``NAME-00001-of-0000N.gguf``, or its only one.

    Raises:
        ValueError: a file is missing, damaged or no GGUF file, of another version, or has a kind of tensor that is not
            supported.
    """
    paths = _files(path)
    metadata, tensors = _read(paths[0])
    for number, other in enumerate(paths[1:], 1):
        more, found = _read(other)
        if more.get("split.no") != number:
            raise CheckpointError(
                f"{other}: must be number {number} of {len(paths)} files, its own header says {more.get('split.no')}"
            )
        if repeated := sorted(tensors.keys() & found.keys()):
            raise CheckpointError(f"{other}: holds tensors of the files before: {', '.join(repeated[:8])}")
        tensors |= found
    expected = metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise CheckpointError(f"{paths[0]}: says {expected} tensors, its files hold {len(tensors)}")
    return Header(paths, metadata, tensors)


def _files(path: Path) -> tuple[Path, ...]:
    parts = _SPLIT.fullmatch(path.name)
    if parts is None:
        return (path,)
    begin, number, count = parts[1], int(parts[2]), int(parts[3])
    if number != 1:
        raise CheckpointError(
            f"{path}: is number {number} of {count} files; give the first, {begin}-00001-of-{parts[3]}.gguf"
        )
    paths = tuple(path.with_name(f"{begin}-{n:05}-of-{parts[3]}.gguf") for n in range(1, count + 1))
    if missing := [one.name for one in paths if not one.exists()]:
        raise CheckpointError(f"{path}: missing files of the same model: {', '.join(missing[:8])}")
    return paths


def _read(path: Path) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            if size < 24:
                raise CheckpointError(f"{path}: not a GGUF file, or cut off: it has {size} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Cursor(path, content, size).header()
    except OSError as error:
        raise CheckpointError(f"{path}: is not readable: {error}") from error


class _Cursor:
    """Reads one value after another, each checked against the end of the file."""

    def __init__(self, path: Path, content: mmap.mmap, size: int) -> None:
        self._path, self._content, self._size, self._at = path, content, size, 0

    def header(self) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
        if self._bytes(4, "the magic number") != b"GGUF":
            raise self._wrong("is no GGUF file: it does not begin with GGUF")
        version = self._number("<I", "the version")
        if version not in (2, 3):
            hint = "; it is big-endian" if version in (2 << 24, 3 << 24) else ""
            raise self._wrong(f"its version must be 2 or 3, found {version}{hint}. Convert the model again")
        num_tensors = self._count("tensors", _MAX_TENSORS)
        num_keys = self._count("keys of metadata", _MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a key of metadata")
            if key in metadata:
                raise self._wrong(f"has the key {key!r:.100} twice")
            metadata[key] = self._value(self._number("<I", key), key)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._wrong(f"general.alignment must be a power of two up to 2^20, found {alignment!r:.100}")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorPlace] = {}
        for name, kind, shape, offset in infos:
            if name in tensors:
                raise self._wrong(f"has the tensor {name!r:.100} twice")
            nbytes = tensor_bytes(kind, shape)
            if offset % alignment or start + offset + nbytes > self._size:
                raise self._wrong(
                    f"{name!r:.100} must lie within the file's {self._size} bytes, at a multiple of {alignment}; it "
                    f"begins at {start + offset} and has {nbytes}: the file is cut off or damaged, download it again"
                )
            tensors[name] = TensorPlace(name, self._path, kind, shape, start + offset)
        return metadata, tensors

    def _tensor_info(self) -> tuple[str, str, tuple[int, ...], int]:
        name = self._string("a tensor's name")
        num_dimensions = self._number("<I", name)
        if not 0 < num_dimensions <= _MAX_DIMENSIONS:
            raise self._wrong(f"{name!r:.100} must have 1 to {_MAX_DIMENSIONS} dimensions, found {num_dimensions}")
        shape = tuple(self._number("<Q", name) for _ in range(num_dimensions))[::-1]
        number, offset = self._number("<I", name), self._number("<Q", name)
        kind = _KINDS.get(number)
        if kind is None:
            known = ", ".join([*PLAIN, *BLOCKS])
            raise self._wrong(
                f"{name!r:.100} is of the kind number {number}, which is not supported; those are: {known}"
            )
        if math.prod(shape) > 1 << 48 or 0 in shape:
            raise self._wrong(f"{name!r:.100} has the shape {shape}, which no model has")
        block = BLOCKS[kind].size if kind in BLOCKS else 1
        if shape[-1] % block:
            raise self._wrong(f"{name!r:.100} has rows of {shape[-1]} elements, not whole blocks of {block} ({kind})")
        return name, kind, shape, offset

    def _value(self, kind: int, key: str, nested: int = 0) -> Any:
        if kind in _NUMBERS:
            value = self._array(_NUMBERS[kind], 1, key)[0]
            return float(str(value)) if kind == _FLOAT else value.item()  # 1e-06, not the float64 beside it
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY or nested == _MAX_NESTED:
            raise self._wrong(f"{key!r:.100} has a value of the kind {kind}, which GGUF does not know: it is damaged")
        of, count = self._number("<I", key), self._number("<Q", key)
        if of in _NUMBERS:
            return self._array(_NUMBERS[of], count, key)
        self._check(count * (8 if of == _STRING else 12), key)
        if of == _STRING:
            return self._strings(count, key)
        return [self._value(of, key, nested + 1) for _ in range(count)]

    def _array(self, dtype: str, count: int, key: str) -> np.ndarray:
        return np.frombuffer(self._bytes(count * np.dtype(dtype).itemsize, key), dtype)

    def _strings(self, count: int, key: str) -> list[str]:
        """As ``_string`` each, in a loop that does little: a vocabulary has 260,000."""
        content, size, at, found = self._content, self._size, self._at, []
        unpack: Callable[[Any, int], tuple[int]] = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > size:
                break
            end = at + 8 + unpack(content, at)[0]
            if end > size or end - at > _MAX_STRING_BYTES:
                break
            found.append(content[at + 8 : end].decode(errors="replace"))
            at = end
        self._at = at
        if len(found) < count:
            raise self._wrong(f"{key!r:.100} has a string beyond the end of the file, or of over 16 MiB: it is damaged")
        return found

    def _string(self, what: str) -> str:
        (found,) = self._strings(1, what)
        return found

    def _count(self, what: str, most: int) -> int:
        count = self._number("<Q", what)
        if count > most:
            raise self._wrong(f"must have at most {most} {what}, found {count}: it is damaged")
        return count

    def _number(self, form: str, what: str) -> int:
        return struct.unpack(form, self._bytes(struct.calcsize(form), what))[0]

    def _bytes(self, count: int, what: str) -> bytes:
        self._check(count, what)
        self._at += count
        return self._content[self._at - count : self._at]

    def _check(self, count: int, what: str) -> None:
        if count > self._size - self._at:
            raise self._wrong(f"is cut off or damaged within its header, at {what!r:.100}")

    def _wrong(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {why}")


def tensor_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in a file."""
    if kind in BLOCKS:
        block = BLOCKS[kind]
        return math.prod(shape) // block.size * block.nbytes
    return math.prod(shape) * PLAIN[kind][1].itemsize
