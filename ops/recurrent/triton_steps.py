"""The gated delta rule and the scan of Mamba-2 on a GPU, a token after the other: decodes, and exact steps.

A program has some columns (of the delta rule) or rows (of the scan) of a request's head, which do not depend on the
others, and keeps them in registers over its tokens: a decode reads and writes its state once. A token's bits depend on
nothing but the tokens before it: operations are not fused, and tiles and warps follow from a layer's sizes alone.
"""

import triton
import triton.language as tl

from compiled_llm.ops.recurrent.triton_recurrent import (
    clear_padding,
    request_of,
    sigmoid,
    softplus,
    store_state,
)
from compiled_llm.ops.rowwise.triton_kernels import cast

TILE = 32  # columns or rows of a state in a program: with 128 of the others 32 numbers a thread
WARPS = 4


@triton.jit
def state_tile(
    state, out, query_start_loc, seq_lens, read_slot, num_requests, num_tokens, HEADS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BY_ROWS: tl.constexpr,
):  # fmt: skip
    """Of program (columns, or if BY_ROWS rows; head; request): what it computes, and its state before.

    Of a state ``[ROWS, COLUMNS]`` of each head it has all rows of its columns, or the other way round; outputs go with
    these. Its padding is cleared.

    Returns (request, first token, tokens, head, rows, columns, their places in a slot, the state there).
    """
    head, request = tl.program_id(1), tl.program_id(2)
    OUTPUTS: tl.constexpr = ROWS if BY_ROWS else COLUMNS
    if BY_ROWS:
        rows, columns = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLUMNS)
        outputs = rows
    else:
        rows, columns = tl.arange(0, BLOCK_ROWS), tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        outputs = columns
    places = (head * ROWS + rows)[:, None] * COLUMNS + columns[None, :]
    clear_padding(
        out, query_start_loc, seq_lens, request, num_requests, num_tokens, HEADS * OUTPUTS, head * OUTPUTS + outputs,
        outputs < OUTPUTS,
    )  # fmt: skip
    first, length, has_state = request_of(query_start_loc, seq_lens, request)
    slot = tl.load(read_slot + request).to(tl.int64)
    # Zeros where a text starts, whatever the slot holds.
    inside = (rows < tl.where(has_state, ROWS, 0))[:, None] & (columns < COLUMNS)[None, :]
    kept = tl.load(state + slot * (HEADS * ROWS * COLUMNS) + places, mask=inside, other=0.0)
    return request, first, length, head, rows, columns, places, kept


@triton.jit
def delta_gates(a, b, rate, bias):
    """The logarithms of tokens' decays, and how much of each token is written."""
    return -rate * softplus(a.to(tl.float32) + bias), sigmoid(b.to(tl.float32))


@triton.jit
def _unit(x, eps):
    """A vector of length 1 but for ``eps``."""
    one = tl.full([], 1.0, tl.float32)
    return x * tl.div_rn(one, tl.sqrt_rn(tl.sum(x * x, 0) + eps))


@triton.jit
def delta_steps(
    q, k, v, a, b, A_log, dt_bias, state, out, write_slot, write_after,
    q_token, q_head, k_token, k_head, v_token, v_head, a_token, b_token, eps, scale,
    request, first, length, head, keys, columns, places, kept,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """The tokens of what ``state_tile`` gave, one after the other."""
    is_key, is_column = keys < DK, columns < DV
    inside = is_key[:, None] & is_column[None, :]
    rate, bias = tl.exp(tl.load(A_log + head)), tl.load(dt_bias + head)
    for i in range(length):
        token = (first + i).to(tl.int64)
        key = tl.load(k + token * k_token + (head // GROUP) * k_head + keys, mask=is_key, other=0.0)
        query = tl.load(q + token * q_token + (head // GROUP) * q_head + keys, mask=is_key, other=0.0)
        value = tl.load(v + token * v_token + head * v_head + columns, mask=is_column, other=0.0).to(tl.float32)
        decay, beta = delta_gates(
            tl.load(a + token * a_token + head), tl.load(b + token * b_token + head), rate, bias
        )  # fmt: skip
        key, query = _unit(key.to(tl.float32), eps), _unit(query.to(tl.float32), eps) * scale
        kept = kept * tl.exp(decay)
        delta = beta * (value - tl.sum(kept * key[:, None], 0))
        kept = kept + key[:, None] * delta[None, :]
        y = tl.sum(kept * query[:, None], 0)
        tl.store(out + token * (HEADS * DV) + head * DV + columns, cast(y, out.dtype.element_ty), mask=is_column)
        store_state(state, places, kept, inside, write_slot, write_after, request, i + 1, HEADS * DK * DV, WRITES)


@triton.jit(do_not_specialize=["num_requests", "num_tokens"])
def delta_steps_kernel(
    q, k, v, a, b, A_log, dt_bias, state, out,
    query_start_loc, seq_lens, read_slot, write_slot, write_after, num_requests, num_tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, a_token, b_token, eps, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WRITES: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (columns, value head, request)."""
    request, first, length, head, keys, columns, places, kept = state_tile(
        state, out, query_start_loc, seq_lens, read_slot, num_requests, num_tokens, HEADS, DK, DV, BLOCK_K, BLOCK_V,
        False,
    )  # fmt: skip
    delta_steps(
        q, k, v, a, b, A_log, dt_bias, state, out, write_slot, write_after,
        q_token, q_head, k_token, k_head, v_token, v_head, a_token, b_token, eps, scale,
        request, first, length, head, keys, columns, places, kept, HEADS, GROUP, DK, DV, WRITES,
    )  # fmt: skip


@triton.jit
def scan_weights(A_log, D, dt_bias, head):
    """(the rate of decay, what is added to dt, how much of its input a token gives besides) of a head."""
    return tl.exp(tl.load(A_log + head)), tl.load(dt_bias + head), tl.load(D + head)


@triton.jit
def scan_step(dt, bias, dt_min, dt_max):
    """How far tokens go, from what their inputs say."""
    step = softplus(dt.to(tl.float32) + bias)
    return tl.minimum(tl.maximum(step, dt_min), dt_max)


@triton.jit(do_not_specialize=["num_requests", "num_tokens"])
def scan_steps_kernel(
    x, dt, B, C, A_log, D, dt_bias, state, out,
    query_start_loc, seq_lens, read_slot, write_slot, write_after, num_requests, num_tokens,
    x_token, x_head, dt_token, b_token, b_head, c_token, c_head, dt_min, dt_max,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, WRITES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (rows of a state, head, request)."""
    request, first, length, head, rows, numbers, places, kept = state_tile(
        state, out, query_start_loc, seq_lens, read_slot, num_requests, num_tokens, HEADS, HEAD_DIM, SIZE, BLOCK_P,
        BLOCK_N, True,
    )  # fmt: skip
    is_row, is_number = rows < HEAD_DIM, numbers < SIZE
    inside = is_row[:, None] & is_number[None, :]
    rate, bias, through = scan_weights(A_log, D, dt_bias, head)
    for i in range(length):
        token = (first + i).to(tl.int64)
        value = tl.load(x + token * x_token + head * x_head + rows, mask=is_row, other=0.0).to(tl.float32)
        b = tl.load(B + token * b_token + (head // GROUP) * b_head + numbers, mask=is_number, other=0.0)
        c = tl.load(C + token * c_token + (head // GROUP) * c_head + numbers, mask=is_number, other=0.0)
        step = scan_step(tl.load(dt + token * dt_token + head), bias, dt_min, dt_max)
        kept = kept * tl.exp(-rate * step) + (step * value)[:, None] * b.to(tl.float32)[None, :]
        y = tl.sum(kept * c.to(tl.float32)[None, :], 1) + through * value
        target = out + token * (HEADS * HEAD_DIM) + head * HEAD_DIM + rows
        tl.store(target, cast(y, out.dtype.element_ty), mask=is_row)
        store_state(
            state, places, kept, inside, write_slot, write_after, request, i + 1, HEADS * HEAD_DIM * SIZE, WRITES
        )
