"""The kernel before attention: a step's keys and values to the paged cache, quantised if it is (``kv_quant.py``).

With rotary embeddings it also turns queries and keys, as ``ops.rope`` does, and so takes the place of that op's kernel:
turned keys go straight to the cache.
"""

import triton
import triton.language as tl

from compiled_llm.ops.attention import kv_quant
from compiled_llm.ops.rowwise.triton_kernels import cast, turned_heads

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
SMALLEST_MAXIMUM = tl.constexpr(kv_quant.SMALLEST_MAXIMUM)
# Adding and subtracting 1.5 * 2^23 rounds a float32 below 2^22 to an integer, ties to even, as every addition rounds.
TO_INTEGER = tl.constexpr(1.5 * 2**23)


@triton.jit
def _to_fp8(x):
    if INTERPRET:
        # The interpreter's conversion rounds wrongly where the mantissa carries over: give it what needs no rounding,
        # multiples of an eighth of x's power of two (2^-6 at least, below which float8_e4m3fn is denormal).
        bits = x.to(tl.int32, bitcast=True)
        power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        to_multiple = tl.maximum(power, 2.0**-6) * (1.5 * 2**20)
        rounded = ((x + to_multiple) - to_multiple).to(tl.int32, bitcast=True)
        x = (rounded | (bits & ~0x7FFFFFFF)).to(tl.float32, bitcast=True)  # negative zeros keep their sign
    return x.to(tl.float8e4nv)


@triton.jit
def _largest(x):
    """Of the rows of ``x``: the largest magnitude, and 1 where something is not finite, else 0."""
    magnitude = tl.abs(x)
    return tl.max(magnitude, 1), tl.max(tl.where(magnitude < float("inf"), 0, 1), 1)  # NaN is not below infinity


@triton.jit
def _factors(largest, is_bad, CODE_MAX: tl.constexpr):
    """What makes codes of a row's elements, and its scale: the operations of ``kv_quant.quantise``, none fused."""
    maximum = tl.maximum(tl.where(is_bad == 0, largest, 0.0), SMALLEST_MAXIMUM)
    one = tl.full(maximum.shape, 1.0, tl.float32)
    scale = tl.where(is_bad == 0, tl.div_rn(maximum, one * CODE_MAX), float("nan"))
    return tl.div_rn(one, maximum) * CODE_MAX, scale


@triton.jit
def _codes(x, inverse, is_bad, CODE_MAX: tl.constexpr):
    """``CODE_MAX`` tells the dtype: 127 is that of int8, 448 that of float8_e4m3fn."""
    scaled = tl.where((is_bad == 0)[:, None], x * inverse[:, None], 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -CODE_MAX), CODE_MAX)
    return ((scaled + TO_INTEGER) - TO_INTEGER).to(tl.int8) if CODE_MAX == 127 else _to_fp8(scaled)


@triton.jit
def _slots(slot, first_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Where the rows of ``BLOCK_K`` KV heads of a token lie in a cache."""
    heads = first_head + tl.arange(0, BLOCK_K)
    return (slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE, heads < NUM_KV_HEADS


@triton.jit
def write_rows(
    new, cache, scale, slot, stride_h, first_head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, CODE_MAX: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One token's keys, or values, of ``BLOCK_K`` KV heads to its slot."""
    dims = tl.arange(0, BLOCK_H)
    slots, known = _slots(slot, first_head, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_K)
    inside = known[:, None] & (dims < HEAD_DIM)[None, :]
    heads = first_head + tl.arange(0, BLOCK_K)
    rows = tl.load(new + heads[:, None] * stride_h + dims[None, :], mask=inside, other=0.0)
    target = cache + slots[:, None] * HEAD_DIM + dims[None, :]
    if scale is None:
        tl.store(target, rows, mask=inside)
    else:
        x = rows.to(tl.float32)
        largest, is_bad = _largest(x)
        inverse, row_scale = _factors(largest, is_bad, CODE_MAX)
        tl.store(target, _codes(x, inverse, is_bad, CODE_MAX), mask=inside)
        tl.store(scale + slots, row_scale, mask=known)


@triton.jit
def write_turned_keys(
    new, cosines, norm, eps, cache, scale, slot, first_head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, CODE_MAX: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The same of keys that are still to be turned, a half of each head at a time."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = new.dtype.element_ty
    first, second, _, inside = turned_heads(
        new, cosines, norm, eps, first_head, dtype, NUM_KV_HEADS, HALF, BLOCK_K, BLOCK_H // 2
    )
    slots, known = _slots(slot, first_head, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_K)
    target = cache + slots[:, None] * HEAD_DIM + tl.arange(0, BLOCK_H // 2)[None, :]
    if scale is None:
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)
    else:
        # Beyond a head's half there is nothing to turn: zeros.
        x, y = first.to(tl.float32), second.to(tl.float32)
        x_largest, x_is_bad = _largest(x)
        y_largest, y_is_bad = _largest(y)
        is_bad = x_is_bad | y_is_bad
        inverse, row_scale = _factors(tl.maximum(x_largest, y_largest), is_bad, CODE_MAX)
        tl.store(target, _codes(x, inverse, is_bad, CODE_MAX), mask=inside)
        tl.store(target + HALF, _codes(y, inverse, is_bad, CODE_MAX), mask=inside)
        tl.store(scale + slots, row_scale, mask=known)


@triton.jit
def _turn_queries(
    new, cosines, norm, eps, query_scale, q, first_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """``BLOCK_Q`` query heads of one token, to ``q``."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = q.dtype.element_ty
    first, second, places, inside = turned_heads(
        new, cosines, norm, eps, first_head, dtype, NUM_HEADS, HALF, BLOCK_Q, BLOCK_H // 2
    )
    if query_scale is not None:
        factor = tl.load(query_scale).to(tl.float32)
        first = cast(first.to(tl.float32) * factor, dtype)
        second = cast(second.to(tl.float32) * factor, dtype)
    tl.store(q + places, first, mask=inside)
    tl.store(q + places + HALF, second, mask=inside)


@triton.jit
def write_kernel(
    qkv, k, v, cos_sin, q_norm, k_norm, query_scale, q, k_cache, v_cache, k_scale, v_scale,
    slot_mapping, query_start_loc, counters, out,
    eps, num_requests, num_counters, qkv_stride, k_stride_t, k_stride_h, v_stride_t, v_stride_h, cos_sin_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CODE_MAX: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_COUNTERS: tl.constexpr,
):  # fmt: skip
    """For each token a program for its values, one for its keys, and with ``cos_sin`` others for its queries.

    Those for values also zero the output rows that no request owns, and the counters of the split kernel.
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if tile == 0:
        write_rows(
            v + token * v_stride_t, v_cache, v_scale, slot, v_stride_h, 0,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, CODE_MAX, BLOCK_K, BLOCK_H,
        )  # fmt: skip
        if counters is not None:
            counter = token * BLOCK_COUNTERS + tl.arange(0, BLOCK_COUNTERS)
            tl.store(counters + counter, tl.zeros([BLOCK_COUNTERS], tl.int32), mask=counter < num_counters)
        if token >= tl.load(query_start_loc + num_requests):
            i = tl.arange(0, BLOCK_OUT)
            zeros = tl.zeros([BLOCK_OUT], out.dtype.element_ty)
            tl.store(out + token * (NUM_HEADS * HEAD_DIM) + i, zeros, mask=i < NUM_HEADS * HEAD_DIM)
    elif cos_sin is None:
        write_rows(
            k + token * k_stride_t, k_cache, k_scale, slot, k_stride_h, 0,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, CODE_MAX, BLOCK_K, BLOCK_H,
        )  # fmt: skip
    elif tile == 1:
        write_turned_keys(
            k + token * k_stride_t, cos_sin + token * cos_sin_stride, k_norm, eps, k_cache, k_scale, slot, 0,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, CODE_MAX, BLOCK_K, BLOCK_H,
        )  # fmt: skip
    else:
        if query_scale is not None:
            query_scale += token
        _turn_queries(
            qkv + token * qkv_stride, cos_sin + token * cos_sin_stride, q_norm, eps, query_scale,
            q + token * (NUM_HEADS * HEAD_DIM), (tile - 2) * BLOCK_Q,
            NUM_HEADS, HEAD_DIM, BLOCK_Q, BLOCK_H,
        )  # fmt: skip
