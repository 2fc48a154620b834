"""The gated delta rule and the scan of Mamba-2 on a GPU, a token after the other: decodes, and exact steps.

A program has some columns (of the delta rule) or rows (of the scan) of a request's head, which do not depend on the
others, and keeps them in registers over its tokens: a decode reads and writes its state once. A token's bits depend on
nothing but the tokens before it: operations are not fused, and tiles and warps follow from a layer's sizes alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.recurrent.triton_chunks import scan_chunks_kernel
from compiled_llm.ops.recurrent.triton_recurrent import (
    OPTIONS,
    check_contiguous,
    check_rows,
    check_strided,
    clear_padding,
    request_of,
    sigmoid,
    softplus,
    store_state,
)
from compiled_llm.ops.rowwise.triton_kernels import cast

_TILE = 32  # columns or rows of a state in a program: with 128 of the others 32 numbers a thread
_WARPS = 4
_CHUNK_WARPS = 8
_FEW = 16  # tokens of a request, at most, for which products of matrices are not worth their while


@triton.jit
def _unit(x, eps):
    """A vector of length 1 but for ``eps``."""
    one = tl.full([], 1.0, tl.float32)
    return x * tl.div_rn(one, tl.sqrt_rn(tl.sum(x * x, 0) + eps))


@triton.jit(do_not_specialize=["num_requests", "num_tokens"])
def delta_steps_kernel(
    q, k, v, a, b, A_log, dt_bias, state, out,
    query_start_loc, seq_lens, read_slot, write_slot, write_after, num_requests, num_tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, a_token, b_token, eps, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WRITES: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (columns, value head, request)."""
    head = tl.program_id(1)
    request = tl.program_id(2)
    keys = tl.arange(0, BLOCK_K)
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_column = keys < DK, columns < DV
    inside = is_key[:, None] & is_column[None, :]
    places = (head * DK + keys)[:, None] * DV + columns[None, :]
    out_places = head * DV + columns
    clear_padding(out, query_start_loc, seq_lens, request, num_requests, num_tokens, HEADS * DV, out_places, is_column)
    first, length, has_state = request_of(query_start_loc, seq_lens, request)
    if length > 0:
        slot = tl.load(read_slot + request).to(tl.int64)
        is_kept = (keys < tl.where(has_state, DK, 0))[:, None] & is_column[None, :]
        kept = tl.load(state + slot * (HEADS * DK * DV) + places, mask=is_kept, other=0.0)
        rate = tl.exp(tl.load(A_log + head))
        bias = tl.load(dt_bias + head)
        for i in range(length):
            token = (first + i).to(tl.int64)
            key = tl.load(k + token * k_token + (head // GROUP) * k_head + keys, mask=is_key, other=0.0)
            query = tl.load(q + token * q_token + (head // GROUP) * q_head + keys, mask=is_key, other=0.0)
            value = tl.load(v + token * v_token + head * v_head + columns, mask=is_column, other=0.0).to(tl.float32)
            decay = tl.exp(-rate * softplus(tl.load(a + token * a_token + head).to(tl.float32) + bias))
            beta = sigmoid(tl.load(b + token * b_token + head).to(tl.float32))
            key, query = _unit(key.to(tl.float32), eps), _unit(query.to(tl.float32), eps) * scale
            kept = kept * decay
            delta = beta * (value - tl.sum(kept * key[:, None], 0))
            kept = kept + key[:, None] * delta[None, :]
            y = tl.sum(kept * query[:, None], 0)
            tl.store(out + token * (HEADS * DV) + out_places, cast(y, out.dtype.element_ty), mask=is_column)
            store_state(state, places, kept, inside, write_slot, write_after, request, i + 1, HEADS * DK * DV, WRITES)


@triton.jit(do_not_specialize=["num_requests", "num_tokens"])
def scan_steps_kernel(
    x, dt, B, C, A_log, D, dt_bias, state, out,
    query_start_loc, seq_lens, read_slot, write_slot, write_after, num_requests, num_tokens,
    x_token, x_head, dt_token, b_token, b_head, c_token, c_head, dt_min, dt_max,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, WRITES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (rows of a state, head, request)."""
    head = tl.program_id(1)
    request = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    numbers = tl.arange(0, BLOCK_N)
    is_row, is_number = rows < HEAD_DIM, numbers < SIZE
    inside = is_row[:, None] & is_number[None, :]
    places = (head * HEAD_DIM + rows)[:, None] * SIZE + numbers[None, :]
    out_places = head * HEAD_DIM + rows
    clear_padding(
        out, query_start_loc, seq_lens, request, num_requests, num_tokens, HEADS * HEAD_DIM, out_places, is_row
    )
    first, length, has_state = request_of(query_start_loc, seq_lens, request)
    if length > 0:
        slot = tl.load(read_slot + request).to(tl.int64)
        is_kept = (rows < tl.where(has_state, HEAD_DIM, 0))[:, None] & is_number[None, :]
        kept = tl.load(state + slot * (HEADS * HEAD_DIM * SIZE) + places, mask=is_kept, other=0.0)
        rate = tl.exp(tl.load(A_log + head))
        bias, through = tl.load(dt_bias + head), tl.load(D + head)
        for i in range(length):
            token = (first + i).to(tl.int64)
            value = tl.load(x + token * x_token + head * x_head + rows, mask=is_row, other=0.0).to(tl.float32)
            b = tl.load(B + token * b_token + (head // GROUP) * b_head + numbers, mask=is_number, other=0.0)
            c = tl.load(C + token * c_token + (head // GROUP) * c_head + numbers, mask=is_number, other=0.0)
            step = softplus(tl.load(dt + token * dt_token + head).to(tl.float32) + bias)
            step = tl.minimum(tl.maximum(step, dt_min), dt_max)
            kept = kept * tl.exp(-rate * step) + (step * value)[:, None] * b.to(tl.float32)[None, :]
            y = tl.sum(kept * c.to(tl.float32)[None, :], 1) + through * value
            tl.store(out + token * (HEADS * HEAD_DIM) + out_places, cast(y, out.dtype.element_ty), mask=is_row)
            store_state(
                state, places, kept, inside, write_slot, write_after, request, i + 1, HEADS * HEAD_DIM * SIZE, WRITES
            )


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor,
    query_start_loc: Tensor, seq_lens: Tensor, read_slot: Tensor, write_slot: Tensor, write_after: Tensor, eps: float,
    max_query_len: int,
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never synchronises.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; likewise the other.
    """
    op, device = "gated_delta_rule", q.device
    indices = (query_start_loc, seq_lens, read_slot, write_slot, write_after)
    requests, writes = check_rows(op, q, *indices)
    tokens, key_heads, dk = q.shape
    heads, dv = v.shape[1:]
    if heads % key_heads:
        raise ValueError(
            f"{op}: the number of value heads must be a multiple of that of key heads, got {heads} and {key_heads}"
        )
    for name, x, shape in (
        ("q", q, (tokens, key_heads, dk)),
        ("k", k, (tokens, key_heads, dk)),
        ("v", v, (tokens, heads, dv)),
        ("a", a, (tokens, heads)),
        ("b", b, (tokens, heads)),
    ):
        check_strided(op, name, x, q.dtype, shape, device)
    check_contiguous(op, "state", state, torch.float32, (len(state), heads, dk, dv), device)
    check_contiguous(op, "A_log", A_log, torch.float32, (heads,), device)
    check_contiguous(op, "dt_bias", dt_bias, torch.float32, (heads,), device)
    out = q.new_empty(tokens, heads, dv)
    block_v = min(_TILE, triton.next_power_of_2(dv))
    if tokens and requests:
        with torch.cuda.device_of(q):
            delta_steps_kernel[(triton.cdiv(dv, block_v), heads, requests)](
                q, k, v, a, b, A_log, dt_bias, state, out, *indices, requests, tokens,
                q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), a.stride(0), b.stride(0),
                eps, dk**-0.5, HEADS=heads, GROUP=heads // key_heads, DK=dk, DV=dv, WRITES=writes,
                BLOCK_K=triton.next_power_of_2(dk), BLOCK_V=block_v, num_warps=_WARPS, **OPTIONS,
            )  # fmt: skip
    return out if requests else out.zero_()


def mamba2_scan(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A_log: Tensor, D: Tensor, dt_bias: Tensor, state: Tensor,
    query_start_loc: Tensor, seq_lens: Tensor, read_slot: Tensor, write_slot: Tensor, write_after: Tensor,
    dt_min: float, dt_max: float, max_query_len: int, *, exact: bool = False,
) -> Tensor:  # fmt: skip
    """The op, likewise; by chunks (``triton_chunks.py``) where that is allowed and faster."""
    op, device = "mamba2_scan", x.device
    indices = (query_start_loc, seq_lens, read_slot, write_slot, write_after)
    requests, writes = check_rows(op, x, *indices)
    tokens, heads, head_dim = x.shape
    groups, size = B.shape[1:]
    if heads % groups:
        raise ValueError(f"{op}: the number of heads must be a multiple of that of groups, got {heads} and {groups}")
    if dt_min > dt_max:
        raise ValueError(f"{op}: dt_min must be at most dt_max, got {dt_min} and {dt_max}")
    for name, given, shape in (
        ("x", x, (tokens, heads, head_dim)),
        ("dt", dt, (tokens, heads)),
        ("B", B, (tokens, groups, size)),
        ("C", C, (tokens, groups, size)),
    ):
        check_strided(op, name, given, x.dtype, shape, device)
    check_contiguous(op, "state", state, torch.float32, (len(state), heads, head_dim, size), device)
    for name, given in (("A_log", A_log), ("D", D), ("dt_bias", dt_bias)):
        check_contiguous(op, name, given, torch.float32, (heads,), device)
    out = x.new_empty(tokens, heads, head_dim)
    block_p = max(16, min(_TILE, triton.next_power_of_2(head_dim)))
    if tokens and requests:
        with torch.cuda.device_of(x):
            by_chunks = not exact and max_query_len > _FEW and x.dtype != torch.float32
            options = (
                {"num_warps": _CHUNK_WARPS, "enable_fp_fusion": True} if by_chunks else {"num_warps": _WARPS, **OPTIONS}
            )
            kernel = scan_chunks_kernel if by_chunks else scan_steps_kernel
            kernel[(triton.cdiv(head_dim, block_p), heads, requests)](
                x, dt, B, C, A_log, D, dt_bias, state, out, *indices, requests, tokens,
                x.stride(0), x.stride(1), dt.stride(0), B.stride(0), B.stride(1), C.stride(0), C.stride(1),
                dt_min, dt_max, HEADS=heads, GROUP=heads // groups, HEAD_DIM=head_dim, SIZE=size, WRITES=writes,
                BLOCK_P=block_p, BLOCK_N=max(16, triton.next_power_of_2(size)), **options,
            )  # fmt: skip
    return out if requests else out.zero_()
