"""Latent attention on the GPU: the launches of its Triton kernels. ``latent_attention.py`` says what they compute.

A step of decodes has two: ``triton_latent_decode.py``, by a plan made once a step, and the merge of splits. Others have
three: the write to the cache, which turns and normalises what is still to be, then all requests, those of few rows in
splits, and the merge. Grids follow from shapes alone, so a call can be captured in a CUDA graph.

A request's splits follow from its own lengths and from the size of the step, so its output is bit for bit the same
whatever else is in the batch. If exact, they are partitions of keys at absolute places and tiles are the same in every
step: then a row's bits depend on its own query and keys alone.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from compiled_llm.ops.attention import kv_quant
from compiled_llm.ops.attention.latent_tiles import LatentTile, heads_of_tile, latent_splits, latent_tiles
from compiled_llm.ops.attention.triton_attention import check_trees, device_facts
from compiled_llm.ops.attention.triton_kernels import SHORT_QUERY, TREE_QUERY
from compiled_llm.ops.attention.triton_latent_decode import latent_decode_attention_kernel
from compiled_llm.ops.attention.triton_latent_kernels import (
    PARTITION,
    latent_attention_kernel,
    latent_attention_merge_kernel,
)
from compiled_llm.ops.attention.triton_latent_write import latent_write_kernel

_WRITTEN_AT_ONCE = 2048  # elements that a program of the write kernel turns, or zeroes at once


class ToTurn(NamedTuple):
    """What is still to be done with queries and keys, see ``rotary_latent_attention.py``."""

    cos_sin: Tensor  # [T, H] float32
    norm: Tensor  # [C]
    query_scale: Tensor | None
    eps: float


class Caches(NamedTuple):
    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


class _States(NamedTuple):
    """What splits leave, for ``rows`` of each request and head."""

    rows: int
    partial: Tensor
    partial_max: Tensor
    partial_sum: Tensor
    row_splits: Tensor

    @classmethod
    def of(cls, q_latent: Tensor, num_requests: int, rows: int) -> "_States":
        num_tokens, num_heads, latent_dim = q_latent.shape
        places = num_requests * num_heads * rows
        partial = torch.empty((places, latent_dim), dtype=torch.float32, device=q_latent.device)
        partial_max, partial_sum = torch.empty((2, places), dtype=torch.float32, device=q_latent.device)
        row_splits = torch.empty(num_tokens, dtype=torch.int32, device=q_latent.device)
        return cls(rows, partial, partial_max, partial_sum, row_splits)


def _checked(
    q_latent: Tensor, q_turned: Tensor, k_turned: Tensor, latent: Tensor, caches: Caches
) -> tuple[dict[str, int], tuple[int, int], int]:
    """Sizes for all kernels, the GPU's compute capability and number of SMs.

    Raises:
        ValueError: a tensor of another shape, dtype or layout.
    """
    (num_tokens, num_heads, dim), turned_dim, block_size = q_latent.shape, q_turned.shape[2], caches.k.shape[2]
    expected = {
        "q_turned": (q_turned, (num_tokens, num_heads, turned_dim), q_latent.dtype),
        "k_turned": (k_turned, (num_tokens, 1, turned_dim), q_latent.dtype),
        "latent": (latent, (num_tokens, 1, dim), q_latent.dtype),
        "k_cache": (caches.k, (len(caches.k), 1, block_size, turned_dim), caches.k.dtype),
        "v_cache": (caches.v, (len(caches.k), 1, block_size, dim), caches.k.dtype),
    }
    for name, (given, shape, dtype) in expected.items():
        if tuple(given.shape) != shape or given.dtype != dtype or given.stride(-1) != 1:
            raise ValueError(
                f"latent_attention: {name} must be {list(shape)} of {dtype} with the last stride 1, got "
                f"{list(given.shape)} of {given.dtype} with strides {list(given.stride())}"
            )
    _, capability, num_sms = device_facts(q_latent.device)
    kv_quant.check_capability(caches.k.dtype, capability)
    assert (caches.k_scale is not None) == (caches.v_scale is not None) == kv_quant.is_quantised(caches.k.dtype)
    sizes = {
        "NUM_HEADS": num_heads,
        "LATENT_DIM": dim,
        "TURNED_DIM": turned_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_C": max(16, triton.next_power_of_2(dim)),
        "BLOCK_H": max(16, triton.next_power_of_2(turned_dim)),
    }
    return sizes, capability, num_sms


def _write(
    q_turned: Tensor, k_turned: Tensor, latent: Tensor, caches: Caches, turn: ToTurn, slot_mapping: Tensor,
    query_start_loc: Tensor, states: _States, out: Tensor, sizes: dict[str, int],
) -> Tensor:  # fmt: skip
    """Launch the write kernel; the turned queries."""
    num_tokens, num_heads, turned_dim = q_turned.shape
    cos_sin, norm, query_scale, eps = turn
    q_out = q_turned.new_empty(num_tokens, num_heads, turned_dim)
    block_heads = max(1, min(triton.next_power_of_2(num_heads), _WRITTEN_AT_ONCE // sizes["BLOCK_H"]))
    latent_write_kernel[(num_tokens, 1 + triton.cdiv(num_heads, block_heads))](
        q_turned, k_turned, latent, cos_sin, norm, query_scale, q_out, *caches,
        slot_mapping, query_start_loc, states.row_splits, out,
        eps, len(query_start_loc) - 1, *q_turned.stride()[:2], k_turned.stride(0), latent.stride(0),
        cos_sin.stride(0),
        CODE_MAX=kv_quant.CODE_MAX.get(caches.k.dtype, 0.0),
        BLOCK_HEADS=block_heads, BLOCK_OUT=_WRITTEN_AT_ONCE, **sizes,
        num_warps=4,
        enable_fp_fusion=False,  # a fused operation would round once where kv_quant.quantise and rope round twice
    )  # fmt: skip
    return q_out


def rotary_latent_attention(
    q_latent: Tensor, q_turned: Tensor, k_turned: Tensor, latent: Tensor, cos_sin: Tensor, norm: Tensor,
    query_scale: Tensor | None, eps: float, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
    v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    sm_scale: float, max_query_len: int, window: int, ancestors: Tensor | None = None, *, exact: bool = False,
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU."""
    check_trees(ancestors, window)
    if ancestors is not None and exact:
        raise ValueError("latent_attention: ancestors must be None with exact on a GPU: keys of a path lie apart there")
    turn, caches = ToTurn(cos_sin, norm, query_scale, eps), Caches(k_cache, v_cache, k_scale, v_scale)
    sizes, capability, num_sms = _checked(q_latent, q_turned, k_turned, latent, caches)
    (num_tokens, num_heads, dim), (num_requests, table_width) = q_latent.shape, block_table.shape
    assert sm_scale > 0
    table_tokens = table_width * k_cache.shape[2]
    tiles = latent_tiles(dim, q_latent.element_size(), k_cache.element_size(), capability)
    tile = tiles.exact if exact else tiles.chunk
    if ancestors is not None and k_scale is not None:  # masks take registers
        tile = tile._replace(m=min(tile.m, 32))
    splits = latent_splits(tile, num_requests, num_heads, num_sms)
    if exact:  # states of several rows' partitions are many: requests of more rows fold them
        split_rows = max(1, max_query_len) if max_query_len <= SHORT_QUERY.value else 1
        most = triton.cdiv(table_tokens, PARTITION.value) * split_rows
    else:
        split_rows = (SHORT_QUERY if ancestors is None else TREE_QUERY).value
        most = min(splits.most, triton.cdiv(table_tokens, splits.tokens))
    heads = heads_of_tile(tile, num_heads)
    of_token = triton.cdiv(num_heads, heads)
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": not exact}
    with torch.cuda.device_of(q_latent):
        out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
        states = _States.of(q_latent, num_requests, most)
        q_turned = _write(
            q_turned, k_turned, latent, caches, turn, slot_mapping, query_start_loc, states, out, sizes
        )  # fmt: skip
        tasks = of_token * (num_tokens // (tile.m // heads) + num_requests) * max(1, most)
        latent_attention_kernel[(min(tasks, num_sms * tile.programs_per_sm),)](
            q_latent, q_turned, *caches, block_table, query_start_loc, seq_lens, ancestors, states.row_splits, out,
            states.partial, states.partial_max, states.partial_sum,
            sm_scale, num_requests, states.rows, block_table.stride(0), *q_latent.stride()[:2], *q_turned.stride()[:2],
            SPLIT_ROWS=split_rows, SPLIT_TOKENS=splits.tokens, MOST_SPLITS=most, EXACT=exact, WINDOW=window,
            BLOCK_R=max(16, triton.next_power_of_2(num_requests)), BLOCK_G=heads, BLOCK_M=tile.m, BLOCK_N=tile.n,
            **sizes, **options,
        )  # fmt: skip
        if most > 1:
            _merge(query_start_loc, num_requests, states, out, sizes, split_rows, exact, most)
    return out


def _merge(
    query_start_loc: Tensor | None, num_requests: int, states: _States, out: Tensor, sizes: dict[str, int],
    split_rows: int, exact: bool, most: int,
) -> None:  # fmt: skip
    """Launch the merge kernel."""
    latent_attention_merge_kernel[(num_requests, sizes["NUM_HEADS"])](
        query_start_loc, states.row_splits, out, states.partial, states.partial_max, states.partial_sum, states.rows,
        NUM_HEADS=sizes["NUM_HEADS"], LATENT_DIM=sizes["LATENT_DIM"], SPLIT_ROWS=split_rows, EXACT=exact,
        SPLITS=1 if exact else triton.next_power_of_2(most), BLOCK_C=sizes["BLOCK_C"],
        num_warps=4, enable_fp_fusion=not exact,
    )  # fmt: skip


def rotary_latent_decode_attention(
    q_latent: Tensor, q_turned: Tensor, k_turned: Tensor, latent: Tensor, cos_sin: Tensor, norm: Tensor,
    query_scale: Tensor | None, eps: float, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
    v_scale: Tensor | None, *rest: Any,
) -> Tensor:  # fmt: skip
    """The op ``rotary_latent_decode_attention`` on CUDA tensors."""
    turn, caches = ToTurn(cos_sin, norm, query_scale, eps), Caches(k_cache, v_cache, k_scale, v_scale)
    return latent_decode_attention(q_latent, q_turned, k_turned, latent, turn, caches, *rest)


def latent_decode_attention(
    q_latent: Tensor, q_turned: Tensor, k_turned: Tensor, latent: Tensor, turn: ToTurn, caches: Caches,
    block_table: Tensor, tasks: Tensor, sm_scale: float, window: int, tile: LatentTile | None = None,
) -> Tensor:  # fmt: skip
    """The op with ``turn`` and ``caches`` as tuples. ``tile`` replaces this GPU's."""
    sizes, capability, num_sms = _checked(q_latent, q_turned, k_turned, latent, caches)
    num_tokens, num_heads, dim = q_latent.shape
    assert sm_scale > 0
    tiles = latent_tiles(dim, q_latent.element_size(), caches.k.element_size(), capability)
    splits = latent_splits(tiles.decode, num_tokens, num_heads, num_sms)
    tile = tile or tiles.decode
    most = min(splits.most, (len(tasks) - 1) // num_tokens)
    block_m = max(16, heads_of_tile(tile, num_heads))
    programs = min(num_tokens * most * triton.cdiv(num_heads, block_m), num_sms * tile.programs_per_sm)
    with torch.cuda.device_of(q_latent):
        out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
        states = _States.of(q_latent, num_tokens, most)
        latent_decode_attention_kernel[(programs,)](
            q_latent, q_turned, k_turned, latent, turn.cos_sin, turn.norm, turn.query_scale, *caches, block_table,
            tasks, states.row_splits, out, states.partial, states.partial_max, states.partial_sum,
            turn.eps, sm_scale, states.rows, block_table.stride(0), turn.cos_sin.stride(0),
            *q_latent.stride()[:2], *q_turned.stride()[:2], k_turned.stride(0), latent.stride(0),
            CODE_MAX=kv_quant.CODE_MAX.get(caches.k.dtype, 0.0), WINDOW=window, BLOCK_M=block_m, BLOCK_N=tile.n,
            **sizes, num_warps=tile.warps, num_stages=tile.stages,
            enable_fp_fusion=False,  # as the write kernel; in the main loop tl.fma says what is fused
        )  # fmt: skip
        if most > 1:
            _merge(None, num_tokens, states, out, sizes, 1, False, most)
    return out
