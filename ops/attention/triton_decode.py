"""Attention of a decode on the GPU: the kernel of a layer, and its launch.

``decode_plan.py`` and ``decode_attention.py`` say what they compute. The kernel of a layer is the split kernel of
``triton_kernels.py`` for one query a request, with these differences:

- It takes its tasks from the plan, where that one finds them by a scan of all lengths.
- Each program turns its own queries. That is done in every split of a request again, from the L2 cache.
- The program of the split that the new key is in makes the key and the value (normalised, turned, quantised) and writes
  them to the cache before it reads that split. All its threads wait in between; no other program reads that slot, as
  blocks that requests share are full. So it sees to the bit the keys that later steps read.
- The last program to finish a split of a request sets its counter back to zero for the next layer. The plan has zeroed
  it at the beginning of the step, so nothing is left over from a step that failed.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.attention import kv_quant
from compiled_llm.ops.attention.heads import heads_of
from compiled_llm.ops.attention.tiles import (
    TASK_COLUMNS,
    DecodeTile,
    TileConfig,
    decode_splits,
    decode_tile,
    tile_config,
)
from compiled_llm.ops.attention.triton_alone import alone_kernel
from compiled_llm.ops.attention.triton_attention import device_facts, pairs_of_codes
from compiled_llm.ops.attention.triton_codes import attend_codes
from compiled_llm.ops.attention.triton_kernels import add_sinks, attend, load_rows, normalised, store_whole
from compiled_llm.ops.attention.triton_softmax import LOWEST, no_keys
from compiled_llm.ops.attention.triton_write import turned_rows, write_rows, write_turned_keys
from compiled_llm.ops.programmatic_launch import launch_options
from compiled_llm.ops.rowwise.triton_rowwise import aligned_rows
from compiled_llm.ops.triton_programmatic import wait_for_launches_before

TASK = tl.constexpr(TASK_COLUMNS)
# Of the kernel for one request: other heads have padding, and larger ones or more of them more than its registers.
ALONE_HEAD_DIMS, ALONE_GROUP = (64, 128), 8
_MERGED_SPLITS = 32  # that are joined at once: each takes registers for its weight


@triton.jit
def _write_new(
    k, v, cosines, norm, v_norm, eps, k_cache, v_cache, k_scale, v_scale, slot, kv_head, k_stride_h, v_stride_h,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, CODE_MAX: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A token's key and value of one head to its slot."""
    if CODE_MAX == 127:
        k_cache = k_cache.to(tl.pointer_type(tl.int8), bitcast=True)
        v_cache = v_cache.to(tl.pointer_type(tl.int8), bitcast=True)
    if CODE_MAX == 448:
        k_cache = k_cache.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        v_cache = v_cache.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    if cosines is None:
        write_rows(
            k, k_cache, k_scale, slot, k_stride_h, kv_head,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, CODE_MAX, 1, BLOCK_H,
        )  # fmt: skip
    else:
        write_turned_keys(
            k, cosines, norm, eps, k_cache, k_scale, slot, kv_head,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, CODE_MAX, 1, BLOCK_H,
        )  # fmt: skip
    write_rows(
        v, v_cache, v_scale, slot, v_stride_h, kv_head,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, CODE_MAX, 1, BLOCK_H, v_norm, eps,
    )  # fmt: skip


@triton.jit
def _merge_heads(
    sinks, out, partial, partial_max, partial_sum, row, kv_head, num_splits, partial_rows,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """``merge`` of the heads of one token, ``HEADS`` with ``SPLITS`` splits of each at once."""
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    dims = tl.arange(0, BLOCK_H)
    inside = dims < HEAD_DIM
    turns = tl.cdiv(num_splits, SPLITS)  # of a head
    acc, row_max, row_sum = no_keys(HEADS, BLOCK_H)
    for turn in tl.range(0, tl.cdiv(GROUP, HEADS) * turns, num_stages=1):
        m = turn // turns * HEADS + tl.arange(0, HEADS)
        heads = kv_head * GROUP + m
        first_split = turn % turns * SPLITS
        splits = tl.arange(0, SPLITS)
        known = (splits < num_splits - first_split)[:, None] & (m < GROUP)[None, :]
        # What differs from split to split are constants. From the L2 cache, which all programs write to: that of this
        # SM may have older bytes.
        part = ((row * NUM_HEADS + heads) * partial_rows + first_split)[None, :]
        split_max = tl.load(partial_max + part + splits[:, None], mask=known, other=LOWEST, cache_modifier=".cg")
        split_sum = tl.load(partial_sum + part + splits[:, None], mask=known, other=0.0, cache_modifier=".cg")
        split_acc = tl.load(
            partial + (part * HEAD_DIM)[:, :, None] + (splits[:, None, None] * HEAD_DIM + dims[None, None, :]),
            mask=known[:, :, None] & inside[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        if first_split == 0:
            acc = tl.zeros([HEADS, BLOCK_H], tl.float32)
            row_max = tl.full([HEADS], LOWEST, tl.float32)
            row_sum = tl.zeros([HEADS], tl.float32)
        new_max = tl.maximum(row_max, tl.max(split_max, 0))
        decay = tl.exp2(row_max - new_max)
        weight = tl.exp2(split_max - new_max[None, :])
        row_sum = row_sum * decay + tl.sum(weight * split_sum, 0)
        acc = acc * decay[:, None] + tl.sum(split_acc * weight[:, :, None], 0)
        row_max = new_max
        if first_split + SPLITS >= num_splits:
            total = add_sinks(row_max, row_sum, sinks, heads, m < GROUP)
            target = out + (row * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
            mask = (m < GROUP)[:, None] & inside[None, :]
            tl.store(target, normalised(acc, total).to(out.dtype.element_ty), mask=mask)


@triton.jit
def decode_kernel(
    q, k, v, cos_sin, q_norm, k_norm, v_norm, query_scale, k_cache, v_cache, k_scale, v_scale,
    block_table, tasks, counters, sinks, out, partial, partial_max, partial_sum,
    eps, scale, partial_rows, table_stride, cos_sin_stride,
    q_stride_t, q_stride_n, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CODE_MAX: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, MERGE_HEADS: tl.constexpr,
    MERGE_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """A task is one of the plan's for one KV head; programs take turns.

    Tasks over the same keys follow each other. Whichever program finishes the last split of a request and KV head joins
    them all, in their order.

    Where queries are of 16 bits, a quantised cache comes as int16, two codes each; ``CODE_MAX`` tells the kind.
    """
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    tl.static_assert(WINDOW >= 0)  # no task has a key before it
    if PROGRAMMATIC:
        wait_for_launches_before()
    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_H)
    num_tasks = tl.load(tasks) * NUM_KV_HEADS
    for number in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        kv_head = number % NUM_KV_HEADS
        task = tasks + (1 + number // NUM_KV_HEADS) * TASK
        row = tl.load(task).to(tl.int64)
        table_row = block_table + tl.load(task + 1).to(tl.int64) * table_stride
        begin, end = tl.load(task + 2), tl.load(task + 3)
        split, num_splits = tl.load(task + 4), tl.load(task + 5)
        slot = tl.load(task + 6).to(tl.int64)
        cosines = None
        if cos_sin is not None:
            cosines = cos_sin + row * cos_sin_stride
        if k is not None and slot >= 0:  # without k the cache has the new key
            _write_new(
                k + row * k_stride_t, v + row * v_stride_t, cosines, k_norm, v_norm, eps, k_cache, v_cache,
                k_scale, v_scale, slot, kv_head, k_stride_h, v_stride_h,
                NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, CODE_MAX, BLOCK_H,
            )  # fmt: skip
            tl.debug_barrier()  # all threads have stored before one of them reads

        heads = kv_head * GROUP + m
        row_mask = m < GROUP
        if cos_sin is None:
            q_rows = q + (row * q_stride_t + heads * q_stride_n)[:, None] + dims[None, :]
            q_tile = load_rows(q_rows, row_mask, dims, True, HEAD_DIM)
        else:
            row_scale = query_scale
            if query_scale is not None:
                row_scale = query_scale + row
            q_tile = turned_rows(
                q + row * q_stride_t, heads, row_mask, cosines, row_scale, HEAD_DIM, HEAD_DIM, BLOCK_H, q_norm, eps
            )  # fmt: skip

        if k_cache.dtype.element_ty == tl.int16:
            acc, row_max, row_sum = attend_codes(
                q_tile, None, k_cache, v_cache, k_scale, v_scale, table_row, kv_head, begin, begin, end, scale,
                CODE_MAX == 448, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, 0, SOFT_CAP, BLOCK_N, WINDOW == 0,
            )  # fmt: skip
        else:
            acc, row_max, row_sum = no_keys(BLOCK_M, BLOCK_H)
            acc, row_max, row_sum = attend(
                acc, row_max, row_sum, q_tile, None, k_cache, v_cache, k_scale, v_scale, table_row, kv_head,
                begin, begin, end, scale, True, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, 0, SOFT_CAP, BLOCK_N, False,
                WINDOW == 0,
            )  # fmt: skip
        store_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
        if num_splits == 1:
            store_whole(acc, row_max, row_sum, sinks, heads, row_mask, out + row * (NUM_HEADS * HEAD_DIM), HEAD_DIM)
        else:
            part = (row * NUM_HEADS + heads) * partial_rows + split
            tl.store(partial + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=store_mask)
            tl.store(partial_max + part, row_max, mask=row_mask)
            tl.store(partial_sum + part, row_sum, mask=row_mask)
            # All threads have stored before one of them counts, with a release of what was stored and an acquire of
            # what others released; and all threads wait for its answer.
            tl.debug_barrier()
            counter = counters + row * NUM_KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                tl.store(counter, 0)
                _merge_heads(
                    sinks, out, partial, partial_max, partial_sum, row, kv_head, num_splits, partial_rows,
                    GROUP, NUM_KV_HEADS, HEAD_DIM, MERGE_HEADS, MERGE_SPLITS, BLOCK_H,
                )  # fmt: skip


class Turning(NamedTuple):
    """What turns queries and keys, see ``rotary_attention.py``."""

    cos_sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    v_norm: Tensor | None
    query_scale: Tensor | None


def merged_at_once(tile: DecodeTile, block_g: int, block_h: int) -> tuple[int, int]:
    """Heads and splits of each that a program joins in a turn: as many heads as registers allow."""
    has_room = tile.registers >= 224 and block_h <= 128
    elements = (128 if has_room else 64) * 32 * tile.warps // block_h
    heads = min(block_g, max(1, elements // 16))
    most = _MERGED_SPLITS if has_room or heads == 1 else _MERGED_SPLITS // 2
    return heads, min(most, elements // heads)


def plain_decode_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """The op ``decode_attention`` on CUDA tensors."""
    return decode_attention(q, k, v, None, 0.0, *rest)


def rotary_decode_attention(
    qkv: Tensor, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, v_norm: Tensor | None,
    query_scale: Tensor | None, num_heads: int, eps: float, k_cache: Tensor, *rest: Any,
) -> Tensor:  # fmt: skip
    """The op ``rotary_decode_attention`` on CUDA tensors."""
    heads = heads_of(qkv, num_heads, k_cache.shape[1], k_cache.shape[3])
    return decode_attention(*heads, Turning(cos_sin, q_norm, k_norm, v_norm, query_scale), eps, k_cache, *rest)


def decode_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, turning: Turning | None, eps: float,
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    block_table: Tensor, tasks: Tensor, counters: Tensor, sinks: Tensor | None, sm_scale: float,
    window: int, soft_cap: float, tiles: TileConfig | None = None,
) -> Tensor:  # fmt: skip
    """Both ops on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    Without ``k`` and ``v`` the cache has them. The plan knows the ``window``. ``tiles`` replaces this GPU's
    configuration: ``compiled-llm tune attention`` looks for a better one.
    """
    (num_tokens, num_heads, head_dim), (num_kv_heads, block_size) = q.shape, k_cache.shape[1:3]
    gpu, capability, num_sms = device_facts(q.device)
    kv_quant.check_capability(k_cache.dtype, capability)
    tiles = tiles or tile_config(head_dim, q.element_size(), k_cache.element_size(), capability, gpu)
    assert sm_scale > 0
    assert (k_scale is not None) == (v_scale is not None) == kv_quant.is_quantised(k_cache.dtype)
    cos_sin, q_norm, k_norm, v_norm, query_scale = turning or [None] * 5
    if cos_sin is not None:
        cos_sin, _ = aligned_rows(cos_sin, "decode_attention", "cos_sin", (torch.float32,))
        assert q.stride(1) == head_dim
        assert head_dim % 2 == 0
        assert k is None or (k.stride(1) == head_dim and (q_norm is None) == (k_norm is None))
    k_strides, v_strides = ((0, 0) if new is None else new.stride()[:2] for new in (k, v))
    block_h, most = max(16, triton.next_power_of_2(head_dim)), (len(tasks) - 1) // num_tokens
    parts = (num_tokens, num_heads, most)
    tile = decode_tile(tiles)
    block_g = triton.next_power_of_2(num_heads // num_kv_heads)
    merged_heads, merged_splits = merged_at_once(tile, block_g, block_h)
    # Else ptxas makes room for one program more than there are, and some kernels spill.
    most_registers = tile._replace(programs_per_sm=1).registers if block_h >= 256 else None
    with torch.cuda.device_of(q):
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        partial = torch.empty((*parts, head_dim), dtype=torch.float32, device=q.device)
        partial_max, partial_sum = torch.empty((2, *parts), dtype=torch.float32, device=q.device)
        shape = {
            "GROUP": num_heads // num_kv_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "CODE_MAX": kv_quant.CODE_MAX.get(k_cache.dtype, 0.0),
            "WINDOW": window,
            "SOFT_CAP": soft_cap,
            "BLOCK_M": max(16, block_g),
            "enable_fp_fusion": False,  # as the write kernel; in the main loop tl.fma says what is fused
            **launch_options(num_tokens),
        }
        fits = head_dim in ALONE_HEAD_DIMS and block_g <= ALONE_GROUP and v_norm is None
        if num_tokens == 1 and tiles.alone_warps and fits:
            splits = decode_splits(tiles, 1, num_kv_heads, num_sms).most  # no plan has more
            alone_kernel[(num_kv_heads, min(splits, most))](
                q, k, v, cos_sin, q_norm, k_norm, query_scale, *pairs_of_codes(q, k_cache, v_cache),
                k_scale, v_scale, block_table, tasks, counters, sinks, out, partial, partial_max, partial_sum,
                eps, sm_scale, most, block_table.stride(0), q.stride(1), k_strides[1], v_strides[1],
                SPLITS=splits, BLOCK_G=block_g, BLOCK_N=tiles.alone_block_n,
                num_warps=tiles.alone_warps, num_stages=3, **shape,
            )  # fmt: skip
            return out
        decode_kernel[(min(num_tokens * most * num_kv_heads, num_sms * tile.programs_per_sm),)](
            q, k, v, cos_sin, q_norm, k_norm, v_norm, query_scale, *pairs_of_codes(q, k_cache, v_cache),
            k_scale, v_scale, block_table, tasks, counters, sinks, out, partial, partial_max, partial_sum,
            eps, sm_scale, most, block_table.stride(0), 0 if cos_sin is None else cos_sin.stride(0),
            *q.stride()[:2], *k_strides, *v_strides,
            MERGE_HEADS=merged_heads, MERGE_SPLITS=merged_splits, BLOCK_N=tile.n, BLOCK_H=block_h,
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=most_registers, **shape,
        )  # fmt: skip
    return out
