"""Latent attention of a decode on the GPU: the kernel, which turns, normalises, writes and attends.

As ``triton_decode.py`` for paged attention, by the same plan: the program of the split that the new token is in makes
its latent and its part of a key, writes them and then reads them. Where heads have several tiles, each writes the same
bytes before it reads its own; no other program reads that slot. A second launch joins the splits: one program would
take long for so many heads of so many elements.
"""

import triton
import triton.language as tl

from compiled_llm.ops.attention.tiles import TASK_COLUMNS
from compiled_llm.ops.attention.triton_kernels import load_rows
from compiled_llm.ops.attention.triton_latent_kernels import attend_latents, store_rows_or_states
from compiled_llm.ops.attention.triton_latent_write import write_latent
from compiled_llm.ops.attention.triton_write import turned_rows

TASK = tl.constexpr(TASK_COLUMNS)


@triton.jit
def latent_decode_attention_kernel(
    q_latent, q_turned, k_turned, latent, cos_sin, norm, query_scale, k_cache, v_cache, k_scale, v_scale, block_table,
    tasks, row_splits, out, partial, partial_max, partial_sum,
    eps, scale, partial_rows, table_stride, cos_sin_stride,
    latent_stride_t, latent_stride_n, turned_stride_t, turned_stride_n, new_k_stride_t, new_latent_stride_t,
    NUM_HEADS: tl.constexpr, LATENT_DIM: tl.constexpr, TURNED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CODE_MAX: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A task is one of the plan's for ``BLOCK_M`` heads. Programs take turns."""
    HEAD_TILES: tl.constexpr = (NUM_HEADS + BLOCK_M - 1) // BLOCK_M
    tl.static_assert(WINDOW >= 0)  # no task has a key before it
    dims = tl.arange(0, BLOCK_C)
    num_tasks = tl.load(tasks) * HEAD_TILES
    for number in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        task = tasks + (1 + number // HEAD_TILES) * TASK
        row = tl.load(task).to(tl.int64)
        table_row = block_table + tl.load(task + 1).to(tl.int64) * table_stride
        begin, end = tl.load(task + 2), tl.load(task + 3)
        split, num_splits = tl.load(task + 4), tl.load(task + 5)
        slot = tl.load(task + 6).to(tl.int64)
        cosines = cos_sin + row * cos_sin_stride
        if slot >= 0:
            write_latent(
                k_turned + row * new_k_stride_t, latent + row * new_latent_stride_t, cosines, norm, eps,
                k_cache, v_cache, k_scale, v_scale, slot,
                LATENT_DIM, TURNED_DIM, BLOCK_SIZE, CODE_MAX, BLOCK_C, BLOCK_H,
            )  # fmt: skip
            tl.debug_barrier()  # all threads have stored before one of them reads
        heads = number % HEAD_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = heads < NUM_HEADS
        row_scale = query_scale
        if query_scale is not None:
            row_scale = query_scale + row
        q_rows = q_latent + (row * latent_stride_t + heads * latent_stride_n)[:, None] + dims[None, :]
        acc, row_max, row_sum = attend_latents(
            load_rows(q_rows, mask, dims, True, LATENT_DIM),
            turned_rows(
                q_turned + row * turned_stride_t, heads, mask, cosines, row_scale, turned_stride_n, TURNED_DIM, BLOCK_H
            ),
            None, k_cache, v_cache, k_scale, v_scale, table_row, begin, begin, end, scale,
            LATENT_DIM, TURNED_DIM, BLOCK_SIZE, 0, BLOCK_N,
        )  # fmt: skip
        place = (row * NUM_HEADS + heads) * partial_rows + split
        store_rows_or_states(
            acc, row_max, row_sum, row, heads, mask, place, num_splits, out, partial, partial_max, partial_sum,
            NUM_HEADS, LATENT_DIM,
        )  # fmt: skip
        tl.store(row_splits + row, num_splits)
