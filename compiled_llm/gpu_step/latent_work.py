"""What the kernels of latent attention have to do, whose bytes depend on the contexts; for ``work.py``."""

from collections.abc import Callable, Mapping
from typing import Any

from compiled_llm.gpu_step.amounts import Contexts, Share, Work
from compiled_llm.gpu_step.launches import TritonKernel

Arguments = Mapping[str, Any]


def _token_bytes(a: Arguments) -> int:
    """Of a latent and a turned part of a key, in the cache."""
    scales = 0 if a["k_scale"] is None else 8
    return (a["LATENT_DIM"] + a["TURNED_DIM"]) * a["v_cache"].itemsize + scales


def _flops(a: Arguments, contexts: Contexts) -> int:
    """Of all scores and sums."""
    return 2 * contexts.pairs(a["WINDOW"]) * a["NUM_HEADS"] * (2 * a["LATENT_DIM"] + a["TURNED_DIM"])


def _padded_flops(a: Arguments, blocks: int) -> int:
    return 2 * blocks * a["BLOCK_N"] * a["BLOCK_M"] * (2 * a["BLOCK_C"] + a["BLOCK_H"])


def _states(a: Arguments, rows: int, splits: int) -> int:
    """Bytes of what splits leave of so many rows of all heads."""
    return rows * a["NUM_HEADS"] * splits * (a["LATENT_DIM"] + 2) * 4 if splits > 1 else 0


def _splits(keys: int, new: int, tokens: int, most: int) -> tuple[int, int]:
    """Keys of a split of a request with ``new`` rows, and their number."""
    from compiled_llm.ops.attention.tiles import SPLIT_GRAIN

    most = max(1, most // new)
    size = max(tokens, -(-keys // (most * SPLIT_GRAIN)) * SPLIT_GRAIN)
    return size, max(1, -(-keys // size))


def _split_tokens(contexts: Contexts) -> int:
    from compiled_llm.ops.attention.latent_tiles import split_tokens

    return split_tokens(contexts.num_requests)


def _write(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    tokens = a["slot_mapping"].shape[0]
    new = (a["k_turned"].nbytes + a["latent"].nbytes) + a["slot_mapping"].nbytes
    queries = 0 if a["cos_sin"] is None else a["q_out"].nbytes
    angles = 0 if a["cos_sin"] is None else a["cos_sin"].nbytes
    return Work(new + angles + queries, tokens * _token_bytes(a) + queries)


def _decode(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """Latents are read once for all heads of a request, whose tiles share the L2 cache."""
    r, keys = contexts.num_requests, contexts.keys(a["WINDOW"])
    size, splits = _splits(keys, 1, _split_tokens(contexts), a["partial_rows"])
    tiles = -(-a["NUM_HEADS"] // a["BLOCK_M"])
    blocks = r * tiles * sum(-(-min(size, keys - first) // a["BLOCK_N"]) for first in range(0, keys, size))
    queries = r * a["NUM_HEADS"] * (a["LATENT_DIM"] + a["TURNED_DIM"]) * a["q_latent"].itemsize
    new = r * (a["LATENT_DIM"] + a["TURNED_DIM"]) * a["q_latent"].itemsize + a["cos_sin"].nbytes
    read = queries + new + r * keys * _token_bytes(a) + r * -(-keys // a["BLOCK_SIZE"]) * 4
    written = _states(a, r, splits) or a["out"].nbytes
    return Work(
        read, written + r * _token_bytes(a), _flops(a, contexts), _padded_flops(a, blocks),
        8 * a["q_latent"].itemsize, r * tiles * splits, blocks, 0, {"write_latent": Share(r * tiles)},
    )  # fmt: skip


def _attention(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """A task is a tile of heads and tokens with the keys of a split, or with all of them."""
    from compiled_llm.ops.attention.triton_latent_kernels import PARTITION

    r, new, keys = contexts.num_requests, contexts.num_new, contexts.keys(a["WINDOW"])
    tokens, head_tiles = a["BLOCK_M"] // a["BLOCK_G"], -(-a["NUM_HEADS"] // a["BLOCK_G"])
    first = contexts.num_keys - new
    ends = [first + min(start + tokens, new) for start in range(0, new, tokens)]
    begins = [max(0, end - tokens + 1 - a["WINDOW"]) if a["WINDOW"] else 0 for end in ends]
    seen = sum(-(-end // a["BLOCK_N"]) - begin // a["BLOCK_N"] for begin, end in zip(begins, ends, strict=True))
    splits = 1
    if new <= a["SPLIT_ROWS"] and a["EXACT"]:
        splits = -(-contexts.num_keys // PARTITION.value) - (contexts.num_keys - keys) // PARTITION.value
    elif new <= a["SPLIT_ROWS"]:
        splits = _splits(keys, new, a["SPLIT_TOKENS"], a["MOST_SPLITS"])[1]
    blocks, rows = r * head_tiles * seen, r * new
    queries = rows * a["NUM_HEADS"] * (a["LATENT_DIM"] + a["TURNED_DIM"]) * a["q_latent"].itemsize
    out = rows * a["NUM_HEADS"] * a["LATENT_DIM"] * a["q_latent"].itemsize
    entries = max(kernel.programs, r * head_tiles * len(ends) * splits)
    return Work(
        queries + r * keys * _token_bytes(a), _states(a, rows, splits) or out, _flops(a, contexts),
        _padded_flops(a, blocks), 8 * a["q_latent"].itemsize, entries, blocks,
    )  # fmt: skip


def _merge(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """Of rows that had several splits."""
    from compiled_llm.ops.attention.triton_latent_kernels import PARTITION

    new, keys, rows = contexts.num_new, contexts.num_keys, contexts.num_requests * contexts.num_new
    if new > a["SPLIT_ROWS"]:
        return Work(0, 0)
    if a["EXACT"]:
        splits = -(-keys // PARTITION.value)
    else:
        splits = _splits(keys, new, _split_tokens(contexts), a["partial_rows"])[1]
    states = _states(a, rows, splits)
    return Work(states, rows * a["NUM_HEADS"] * a["LATENT_DIM"] * a["out"].itemsize if states else 0)


LATENT_RULES: dict[str, Callable[[Arguments, TritonKernel, Contexts], Work]] = {
    "latent_write_kernel": _write,
    "latent_decode_attention_kernel": _decode,
    "latent_attention_kernel": _attention,
    "latent_attention_merge_kernel": _merge,
}
