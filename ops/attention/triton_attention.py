"""Paged attention on the GPU: the launch of its Triton kernels. ``paged_attention.py`` says what they compute.

The kernels, each a fixed grid that follows from shapes alone. Every length lives on the device, so a call can be
captured in a CUDA graph once and replayed with other lengths.

- write (``triton_write.py``): this step's keys and values into the cache, quantised if the cache is; zeros into the
  output rows that no request owns. ``rotary_attention`` has it turn queries and keys besides.
- split (``triton_kernels.py``): requests of at most ``SHORT_QUERY`` rows, mostly decodes; of steps that
  have nothing but decodes of one query ``triton_decode.py`` has it all in one launch.
  The keys are cut into splits and a fixed number of programs works through all (request, split, tile of rows, KV
  head) tasks, so a long request among short ones spreads over the whole device, and a grid made for the longest
  possible context costs nothing when contexts are short. Launched once with the fewest rows that fill a ``tl.dot``,
  for the requests that fit in them; and if ``max_query_len`` says that there may be more rows, once more with larger
  tiles for those. The program that finishes the last split of a tile of rows joins them: it knows by a counter, which
  the write kernel has zeroed, so nothing is left over from one launch, or replay of a graph, to the next.
- prefill (``triton_prefill.py``): requests with more rows, a tile of rows at a time. Only launched if ``max_query_len``
  says there may be some.

The query heads that share a KV head are packed into the rows of one ``tl.dot``: each key is loaded once for them all.

What a result depends on: a request's splits follow from its own lengths (``_splits``), not from the batch, the width
of the table or the number of programs; a prefill tile starts at its request's first row and walks the keys in steps
from multiples of the same size. So a request's output is bit for bit the same whatever else is in the batch.
Nor does the walk of a row depend on the chunks of a prompt, except for chunks so short that the split kernel serves
them; ``triton_exact.py`` has kernels that make no exception. The price of splits of a fixed size is small, 2 to 6%
more bytes for requests in a batch that would have filled the device without splitting.

Balance: the programs are dealt all splits in turn, so of each request's equal splits no program has more than one
more than another. A split is 128 keys (``TileConfig.split_tokens``), or a 64th of a request of more than 8192. So a
program's work exceeds the mean by at most 128 keys and one 64th of each such long request, that is by P / (64 K) of the
long requests' share of the mean where P programs serve K KV heads. The programs of an SM share its bandwidth, so P
counts SMs: on 132 of them with K = 8 a batch is at most 26% out of balance.

Memory: the unfinished outputs of the splits take ``R * N * (H + 2)`` float32 times the largest number of (row, split)
pairs of one request: 64 where ``max_query_len`` is at most 8 (136 MB for 128 requests of 32 heads of 128), twice that
for more, for the more rows a request has the fewer are its splits; less for tables of less than 8192 tokens.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from compiled_llm.ops.attention import kv_quant
from compiled_llm.ops.attention.heads import heads_of
from compiled_llm.ops.attention.tiles import SM_REGISTERS, TileConfig, tile_config
from compiled_llm.ops.attention.triton_kernels import (
    MAX_SPLITS,
    MIN_MAX_SPLITS,
    SHORT_QUERY,
    TREE_QUERY,
    split_kernel,
)
from compiled_llm.ops.attention.triton_prefill import prefill_kernel
from compiled_llm.ops.attention.triton_write import write_kernel
from compiled_llm.ops.rowwise.triton_rowwise import aligned_rows

# Given explicitly: Triton 3.10 will no longer fuse multiplications and additions by default.
OPTIONS = {"enable_fp_fusion": True}
_WRITTEN_AT_ONCE = 1024  # elements of a program of the write kernel
_WRITTEN_BY_WARP = 256  # elements of a warp of it: more take registers that a thread of so many programs has not
MERGED_AT_ONCE = 1024  # elements of partial results that a warp joins at once: 32 registers a thread


class Device(NamedTuple):
    name: str
    capability: tuple[int, int]
    num_sms: int


@functools.cache
def device_facts(device: torch.device) -> Device:
    """On a CPU, where only the interpreter runs, one SM keeps tests short."""
    if device.type != "cuda":
        return Device("", (9, 0), 1)
    properties = torch.cuda.get_device_properties(device)
    return Device(properties.name, (properties.major, properties.minor), properties.multi_processor_count)


def _most_splits(query_len: int) -> int:
    return max(MAX_SPLITS.value // query_len, MIN_MAX_SPLITS.value)


class Turn(NamedTuple):
    """What the write kernel has to turn, see ``rotary_attention.py``, and where queries go."""

    qkv: Tensor
    cos_sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    v_norm: Tensor | None
    query_scale: Tensor | None
    eps: float
    q: Tensor  # [T, N, H] contiguous


def write_new_rows(
    k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
    v_scale: Tensor | None, slot_mapping: Tensor, query_start_loc: Tensor, out: Tensor, counters: Tensor | None = None,
    turn: Turn | None = None,
) -> None:  # fmt: skip
    """Launch the write kernel: this step's keys and values to the cache, zeros to the rows of ``out`` without owner.

    Zeros to ``counters``, too. With ``turn``, ``k`` is what is still to be turned; without ``k`` and ``v`` the cache
    has them.
    """
    num_tokens, num_heads, head_dim = out.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    assert (k_scale is not None) == (v_scale is not None) == kv_quant.is_quantised(k_cache.dtype)
    block_h = max(16, triton.next_power_of_2(head_dim))
    most_heads = num_kv_heads if turn is None else max(num_heads, num_kv_heads)
    block_heads = max(1, min(triton.next_power_of_2(most_heads), _WRITTEN_AT_ONCE // block_h))
    # qkv, cos_sin, q_norm, k_norm, v_norm, query_scale, eps, q
    turned = Turn(k, None, None, None, None, None, 0.0, None) if turn is None else turn  # type: ignore[arg-type]
    tiles = 0 if k is None else triton.cdiv(num_kv_heads, block_heads)
    tiles += 0 if turn is None else triton.cdiv(num_heads, block_heads)
    k_strides, v_strides = ((0, 0) if new is None else new.stride()[:2] for new in (k, v))
    num_counters = 0 if counters is None else counters.numel()
    write_kernel[(num_tokens, tiles)](
        turned.qkv, k, v, turned.cos_sin, turned.q_norm, turned.k_norm, turned.v_norm, turned.query_scale, turned.q,
        k_cache, v_cache, k_scale, v_scale, slot_mapping, query_start_loc, counters, out,
        turned.eps, len(query_start_loc) - 1, num_counters,
        turned.qkv.stride(0), *k_strides, *v_strides,
        0 if turn is None else turn.cos_sin.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        CODE_MAX=kv_quant.CODE_MAX.get(k_cache.dtype, 0.0),
        BLOCK_HEADS=block_heads, BLOCK_H=block_h, BLOCK_OUT=_WRITTEN_AT_ONCE,
        BLOCK_COUNTERS=triton.next_power_of_2(max(1, triton.cdiv(num_counters, num_tokens))),
        num_warps=max(1, block_heads * block_h // _WRITTEN_BY_WARP),
        enable_fp_fusion=False,  # a fused operation would round once where kv_quant.quantise and rope round twice
    )  # fmt: skip


def to_turn(
    qkv: Tensor, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, v_norm: Tensor | None,
    query_scale: Tensor | None, num_heads: int, num_kv_heads: int, head_dim: int, eps: float,
) -> tuple[Turn, Tensor | None, Tensor | None]:  # fmt: skip
    """The checked arguments of a rotary op, its keys (not turned) and values, ``[T, K, H]``, if it has such.

    Raises:
        ValueError: a tensor of another shape or dtype.
    """
    qkv, _ = aligned_rows(qkv, "rotary_attention", "qkv")
    cos_sin, _ = aligned_rows(cos_sin, "rotary_attention", "cos_sin", (torch.float32,))
    with_keys = qkv.shape[1] != num_heads * head_dim
    if qkv.shape[1] not in [(num_heads + n * num_kv_heads) * head_dim for n in range(3)] or head_dim % 2:
        raise ValueError(
            f"rotary_attention: qkv must have ({num_heads} + n * {num_kv_heads}) * head_dim columns for an n from 0 to "
            f"2 and an even head_dim, got {qkv.shape[1]} and {head_dim}"
        )
    if cos_sin.shape != (qkv.shape[0], head_dim):
        raise ValueError(f"rotary_attention: cos_sin must be {[qkv.shape[0], head_dim]}, got {list(cos_sin.shape)}")
    if with_keys and (q_norm is None) != (k_norm is None):
        raise ValueError("rotary_attention: q_norm and k_norm must both be tensors, or both None")
    if not with_keys and (k_norm is not None or v_norm is not None):
        raise ValueError("rotary_attention: k_norm and v_norm must be None where qkv has no keys, got a tensor")
    if query_scale is not None and (query_scale.shape != (qkv.shape[0], 1) or query_scale.dtype != qkv.dtype):
        raise ValueError(
            f"rotary_attention: query_scale must be {[qkv.shape[0], 1]} of {qkv.dtype}, got {list(query_scale.shape)} "
            f"of {query_scale.dtype}"
        )
    if query_scale is not None:
        query_scale = query_scale.contiguous()
    _, k, v = heads_of(qkv, num_heads, num_kv_heads, head_dim)
    q = qkv.new_empty(qkv.shape[0], num_heads, head_dim)
    return Turn(qkv, cos_sin, q_norm, k_norm, v_norm, query_scale, eps, q), k, v


def paged_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
    v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    sinks: Tensor | None, sm_scale: float, max_query_len: int, window: int, soft_cap: float,
    ancestors: Tensor | None = None, tiles: TileConfig | None = None, turn: Turn | None = None,
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    ``tiles`` replaces this GPU's configuration for the shape: ``compiled-llm tune attention`` looks for a better one.
    With ``turn``, ``q`` is where turned queries go, and ``k`` is still to be turned.
    """
    head_dim, (num_requests, table_width) = q.shape[2], block_table.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    gpu, capability, num_sms = device_facts(q.device)
    kv_quant.check_capability(k_cache.dtype, capability)
    tiles = tiles or tile_config(head_dim, q.element_size(), k_cache.element_size(), capability, gpu)
    assert sm_scale > 0
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    short = (SHORT_QUERY if ancestors is None else TREE_QUERY).value
    counter_rows = max(1, min(max_query_len, short))
    # The last one is the prefill kernel's.
    counters = torch.empty(num_requests * num_kv_heads * counter_rows + 1, dtype=torch.int32, device=q.device)
    # What the split and prefill kernels share, in the order of their arguments.
    inputs = (q, k_cache, v_cache, k_scale, v_scale, block_table, query_start_loc, seq_lens, sinks, out)
    check_trees(ancestors, window)
    strides = (block_table.stride(0), q.stride(0), q.stride(1))
    shape = {
        "GROUP": q.shape[1] // num_kv_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "WINDOW": window,
        "SOFT_CAP": soft_cap,
        "BLOCK_R": max(16, triton.next_power_of_2(num_requests)),
        "BLOCK_H": max(16, triton.next_power_of_2(head_dim)),
        **OPTIONS,
    }
    with torch.cuda.device_of(q):
        write_new_rows(
            k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, query_start_loc, out, counters, turn
        )  # fmt: skip
        of_split = *inputs, ancestors
        table_tokens = table_width * block_size
        _split(of_split, strides, shape, tiles, counters, sm_scale, short, max_query_len, table_tokens, num_sms)
        if min(max_query_len, q.shape[0]) > short:
            _prefill(inputs, strides, shape, tiles, counters[-1:], sm_scale, short, num_sms)
    return out


def check_trees(ancestors: Tensor | None, window: int) -> None:
    """``ValueError`` for trees that the kernels cannot serve: they tell a window by slots."""
    if ancestors is not None and 0 < window < SHORT_QUERY.value:
        raise ValueError(f"window must be 0 or at least {SHORT_QUERY.value} with trees, got {window}")


def _split(
    inputs: tuple, strides: tuple[int, int, int], shape: dict, tiles: TileConfig, counters: Tensor, sm_scale: float,
    short: int, max_query_len: int, table_tokens: int, num_sms: int,
) -> None:  # fmt: skip
    """Launch the split kernel, for requests of few rows: up to ``short``."""
    q, block_table, is_fp8 = inputs[0], inputs[5], inputs[1].dtype == torch.float8_e4m3fn
    num_requests, (_, num_heads, head_dim) = block_table.shape[0], q.shape
    num_kv_heads, block_h, block_g = shape["NUM_KV_HEADS"], shape["BLOCK_H"], triton.next_power_of_2(shape["GROUP"])
    # Requests of up to `fitting` rows take the smallest tile; the others as many of the wide ones as they need.
    small_m = max(16, block_g)
    wide_m = max(small_m, min(tiles.short_block_m, short * block_g))
    fitting = short if wide_m == small_m else small_m // block_g
    table_splits = triton.cdiv(table_tokens, tiles.split_tokens)
    splits = {rows: min(table_splits, _most_splits(rows)) for rows in range(1, short + 1)}
    partial_rows = max(rows * most for rows, most in splits.items() if rows <= max(1, max_query_len))
    parts = (num_requests, num_heads, partial_rows)
    partial = torch.empty((*parts, head_dim), dtype=torch.float32, device=q.device)
    partial_max, partial_sum = torch.empty((2, *parts), dtype=torch.float32, device=q.device)
    inputs = (q, *pairs_of_codes(q, *inputs[1:3]), *inputs[3:])
    merge_splits = max(1, min(MAX_SPLITS.value, MERGED_AT_ONCE * tiles.split_warps // block_h))
    # Else ptxas makes room for one program more than there are, and some kernels spill.
    at_once = 32 * tiles.split_warps * tiles.split_programs_per_sm
    most_registers = min(255, SM_REGISTERS // at_once) if block_h >= 512 else None
    for min_query, max_query, block_m in ((1, fitting, small_m), (fitting + 1, short, wide_m)):
        if min_query > min(max_query, max_query_len):
            continue
        tasks = max(splits[rows] * triton.cdiv(rows, block_m // block_g) for rows in range(min_query, max_query + 1))
        # Two programs of the wide tiles take all registers of an SM.
        per_sm = min(2, tiles.split_programs_per_sm) if block_m > small_m else tiles.split_programs_per_sm
        split_kernel[(min(num_requests * tasks * num_kv_heads, num_sms * per_sm),)](
            *inputs, partial, partial_max, partial_sum, counters,
            sm_scale, num_requests, partial_rows, counters.numel() // (num_requests * num_kv_heads), *strides,
            MIN_QUERY=min_query, MAX_QUERY=max_query, SPLIT_TOKENS=tiles.split_tokens, IS_FP8=is_fp8,
            MERGE_SPLITS=merge_splits,
            BLOCK_G=block_g, BLOCK_M=block_m, BLOCK_N=tiles.split_block_n, **shape,
            num_warps=tiles.split_warps,
            num_stages=tiles.split_stages,
            maxnreg=most_registers,
        )  # fmt: skip


def pairs_of_codes(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    """The caches as ``triton_codes.py`` reads them, pairs of codes, if it does."""
    if not kv_quant.is_quantised(k_cache.dtype) or q.dtype == torch.float32 or q.shape[2] % 2:
        return k_cache, v_cache
    return k_cache.view(torch.int16), v_cache.view(torch.int16)


def _prefill(
    inputs: tuple, strides: tuple[int, int, int], shape: dict, tiles: TileConfig, counter: Tensor, sm_scale: float,
    short: int, num_sms: int,
) -> None:  # fmt: skip
    """Launch the prefill kernel, for requests of more rows than ``short``."""
    num_tokens, num_requests, group = len(inputs[0]), len(inputs[5]), shape["GROUP"]
    block_m = max(tiles.prefill_block_m, triton.next_power_of_2(group))
    max_tiles = num_tokens // (block_m // group) + min(num_requests, num_tokens // (short + 1))
    most, at_once = max_tiles * shape["NUM_KV_HEADS"], num_sms * tiles.prefill_programs_per_sm
    prefill_kernel[(min(most, at_once or most),)](
        *inputs, counter, sm_scale, num_requests, *strides, ONE_TASK=at_once == 0, SHORT=short,
        BLOCK_M=block_m, BLOCK_N=tiles.prefill_block_n, **shape,
        num_warps=tiles.prefill_warps,
        num_stages=tiles.prefill_stages,
    )  # fmt: skip


def rotary_attention(
    qkv: Tensor, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, v_norm: Tensor | None,
    query_scale: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor, sinks: Tensor | None,
    num_heads: int, eps: float, sm_scale: float, max_query_len: int, window: int, soft_cap: float,
    ancestors: Tensor | None = None, attention: Callable[..., Tensor] = paged_attention,
) -> Tensor:  # fmt: skip
    """The op ``rotary_attention`` on CUDA tensors, by an ``attention`` that takes what is to be turned."""
    turn, k, v = to_turn(
        qkv, cos_sin, q_norm, k_norm, v_norm, query_scale, num_heads, k_cache.shape[1], k_cache.shape[3], eps
    )  # fmt: skip
    return attention(
        turn.q, k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, block_table, query_start_loc, seq_lens, sinks,
        sm_scale, max_query_len, window, soft_cap, ancestors, turn=turn,
    )  # fmt: skip
