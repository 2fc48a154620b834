"""The scan of Mamba-2 on a GPU, chunk after chunk: prompts in 16 bits that need not be exact.

Within a chunk of ``CHUNK`` tokens, products of matrices take the place of the recurrence; between chunks the state is
in registers, as in ``triton_steps.py``. A chunk ends early where a state is wanted. Factors of the products are rounded
to the dtype of the inputs, sums and the state stay in float32. (Dao and Gu, 2024, arXiv:2405.21060, section 6.)
"""

import triton
import triton.language as tl

from compiled_llm.ops.recurrent.triton_recurrent import store_state
from compiled_llm.ops.recurrent.triton_steps import scan_step, scan_weights, state_tile
from compiled_llm.ops.rowwise.triton_kernels import INTERPRET, cast, rounded

CHUNK = tl.constexpr(32)


@triton.jit
def _end_of_chunk(write_after, request, start, length, WRITES: tl.constexpr):
    """CHUNK tokens on, or before that where the request ends or its state is wanted."""
    end = tl.minimum(start + CHUNK, length)
    for w in tl.static_range(WRITES):
        after = tl.load(write_after + request * WRITES + w)
        end = tl.where(after > start, tl.minimum(end, after), end)
    return end


@triton.jit
def _decays(logs):
    """Logarithms of single decays ``[CHUNK]`` -> their sums; decays from j to i ``[CHUNK, CHUNK]``, 0 for j > i."""
    i = tl.arange(0, CHUNK)
    sums = tl.cumsum(logs, 0)
    between = tl.where(i[:, None] >= i[None, :], sums[:, None] - sums[None, :], float("-inf"))
    return sums, tl.exp(between)


@triton.jit
def _rows(x, start, stride, i, mask):
    """Elements ``i`` of the tokens from ``start`` on, ``[CHUNK, len(i)]``."""
    t = tl.arange(0, CHUNK)
    return tl.load(x + start.to(tl.int64) * stride + t[:, None] * stride + i[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(x, start, stride, i, y, mask):
    t = tl.arange(0, CHUNK)
    target = x + start.to(tl.int64) * stride + t[:, None] * stride + i[None, :]
    tl.store(target, cast(y, x.dtype.element_ty), mask=mask)


@triton.jit
def _product(x, y, dtype: tl.constexpr):
    """Of two matrices rounded to ``dtype``."""
    x, y = x.to(tl.float32), y.to(tl.float32)
    if INTERPRET:  # Triton's interpreter does not multiply matrices of bfloat16
        x, y = rounded(x, dtype), rounded(y, dtype)
    else:
        x, y = cast(x, dtype), cast(y, dtype)
    return tl.dot(x, y)


@triton.jit(do_not_specialize=["num_requests", "num_tokens"])
def scan_chunks_kernel(
    x, dt, B, C, A_log, D, dt_bias, state, out,
    query_start_loc, seq_lens, read_slot, write_slot, write_after, num_requests, num_tokens,
    x_token, x_head, dt_token, b_token, b_head, c_token, c_head, dt_min, dt_max,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, WRITES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (rows of a state, head, request)."""
    dtype: tl.constexpr = out.dtype.element_ty
    request, first, length, head, rows, numbers, places, kept = state_tile(
        state, out, query_start_loc, seq_lens, read_slot, num_requests, num_tokens, HEADS, HEAD_DIM, SIZE, BLOCK_P,
        BLOCK_N, True,
    )  # fmt: skip
    is_row, is_number = rows < HEAD_DIM, numbers < SIZE
    inside = is_row[:, None] & is_number[None, :]
    rate, bias, through = scan_weights(A_log, D, dt_bias, head)
    i = tl.arange(0, CHUNK)
    start = length * 0
    while start < length:
        end = _end_of_chunk(write_after, request, start, length, WRITES)
        is_token = start + i < end
        chunk = first + start
        tokens = chunk.to(tl.int64) + i
        step = tl.load(dt + tokens * dt_token + head, mask=is_token, other=0.0)
        step = tl.where(is_token, scan_step(step, bias, dt_min, dt_max), 0.0)
        sums, decay = _decays(-rate * step)
        total = tl.sum(tl.where(i == CHUNK - 1, sums, 0.0), 0)
        of_numbers = is_token[:, None] & is_number[None, :]
        of_rows = is_token[:, None] & is_row[None, :]
        b = _rows(B + (head // GROUP) * b_head, chunk, b_token, numbers, of_numbers)
        c = _rows(C + (head // GROUP) * c_head, chunk, c_token, numbers, of_numbers)
        value = _rows(x + head * x_head, chunk, x_token, rows, of_rows).to(tl.float32)
        added = value * step[:, None]

        y = _product(c, tl.trans(kept), dtype) * tl.exp(sums)[:, None] + through * value
        y += _product(_product(c, tl.trans(b), dtype) * decay, added, dtype)
        _store_rows(out, chunk, HEADS * HEAD_DIM, head * HEAD_DIM + rows, y, of_rows)

        to_end = tl.exp(total - sums)
        kept = kept * tl.exp(total) + _product(tl.trans(added * to_end[:, None]), b, dtype)
        store_state(state, places, kept, inside, write_slot, write_after, request, end, HEADS * HEAD_DIM * SIZE, WRITES)
        start = end
