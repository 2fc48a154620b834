"""Tile sizes of the kernels of latent attention. Neither torch nor Triton is imported here.

No file of a GPU changes them: ``compiled-llm tune attention`` times paged attention alone.
"""

from typing import NamedTuple

from compiled_llm.ops.attention.tiles import MOST_SPLITS, SPLIT_GRAIN, Splits

MAX_DIM = 512
_LEAST_SPLITS = 8  # that a request may have, however many there are


class LatentTile(NamedTuple):
    """``m`` rows (heads, of a token or of several) and ``n`` keys."""

    m: int
    n: int
    warps: int
    stages: int
    programs_per_sm: int


class LatentTiles(NamedTuple):
    decode: LatentTile  # ``m`` at most: no more than the heads need
    chunk: LatentTile
    exact: LatentTile  # numbers follow from it, so all steps have the same


# By padded size of latents. Chosen so that no registers spill and all programs run at once; the tests that compile them
# ahead of time assert both.
_SHORT = LatentTile(64, 32, 4, 2, 1)
_SHORT_TILES = dict.fromkeys((64, 128), LatentTiles(_SHORT, _SHORT, LatentTile(32, 32, 8, 2, 1)))
LARGE = {  # GPUs with 227 KB of shared memory for a program
    **_SHORT_TILES,
    256: LatentTiles(LatentTile(32, 32, 4, 3, 1), LatentTile(64, 32, 8, 3, 1), LatentTile(32, 32, 8, 2, 1)),
    512: LatentTiles(LatentTile(32, 32, 8, 3, 1), LatentTile(32, 32, 8, 3, 1), LatentTile(32, 32, 8, 2, 1)),
}
OTHERS = {
    **_SHORT_TILES,
    256: LatentTiles(LatentTile(32, 32, 4, 2, 1), LatentTile(64, 32, 8, 2, 1), LatentTile(32, 32, 8, 2, 1)),
    512: LatentTiles(LatentTile(32, 32, 8, 2, 1), LatentTile(32, 32, 8, 2, 1), LatentTile(16, 32, 8, 2, 1)),
}
LARGE_QUANTISED = {  # converting codes takes registers
    **_SHORT_TILES,
    256: LatentTiles(LatentTile(32, 32, 8, 2, 1), LatentTile(64, 32, 8, 2, 1), LatentTile(32, 16, 8, 2, 1)),
    512: LatentTiles(LatentTile(16, 16, 8, 2, 1), LatentTile(16, 16, 8, 2, 1), LatentTile(16, 16, 8, 2, 1)),
}
OTHERS_QUANTISED = {
    **_SHORT_TILES,
    256: LatentTiles(LatentTile(32, 32, 8, 2, 1), LatentTile(32, 32, 8, 2, 1), LatentTile(32, 16, 8, 2, 1)),
    512: LatentTiles(LatentTile(16, 32, 8, 2, 1), LatentTile(32, 16, 8, 2, 1), LatentTile(16, 16, 8, 2, 1)),
}
_FLOAT32 = LatentTile(16, 16, 8, 1, 1)  # exact float32 has no tensor cores, and its operands sit in registers
FLOAT32 = dict.fromkeys((64, 128, 256, 512), LatentTiles(_FLOAT32, _FLOAT32, _FLOAT32))


def latent_tiles(latent_dim: int, q_bytes: int, cache_bytes: int, capability: tuple[int, int]) -> LatentTiles:
    """Of a GPU of this compute capability; bytes of an element of queries and cache.

    Raises:
        ValueError: ``latent_dim`` is more than ``MAX_DIM``.
    """
    if latent_dim > MAX_DIM:
        raise ValueError(f"latent_dim {latent_dim} is not supported by the GPU kernels: at most {MAX_DIM}")
    large = capability[0] in (9, 10)
    plain, quantised = (LARGE, LARGE_QUANTISED) if large else (OTHERS, OTHERS_QUANTISED)
    tiles = FLOAT32 if q_bytes == 4 else plain if cache_bytes == q_bytes else quantised
    return tiles[max(64, 1 << (latent_dim - 1).bit_length())]


def heads_of_tile(tile: LatentTile, num_heads: int) -> int:
    """Of a token: a power of two."""
    return min(tile.m, 1 << (num_heads - 1).bit_length())


def split_tokens(num_requests: int) -> int:
    """Of a split at least: a request alone is cut fine."""
    return SPLIT_GRAIN if num_requests == 1 else 2 * SPLIT_GRAIN


def latent_splits(tile: LatentTile, num_requests: int, num_heads: int, num_sms: int) -> Splits:
    """The splits of a step of so many requests, functions of its size alone.

    As many as give each program some: what a split leaves, for all heads, is as much as hundreds of keys.
    """
    of_request = -(-num_heads // heads_of_tile(tile, num_heads))
    at_once = num_sms * tile.programs_per_sm
    if num_requests == 1:
        return Splits(split_tokens(1), min(MOST_SPLITS, max(_LEAST_SPLITS, at_once // of_request)))
    wanted = -(-4 * at_once // (num_requests * of_request))
    return Splits(split_tokens(num_requests), min(MOST_SPLITS, max(_LEAST_SPLITS, wanted)))
