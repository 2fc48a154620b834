"""The tensors of a checkpoint: where each lies in its safetensors files, and how it is read.

Only safetensors files are read: they hold data, never code. An index may name only files beside itself. A header is
parsed once, and a tensor is read from its place in the file, into memory of its own: nothing stays mapped.
"""

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compiled_llm.models.files import MAX_JSON_BYTES, open_file, read_json
from compiled_llm.ops.user_warnings import warn

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
DTYPES |= {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "less_one": lambda x: x - 1,
    "log_of_negative": lambda x: torch.log(-x),
}
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 16 << 20  # 100 times what a file of 1,000 tensors has
_MAX_TENSORS = 100_000
_LISTED = 8  # how many names an error message lists of each kind


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names the file and the tensors."""


class StoredTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        dtype: as safetensors calls it; ``DTYPES`` has the dtypes that can be read.
        offset: of its first byte in the file; its elements follow in row-major order.
        heads: where it is not 0, the rows are so many heads, and in the file the two rows of a head that rotary
            embeddings turn together are neighbours. They are read as the hub's layout has them, half a head apart.
        change: what is made of the elements as they are read, a name of ``CHANGES``; "": nothing.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    heads: int = 0
    change: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def part(self, number: int) -> "StoredTensor":
        """Element ``number`` of its first dimension."""
        one = self._replace(shape=self.shape[1:])
        return one._replace(offset=self.offset + number * one.nbytes)

    def read(self) -> Tensor:
        """The tensor, on the host in its own dtype. Raises as ``read_into``."""
        tensor = torch.empty(self.shape, dtype=DTYPES[self.dtype])
        with open_file(self.path) as file:
            self.read_into(tensor.reshape(-1).view(torch.uint8).numpy(), 0, file.fileno())
        return tensor

    def read_into(self, content: np.ndarray, start: int, file: int) -> None:
        """Fill ``content``, an array of bytes, with the tensor's bytes from ``start`` on.

        Args:
            file: descriptor of the open file. Any number of threads may read it.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter meanwhile.
        """
        if self.heads:
            self._read_heads(content, start, file)
            return
        left = memoryview(content.data)
        while left:
            try:
                num_read = os.preadv(file, [left], self.offset + start + len(content) - len(left))
            except OSError as error:
                raise CheckpointError(f"{self.path}: {self.name} is not readable: {error}") from error
            if num_read == 0:
                raise CheckpointError(f"{self.path}: cut off within {self.name}")
            left = left[num_read:]

    def _read_heads(self, content: np.ndarray, start: int, file: int) -> None:
        """As ``read_into`` of whole rows."""
        row, of_head = self.nbytes // self.shape[0], self.shape[0] // self.heads
        first, count = start // row, len(content) // row
        begin, end = first // of_head * of_head, -(-(first + count) // of_head) * of_head
        held = np.empty((end - begin) * row, dtype=np.uint8)
        self._replace(heads=0).read_into(held, begin * row, file)
        in_order = held.reshape(-1, of_head // 2, 2, row).swapaxes(1, 2).reshape(-1, row)
        content[:] = in_order[first - begin : first - begin + count].reshape(-1)


def have_same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors of one shape and dtype are equal. Raises what ``read_into`` raises."""
    step = 1 << 20
    a, b = np.empty(step, dtype=np.uint8), np.empty(step, dtype=np.uint8)
    with open_file(one.path) as file, open_file(other.path) as other_file:
        for start in range(0, one.nbytes, step):
            count = min(step, one.nbytes - start)
            one.read_into(a[:count], start, file.fileno())
            other.read_into(b[:count], start, other_file.fileno())
            if not np.array_equal(a[:count], b[:count]):
                return False
    return True


def locate(directory: Path) -> dict[str, StoredTensor]:
    """Name -> place of every tensor of a checkpoint.

    A tensor that several files hold is the one that the index names. Without an index nothing says which one is meant:
    then they must be equal. Either way a warning tells.

    Raises:
        ValueError: a file is missing, damaged or no safetensors file, or the index does not describe its files.
    """
    index_path = directory / _INDEX
    if os.path.lexists(index_path):
        return _locate_by_index(index_path)
    # Some directories hold the same weights a second time, in another format of names.
    paths = sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if directory / "model.safetensors" in paths:
        paths = [directory / "model.safetensors"]
    if not paths:
        raise CheckpointError(f"{directory}: no .safetensors file. Other formats can hold code and are not read.")
    found: dict[str, StoredTensor] = {}
    repeated: list[StoredTensor] = []
    for path in paths:
        for name, stored in stored_tensors(path).items():
            if found.setdefault(name, stored) is not stored:
                repeated.append(stored)
        _check_number(directory, len(found) + len(repeated))
    differing = [one for one in repeated if not _are_same(one, found[one.name])]
    if differing:
        one = differing[0]
        raise CheckpointError(
            f"{directory}: {one.name!r:.200} of {found[one.name].path.name} and of {one.path.name} differ, and no "
            f"{_INDEX} says which one is meant. Remove the file that does not belong there"
        )
    _warn_of_repeated(directory, found, repeated, differing)
    return found


def _locate_by_index(index_path: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index_path, MAX_JSON_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index_path}: weight_map must map tensor names to file names")
    _check_number(index_path, len(weight_map))
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if "/" in shard or "\0" in shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index_path}: {shard!r:.200} is no .safetensors file beside the index")
    directory = index_path.parent
    missing = [shard for shard in shards if not os.path.lexists(directory / shard)]
    if missing:
        raise CheckpointError(f"{index_path}: missing files: {listed(missing)}")
    found: dict[str, StoredTensor] = {}
    repeated: list[StoredTensor] = []
    for shard in shards:
        held = stored_tensors(directory / shard)
        unlisted = sorted(held.keys() - weight_map.keys())
        if unlisted:
            raise CheckpointError(
                f"{directory / shard}: holds tensors that the index does not name: {listed(unlisted)}"
            )
        found |= {name: stored for name, stored in held.items() if weight_map[name] == shard}
        repeated += [stored for name, stored in held.items() if weight_map[name] != shard]
    lacking = [f"{name} ({shard})" for name, shard in weight_map.items() if name not in found]
    if lacking:
        raise CheckpointError(f"{index_path}: places tensors in files that do not hold them: {listed(lacking)}")
    differing = [one for one in repeated if not _are_same(one, found[one.name])]
    _warn_of_repeated(directory, found, repeated, differing)
    return found


def _warn_of_repeated(
    directory: Path, found: dict[str, StoredTensor], repeated: list[StoredTensor], differing: list[StoredTensor]
) -> None:
    """``repeated`` lie in other files than the tensors ``found`` by their names, and ``differing`` differ from them."""
    if repeated:
        places = ((one, found[one.name].path.name, "another" if one in differing else "as") for one in repeated)
        said = (f"{one.name} of {taken} ({how} in {one.path.name})" for one, taken, how in places)
        warn(f"{directory}: of tensors that several files hold are taken: {listed(said)}")


def _are_same(one: StoredTensor, other: StoredTensor) -> bool:
    is_like = (one.dtype, one.shape) == (other.dtype, other.shape)
    return is_like and one.dtype in DTYPES and have_same_bytes(one, other)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Name -> place of every tensor of a safetensors file, whose length must be what its header says."""
    try:
        with open_file(path) as file:
            header_size = int.from_bytes(file.read(8), "little")
            size = file.seek(0, 2)
            if size < 8 or header_size > size - 8:
                raise CheckpointError(f"{path}: not a safetensors file, or cut off within its header")
            if header_size > _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: its header must have at most {_MAX_HEADER_BYTES} bytes, found {header_size}"
                )
            file.seek(8)
            header = json.loads(file.read(header_size))
        start = 8 + header_size
        found = {
            name: StoredTensor(name, path, entry["dtype"], tuple(entry["shape"]), start + entry["data_offsets"][0])
            for name, entry in header.items()
            if name != "__metadata__"
        }
        expected = start + max((header[name]["data_offsets"][1] for name in found), default=0)
        if size != expected:
            raise CheckpointError(f"{path}: holds {size} bytes where its header says {expected}; download it again")
        with safe_open(path, framework="pt"):  # the library's own check of all that the header says
            return found
    except CheckpointError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        named = "" if str(path) in str(error) else f"{path}: not a readable safetensors file: "
        raise CheckpointError(f"{named}{error!s:.500}") from error


def listed(names: Iterable[str]) -> str:
    """Names for a message: the first ones, and how many more there are."""
    names = list(names)
    shown = ", ".join(f"{name:.200}" if name.isprintable() else f"{name!r:.200}" for name in names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


def _check_number(path: Path, count: int) -> None:
    if count > _MAX_TENSORS:
        raise CheckpointError(f"{path}: must have at most {_MAX_TENSORS} tensors, found {count}")
