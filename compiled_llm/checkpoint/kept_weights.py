"""Linear layers kept packed in a file, which later starts map in the place of reading and packing a checkpoint.

``DIGEST.weights`` has the tensors of one layer after the other, in the order in which a family takes them, each as its
kernel reads it; then JSON with the key of all that decides these bytes, and each layer's place and SHA-256; then the
digest and size of the JSON. It is written as ``DIGEST.part``, under a lock, synced and renamed: so it exists whole or
not at all, one process writes it, and those that start meanwhile wait. It is mapped read only and shared: engines
have one copy in the page cache, from which the kernel drops what it needs the memory for.

A start checks the key, the JSON's digest and the sizes. To check the content would be to read it all, which
``verify`` does (``compiled-llm check``).
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import math
import mmap
import os
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.quantization import plain_kind
from compiled_llm.models.config import ModelConfig
from compiled_llm.ops import native
from compiled_llm.ops.trusted_paths import check_trusted, make_directory
from compiled_llm.ops.user_warnings import warn

_MAGIC = b"compiled-llm-w1\n"
_END = len(_MAGIC) + 32 + 8  # of a file: these, the JSON's SHA-256, its size
_MAX_JSON_BYTES = 256 << 20
_HUGE_PAGE = 2 << 20
_ALIGNMENT = max(4096, mmap.PAGESIZE)  # of layers smaller than a huge page; tensors of one lie 128 bytes aligned
_SYNCED = 256 << 20  # bytes written between two syncs: what waits to be written takes memory
_PACKAGE = Path(__file__).parents[1]
_SOURCES = (
    "models/**/*.py",
    "ops/linear/*.py",
    "ops/linear/*pack*",
    "ops/linear/*compress*",
    "ops/native.py",
    "checkpoint/**/*.py",
)
_ARGUMENTS = (
    *("quantization", "quantization_group_size", "quantization_skip", "quantization_head", "quantization_embedding"),
    *("quantization_activations", "exact", "model_impl"),
)

Fields = Mapping[str, Any]


class Place(NamedTuple):
    """A tensor in the file: the byte where it begins, its dtype as torch calls it, its shape and strides."""

    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Layer(NamedTuple):
    """A layer in the file.

    Attributes:
        role: "layer", of which a step reads everything; "head", the same, read last; "table", of which a step reads
            rows; "experts", of which it reads those that its tokens use.
        offset, nbytes: where it lies, a multiple of a page.
        sha256: of these bytes.
    """

    name: str
    role: str
    offset: int
    nbytes: int
    sha256: str
    places: tuple[Place, ...]


def fields_of(config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, files: Iterable[Path]) -> Fields:
    """The key: all that decides which bytes a model's layers have. ``files``: those of the checkpoint."""
    return {
        "files": sorted(_identity(path) for path in {path.resolve() for path in files}),
        "model": str(model_config),
        "dtype": str(dtype),
        "arguments": {name: str(getattr(config, name)) for name in _ARGUMENTS},
        "kind": repr(plain_kind(config, model_config, torch.device("cpu"), dtype)),
        "isa": native.best_isa(),
        "torch": torch.__version__,
        "code": _own_code(),
    }


def _identity(path: Path) -> list[Any]:
    """Of a file that did not change: no program can set the time of its last change."""
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns]


@functools.cache
def _own_code() -> str:
    hashed = hashlib.sha256()
    for source in sorted(path for pattern in _SOURCES for path in _PACKAGE.glob(pattern)):
        hashed.update(source.read_bytes())
    return hashed.hexdigest()


class LayersWriter:
    """Appends layers to an open file.

    Attributes:
        errors: what rounding cost, to be said at later starts too: the fields of ``RowErrors``.
    """

    def __init__(self, file: int) -> None:
        self.errors: Sequence[Sequence[Any]] = ()
        self._file, self._end, self._synced = file, 0, 0
        self._layers: dict[str, Layer] = {}

    def layer(self, name: str, role: str, tree: Any) -> Any:
        """Write a layer's tensors, and return the layer without them, on the device "meta"."""
        assert name not in self._layers, f"{name} is taken twice"
        # In between is nothing, which takes no room on the disk.
        begin = self._end = _aligned(self._end, _HUGE_PAGE if _size_of(tree) >= _HUGE_PAGE else _ALIGNMENT)
        hashed, places = hashlib.sha256(), list[Place]()

        def write(tensor: Tensor) -> Tensor:
            start = _aligned(self._end, 128)
            content = _bytes_of(tensor)
            for piece in (memoryview(bytes(start - self._end)), content):
                hashed.update(piece)
                self._append(piece)
            places.append(Place(start, str(tensor.dtype)[6:], tuple(tensor.shape), tensor.stride()))
            return tensor.to("meta")

        left = with_tensors(tree, write)
        self._layers[name] = Layer(name, role, begin, self._end - begin, hashed.hexdigest(), tuple(places))
        return left

    def finish(self, fields: Fields) -> None:
        """Write what follows the layers. The file is whole then, and on the disk."""
        content = json.dumps({"fields": fields, "errors": self.errors, "layers": [*self._layers.values()]}).encode()
        self._end = _aligned(self._end, _ALIGNMENT)
        digest = hashlib.sha256(content).digest()
        self._append(memoryview(content + _MAGIC + digest + len(content).to_bytes(8, "little")))
        os.fsync(self._file)

    def _append(self, content: memoryview) -> None:
        while content:
            count = os.pwrite(self._file, content, self._end)
            content, self._end = content[count:], self._end + count
            if self._end - self._synced >= _SYNCED:
                os.fdatasync(self._file)
                self._synced = self._end


class KeptWeights:
    """A file of layers, mapped.

    Attributes:
        layers: in the order of the file.
        errors: as those of ``LayersWriter``.
        nbytes: of all layers.
        memory, descriptor: the whole file, mapped; and open, for reading ahead.
    """

    def __init__(
        self, path: Path, descriptor: int, layers: tuple[Layer, ...], errors: Sequence[Sequence[Any]] = ()
    ) -> None:
        self.path, self.descriptor, self.layers, self.errors = path, descriptor, layers, errors
        self.nbytes = sum(layer.nbytes for layer in layers)
        self.memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._by_name = {layer.name: layer for layer in layers}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that nobody may write to it
            self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        weakref.finalize(self, os.close, descriptor)

    @property
    def address(self) -> int:
        """Where the file lies in memory."""
        return self._bytes.data_ptr()

    def layer(self, name: str, role: str, tree: Any) -> Any:
        """``tree``, a layer on the device "meta", with the tensors of the file."""
        places = iter(self._by_name[name].places)

        def mapped(tensor: Tensor) -> Tensor:
            place = next(places)
            dtype, shape = str(tensor.dtype)[6:], tuple(tensor.shape)
            if dtype == "int32" and place.shape[:-1] == shape[:-1]:
                shape = place.shape  # a matrix has as many exceptions as it needs (``CompressedWeight``)
            assert (place.dtype, place.shape) == (dtype, shape), f"{name} in {self.path}"
            size = _span(place.shape, place.stride) * tensor.itemsize
            content = self._bytes[place.offset : place.offset + size].view(tensor.dtype)
            return content.as_strided(place.shape, place.stride, content.storage_offset())

        return with_tensors(tree, mapped)

    def verify(self) -> None:
        """Read all of it. ``ValueError`` names the first layer that is not what was written."""
        for layer in self.layers:
            content = memoryview(self.memory)[layer.offset : layer.offset + layer.nbytes]
            if hashlib.sha256(content).hexdigest() != layer.sha256:
                raise ValueError(
                    f"weights_path: {self.path}: {layer.name} is not what was written, so the disk is not to be relied "
                    "on: delete the file"
                )


def kept_weights(
    directory: Path, most_bytes: int | None, fields: Fields, size: int, write: Callable[[LayersWriter], None]
) -> KeptWeights:
    """The file of a key in ``directory``, written first if there is none, by ``write``.

    Args:
        most_bytes: of all files in the directory, for which those go that were not used for longest; None: half of what
            the disk has free, and what is there already.
        size: bytes that it will have, about.

    Raises:
        ValueError: others may write to the directory, or the file cannot be written or has no room.
    """
    path = path_of(directory, fields)
    part = path.with_suffix(".part")
    try:
        make_directory(directory)
        check_trusted(directory, "weights_path", "weights are not mapped")
        while True:
            if (found := opened(path, fields)) is not None:
                with contextlib.suppress(OSError):  # a read-only disk
                    os.utime(path)
                return found
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if path.exists() or not _is_named(descriptor, part):
                    continue  # another process has written it meanwhile, or gave up
                os.ftruncate(descriptor, 0)
                _make_room(directory, part, size, most_bytes)
                try:
                    writer = LayersWriter(descriptor)
                    write(writer)
                    writer.finish(fields)
                    os.rename(part, path)
                    _sync(directory)
                except BaseException:
                    part.unlink(missing_ok=True)
                    raise
            finally:
                os.close(descriptor)
    except OSError as error:
        raise ValueError(f"weights_path: {directory} cannot keep the weights: {error}") from error


def path_of(directory: Path, fields: Fields) -> Path:
    """Where ``kept_weights`` keeps the file of a key."""
    return directory / f"{hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]}.weights"


def opened(path: Path, fields: Fields | None = None) -> KeptWeights | None:
    """The file, mapped, if it is there and whole and has this key; of a damaged one a warning tells."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(descriptor).st_size
        end = os.pread(descriptor, _END, max(0, size - _END))
        digest, length = end[len(_MAGIC) : -8], int.from_bytes(end[-8:], "little")
        if len(end) < _END or not end.startswith(_MAGIC) or length > min(_MAX_JSON_BYTES, size - _END):
            raise ValueError("it is cut off, or no such file")
        content = os.pread(descriptor, length, size - _END - length)
        if hashlib.sha256(content).digest() != digest:
            raise ValueError("its directory is damaged")
        parsed = json.loads(content)
        layers = tuple(_layer(*one) for one in parsed["layers"])
        if any(not 0 <= layer.offset <= layer.offset + layer.nbytes <= size - _END - length for layer in layers):
            raise ValueError("it is shorter than its layers")
        if fields is not None and parsed["fields"] != json.loads(json.dumps(fields)):
            raise ValueError("it is of other weights")
        return KeptWeights(path, descriptor, layers, parsed["errors"])
    except BaseException as error:
        os.close(descriptor)
        if not isinstance(error, ValueError):
            raise
        warn(f"{path}: {error}: it is written again")
        path.unlink(missing_ok=True)
        return None


def _layer(name: str, role: str, offset: int, nbytes: int, sha256: str, places: list[Any]) -> Layer:
    found = (Place(start, dtype, tuple(shape), tuple(stride)) for start, dtype, shape, stride in places)
    return Layer(name, role, offset, nbytes, sha256, tuple(found))


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _make_room(directory: Path, part: Path, size: int, most_bytes: int | None) -> None:
    """Delete files, those first that were not used for longest, until one of ``size`` bytes has room."""
    kept = []
    for path in directory.iterdir():
        if path != part and path.suffix in (".weights", ".part"):
            with contextlib.suppress(FileNotFoundError):  # another process deletes it too
                kept.append((path.stat().st_mtime, path.stat().st_size, path))
    held, free = sum(size for _, size, _ in kept), shutil.disk_usage(directory).free
    most = held + free // 2 if most_bytes is None else most_bytes
    if size > min(most, held + free):
        raise ValueError(
            f"weights_path: the packed weights take {size:,} bytes, and {directory} may have {min(most, held + free):,}"
            " (weights_bytes, and what the disk has free): choose another place or size, or leave weights_path out"
        )
    for _, nbytes, path in sorted(kept):
        if held + size <= most and size <= free:
            return
        path.unlink(missing_ok=True)  # engines that have it mapped keep it
        held, free = held - nbytes, free + nbytes


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def with_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tree of nested tuples with ``change`` of each tensor in its place."""
    if isinstance(tree, Tensor):
        return change(tree)
    if not isinstance(tree, tuple):
        return tree
    made = [with_tensors(item, change) for item in tree]
    return type(tree)(*made) if hasattr(tree, "_fields") else tuple(made)


def _size_of(tree: Any) -> int:
    """Bytes of a tree's tensors."""
    if isinstance(tree, Tensor):
        return tree.nbytes
    return sum(map(_size_of, tree)) if isinstance(tree, tuple) else 0


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory from its first element to its last."""
    size = _span(tuple(tensor.shape), tensor.stride())
    flat = tensor.as_strided((size,), (1,), tensor.storage_offset())
    return memoryview(flat.view(torch.uint8).numpy().data)


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
