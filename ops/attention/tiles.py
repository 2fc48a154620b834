"""Tile sizes of the attention kernels: a default for every GPU, and files of measured ones by the GPU's name.

``compiled-llm tune attention`` writes ``ops/tiles/<GPU>.json``; a GPU without a file, or a shape that its file lacks,
gets the defaults below. Neither torch nor Triton is imported here, so the choice can be tested anywhere.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "tiles"
MAX_HEAD_DIM = 512
SPLIT_GRAIN = 64  # keys
MOST_SPLITS = 64
MOST_SPLITS_ALONE = 32  # of a request alone, see decode_splits
USUAL_KEYS = 1024  # of a request, by which splits are chosen
SM_REGISTERS = 65536
TASK_COLUMNS = 8  # of a row of a decode's tasks: 32 bytes, which memory gives at once


@dataclass(frozen=True)
class TileConfig:
    """Tile sizes of the attention kernels. ``n`` counts keys, ``m`` rows: tokens times the heads of a KV head.

    ``decode`` are those of steps of decodes alone (``triton_decode.py``), ``alone`` of such a step of one request
    (``triton_alone.py``). ``split`` are those of decodes and short queries in others.
    The split kernel's tiles have as few rows as possible (``triton_attention.py``). Only queries of several tokens have
    larger ones, up to ``short_block_m``, and share their keys. ``programs_per_sm`` should be no more than can run at
    once: programs share the work evenly, so any that start late end late. ``split_tokens``, a multiple of 64, are the
    keys of one split at least: few for more programs at short contexts, many for fewer partial results.
    A request's bits follow from them, so they are the same for every bucket.
    """

    split_block_n: int
    split_warps: int
    split_stages: int
    split_programs_per_sm: int
    short_block_m: int
    prefill_block_m: int
    prefill_block_n: int
    prefill_warps: int
    prefill_stages: int
    decode_block_n: int
    decode_warps: int
    decode_stages: int
    decode_programs_per_sm: int
    split_tokens: int = 128
    prefill_programs_per_sm: int = 1  # 0: a program for each tile
    alone_block_n: int = 0
    alone_warps: int = 0  # 0: a request alone is served as several are


class DecodeTile(NamedTuple):
    """Of ``triton_decode.py``: ``n`` keys."""

    n: int
    warps: int
    stages: int
    programs_per_sm: int

    @property
    def registers(self) -> int:
        """That a thread can have, if all programs are to run at once."""
        return min(255, SM_REGISTERS // (32 * self.warps * self.programs_per_sm))


class Splits(NamedTuple):
    """How a decode's keys are cut: in splits of about ``tokens``, or of more where they would be more than ``most``."""

    tokens: int  # a multiple of SPLIT_GRAIN
    most: int


class ExactTile(NamedTuple):
    """Of ``triton_exact.py``: ``m`` rows and ``n`` keys. Numbers follow from it, so all steps have the same."""

    m: int
    n: int
    warps: int
    stages: int
    programs_per_sm: int


# By padded head_dim. Chosen so that no registers spill and all programs of the split kernel run at once; the test that
# compiles them ahead of time asserts both.
# In the order of the fields: split n, warps, stages, programs per SM; short m; prefill m, n, warps, stages; decode n,
# warps, stages, programs per SM. Decodes have two warps where the registers do: twice the keys in a tile, and half the
# instructions of all that a warp does for itself.
ALONE = {"alone_block_n": 64, "alone_warps": 4}
HOPPER = {
    64: TileConfig(64, 4, 3, 3, 64, 128, 64, 8, 3, 32, 2, 4, 5, prefill_programs_per_sm=2, **ALONE),
    128: TileConfig(32, 4, 3, 3, 64, 128, 128, 8, 3, 64, 4, 3, 2, **ALONE),  # measured on an H200
    256: TileConfig(32, 4, 3, 2, 32, 128, 32, 8, 3, 32, 4, 3, 2),
    512: TileConfig(32, 8, 3, 1, 32, 32, 32, 8, 2, 16, 8, 2, 1),
}
HOPPER_QUANTISED = {  # converting codes takes registers
    64: TileConfig(32, 4, 3, 3, 64, 128, 128, 8, 2, 32, 2, 4, 6, **ALONE),
    128: TileConfig(32, 4, 4, 3, 32, 128, 64, 8, 2, 64, 2, 3, 4, **ALONE),
    256: TileConfig(32, 4, 3, 2, 32, 64, 64, 8, 2, 32, 4, 3, 2, prefill_programs_per_sm=0),
    512: TileConfig(32, 8, 3, 1, 32, 32, 16, 8, 2, 32, 8, 3, 1),
}
OTHERS = {  # at most 82 KB of shared memory: GPUs between the large ones have 99
    64: TileConfig(64, 4, 3, 3, 64, 128, 64, 8, 3, 64, 2, 3, 4),
    128: TileConfig(32, 4, 3, 3, 64, 128, 32, 8, 3, 32, 4, 4, 3),
    256: TileConfig(32, 4, 3, 2, 32, 64, 32, 8, 2, 32, 4, 3, 2),
    512: TileConfig(16, 4, 2, 2, 16, 32, 16, 8, 2, 16, 4, 2, 2),
}
OTHERS_QUANTISED = {
    64: TileConfig(64, 4, 3, 3, 64, 128, 32, 8, 3, 32, 2, 4, 6),
    128: TileConfig(32, 4, 3, 3, 32, 64, 32, 4, 3, 32, 2, 4, 4, prefill_programs_per_sm=2),
    256: TileConfig(32, 4, 3, 2, 32, 64, 32, 8, 2, 32, 4, 3, 2),
    512: TileConfig(16, 4, 2, 2, 16, 32, 16, 8, 2, 16, 4, 2, 2),
}
BLACKWELL = {  # an SM has as much shared memory as Hopper's
    **OTHERS,
    64: TileConfig(32, 4, 4, 3, 64, 128, 128, 8, 2, 32, 2, 4, 4),
    128: TileConfig(32, 4, 3, 3, 64, 128, 64, 8, 3, 32, 4, 4, 3, **ALONE),
    512: TileConfig(16, 4, 2, 2, 16, 32, 16, 8, 2, 16, 4, 3, 2),
}
BLACKWELL_QUANTISED = {
    **OTHERS_QUANTISED,
    64: TileConfig(64, 4, 3, 3, 64, 128, 128, 8, 2, 32, 2, 4, 6, **ALONE),
    128: TileConfig(32, 4, 3, 3, 32, 128, 64, 8, 2, 64, 2, 3, 4, **ALONE),
}
FLOAT32 = {  # exact float32 has no tensor cores, and its operands sit in registers
    64: TileConfig(32, 4, 2, 4, 16, 32, 32, 8, 1, 32, 4, 2, 4),
    128: TileConfig(32, 4, 2, 4, 16, 32, 16, 8, 1, 32, 4, 2, 4),
    256: TileConfig(32, 8, 2, 2, 16, 16, 32, 8, 1, 32, 8, 2, 2),
    512: TileConfig(16, 8, 1, 1, 16, 16, 16, 8, 1, 16, 8, 1, 1),
}
# Few registers and little shared memory, for all GPUs. 64 rows: fewer have other instructions on Hopper, which heads of
# 512 have in all launches.
EXACT = {
    64: ExactTile(64, 64, 4, 2, 2),
    128: ExactTile(64, 32, 4, 2, 2),
    256: ExactTile(64, 16, 8, 2, 1),
    512: ExactTile(16, 16, 8, 2, 1),
}
EXACT_QUANTISED = {  # converting codes takes registers
    **EXACT,
    128: ExactTile(64, 32, 8, 2, 1),
    512: ExactTile(16, 32, 8, 2, 1),
}
EXACT_FLOAT32 = {
    64: ExactTile(16, 32, 4, 2, 2),
    128: ExactTile(16, 16, 4, 2, 2),
    256: ExactTile(16, 16, 8, 1, 1),
    512: ExactTile(16, 16, 8, 1, 1),
}


def padded_head_dim(head_dim: int) -> int:
    """The size by which tiles are chosen for ``head_dim``: the next power of two, at least 64."""
    return max(64, 1 << (head_dim - 1).bit_length())


def key(head_dim: int, q_bytes: int, cache_bytes: int) -> str:
    """The name of a shape in a file: padded head_dim and the bytes of one element of the query and of the cache.

    So int8 and fp8 caches share their tiles.
    """
    return f"head_dim {padded_head_dim(head_dim)}, query {q_bytes} bytes, cache {cache_bytes} bytes"


def path_of(gpu: str) -> Path:
    """The file of a GPU, by the name that ``torch.cuda.get_device_name`` gives it."""
    return FOLDER / (re.sub(r"[^A-Za-z0-9]+", "_", gpu).strip("_") + ".json")


def save(path: Path, gpu: str, configs: Mapping[str, TileConfig]) -> None:
    """Write a GPU's file: ``configs`` by ``key``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tiles = {name: asdict(config) for name, config in sorted(configs.items())}
    path.write_text(json.dumps({"gpu": gpu, "tiles": tiles}, indent=1) + "\n")


@functools.cache
def load(path: Path) -> dict[str, TileConfig]:
    """The contents of a file, empty if there is none. Read once: a running engine never changes its tiles."""
    if not path.is_file():
        return {}
    return {name: TileConfig(**fields) for name, fields in json.loads(path.read_text())["tiles"].items()}


def _check_head_dim(head_dim: int) -> None:
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim} is not supported by the GPU kernels: at most {MAX_HEAD_DIM}")


def exact_tile(head_dim: int, q_bytes: int, cache_bytes: int) -> ExactTile:
    """The tile of the exact kernels. ``ValueError`` if ``head_dim`` is more than ``MAX_HEAD_DIM``."""
    _check_head_dim(head_dim)
    tiles = EXACT_FLOAT32 if q_bytes == 4 else EXACT if cache_bytes == q_bytes else EXACT_QUANTISED
    return tiles[padded_head_dim(head_dim)]


def decode_tile(tiles: TileConfig) -> DecodeTile:
    """The tile of a step of several decodes."""
    return DecodeTile(tiles.decode_block_n, tiles.decode_warps, tiles.decode_stages, tiles.decode_programs_per_sm)


def decode_splits(tiles: TileConfig, num_requests: int, num_kv_heads: int, num_sms: int) -> Splits:
    """The splits of a step of so many requests: they follow from its size, and from no length of a request.

    A request alone is cut fine, so that few keys keep the GPU busy, and into no more splits than run at once, two
    programs an SM, nor than one program joins in a short time when all others have ended. Several requests of
    ``USUAL_KEYS`` have no more splits together than run at once: so no program begins another when most have ended.
    """
    if num_requests == 1:
        return Splits(SPLIT_GRAIN, min(MOST_SPLITS_ALONE, max(8, 2 * num_sms // num_kv_heads)))
    each = max(1, num_sms * tiles.decode_programs_per_sm // (num_requests * num_kv_heads))
    return Splits(-(-USUAL_KEYS // (each * SPLIT_GRAIN)) * SPLIT_GRAIN, MOST_SPLITS)


def most_splits(table_tokens: int) -> int:
    """Of a decode's request, whatever the tiles are."""
    return max(1, min(MOST_SPLITS, -(-table_tokens // SPLIT_GRAIN)))


def default_config(head_dim: int, q_bytes: int, cache_bytes: int, capability: tuple[int, int]) -> TileConfig:
    """The tiles above for a shape. ``ValueError`` if ``head_dim`` is more than ``MAX_HEAD_DIM``."""
    _check_head_dim(head_dim)
    by_major = {9: (HOPPER, HOPPER_QUANTISED), 10: (BLACKWELL, BLACKWELL_QUANTISED)}
    plain, quantised = by_major.get(capability[0], (OTHERS, OTHERS_QUANTISED))
    tiles = FLOAT32 if q_bytes == 4 else plain if cache_bytes == q_bytes else quantised
    return tiles[padded_head_dim(head_dim)]


def tile_config(
    head_dim: int, q_bytes: int, cache_bytes: int, capability: tuple[int, int], gpu: str = ""
) -> TileConfig:
    """The tiles for a shape: from the file of ``gpu`` if that has it, else the default of its compute capability."""
    default = default_config(head_dim, q_bytes, cache_bytes, capability)
    return load(path_of(gpu)).get(key(head_dim, q_bytes, cache_bytes), default)
