"""The kernel before attention: a step's keys and values to the paged cache, quantised if it is (``kv_quant.py``).

With rotary embeddings it also turns queries and keys, as ``ops.rope`` does, and so takes the place of that op's kernel:
turned keys go straight to the cache. Values may have norms of their heads.
"""

import triton
import triton.language as tl

from compiled_llm.ops.attention import kv_quant
from compiled_llm.ops.rowwise.triton_kernels import cast, inverse_rms, turned_heads, weighted

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
SMALLEST_MAXIMUM = tl.constexpr(kv_quant.SMALLEST_MAXIMUM)
# Adding 1.5 * 2^23 rounds a float32 below 2^22 to an integer, ties to even, as every addition rounds; the last 22 bits
# of the sum are those of the integer.
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
    """Of the rows of ``x``: the largest magnitude, and 1 where something is not finite, else 0.

    As integers, magnitudes have the order of their numbers, with infinity and then NaN above all.
    """
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    return largest.to(tl.float32, bitcast=True), (largest >= 0x7F800000).to(tl.int32)


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
    if CODE_MAX == 127:
        # Nothing is far enough above 127 to round to more. The integer is in the last bits.
        return (scaled + TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        return _to_fp8(tl.minimum(tl.maximum(scaled, -CODE_MAX), CODE_MAX))


@triton.jit
def quantised_halves(first, second, CODE_MAX: tl.constexpr):
    """Codes of rows that come in two parts, and the scales of both."""
    x, y = first.to(tl.float32), second.to(tl.float32)
    x_largest, x_is_bad = _largest(x)
    y_largest, y_is_bad = _largest(y)
    is_bad = x_is_bad | y_is_bad
    inverse, scale = _factors(tl.maximum(x_largest, y_largest), is_bad, CODE_MAX)
    return _codes(x, inverse, is_bad, CODE_MAX), _codes(y, inverse, is_bad, CODE_MAX), scale


@triton.jit
def _slots(slot, first_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Where the rows of ``BLOCK_K`` KV heads of a token lie in a cache."""
    heads = first_head + tl.arange(0, BLOCK_K)
    return (slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE, heads < NUM_KV_HEADS


@triton.jit
def store_rows(rows, inside, target, scale, slots, known, CODE_MAX: tl.constexpr):
    """Rows of keys or values, as ``CODE_MAX`` says quantised, to ``target``, and their scales."""
    if scale is None:
        tl.store(target, rows, mask=inside)
    else:
        x = rows.to(tl.float32)
        largest, is_bad = _largest(x)
        inverse, row_scale = _factors(largest, is_bad, CODE_MAX)
        tl.store(target, _codes(x, inverse, is_bad, CODE_MAX), mask=inside)
        tl.store(scale + slots, row_scale, mask=known)


@triton.jit
def write_rows(
    new, cache, scale, slot, stride_h, first_head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, CODE_MAX: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, norm=None, eps=0.0,
):  # fmt: skip
    """One token's keys, or values, of ``BLOCK_K`` KV heads to its slot; after the RMS norm of each head, if any."""
    dims = tl.arange(0, BLOCK_H)
    slots, known = _slots(slot, first_head, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_K)
    inside = known[:, None] & (dims < HEAD_DIM)[None, :]
    heads = first_head + tl.arange(0, BLOCK_K)
    rows = tl.load(new + heads[:, None] * stride_h + dims[None, :], mask=inside, other=0.0)
    if norm is not None:
        x = rows.to(tl.float32)
        weights = tl.load(norm + dims, mask=dims < HEAD_DIM, other=0.0)[None, :]
        rows = weighted(x * inverse_rms(x * x, eps, HEAD_DIM)[:, None], weights, rows.dtype)
    store_rows(rows, inside, cache + slots[:, None] * HEAD_DIM + dims[None, :], scale, slots, known, CODE_MAX)


@triton.jit
def _write_halves(
    first, second, inside, cache, scale, slots, known,
    HEAD_DIM: tl.constexpr, CODE_MAX: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Turned keys, a half of each head at a time, to the rows ``slots`` of a cache."""
    HALF: tl.constexpr = HEAD_DIM // 2
    target = cache + slots[:, None] * HEAD_DIM + tl.arange(0, BLOCK_H // 2)[None, :]
    if scale is None:
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)
    else:
        # Beyond a head's half there is nothing to turn: zeros.
        first, second, row_scale = quantised_halves(first, second, CODE_MAX)
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)
        tl.store(scale + slots, row_scale, mask=known)


@triton.jit
def write_turned_keys(
    new, cosines, norm, eps, cache, scale, slot, first_head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, CODE_MAX: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """As ``write_rows``, of keys that are still to be turned."""
    dtype: tl.constexpr = new.dtype.element_ty
    first, second, _, inside = turned_heads(
        new, cosines, norm, eps, first_head, dtype, NUM_KV_HEADS, HEAD_DIM // 2, BLOCK_K, BLOCK_H // 2
    )
    slots, known = _slots(slot, first_head, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_K)
    _write_halves(first, second, inside, cache, scale, slots, known, HEAD_DIM, CODE_MAX, BLOCK_H)


@triton.jit
def turned_rows(
    x, heads, row_mask, cosines, query_scale, stride, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, norm=None, eps=0.0
):  # fmt: skip
    """Heads of one token ``[M, BLOCK_H]``, turned, after their RMS norm if any.

    Each element is loaded with the one that it is turned with.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = x.dtype.element_ty
    dims = tl.arange(0, BLOCK_H)
    known = dims < HEAD_DIM
    is_first = dims < HALF
    others = tl.where(is_first, dims + HALF, dims - HALF)
    pairs = tl.where(is_first, dims, dims - HALF)
    inside = row_mask[:, None] & known[None, :]
    rows = x + heads[:, None] * stride
    own = tl.load(rows + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(rows + others[None, :], mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        scale = inverse_rms(own * own, eps, HEAD_DIM)[:, None]
        weights = tl.load(norm + dims, mask=known, other=0.0)
        own = weighted(own * scale, weights[None, :], dtype).to(tl.float32)
        weights = tl.load(norm + others, mask=known, other=0.0)
        other = weighted(other * scale, weights[None, :], dtype).to(tl.float32)
    cos = tl.load(cosines + pairs, mask=known, other=0.0)
    sin = tl.load(cosines + HALF + pairs, mask=known, other=0.0)
    sin = tl.where(is_first, -sin, sin)
    turned = cast(own * cos[None, :] + other * sin[None, :], dtype)
    if query_scale is not None:
        turned = cast(turned.to(tl.float32) * tl.load(query_scale).to(tl.float32), dtype)
    return turned


@triton.jit
def write_kernel(
    qkv, k, v, cos_sin, q_norm, k_norm, v_norm, query_scale, q, k_cache, v_cache, k_scale, v_scale,
    slot_mapping, query_start_loc, counters, out,
    eps, num_requests, num_counters, qkv_stride, k_stride_t, k_stride_h, v_stride_t, v_stride_h, cos_sin_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CODE_MAX: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_COUNTERS: tl.constexpr,
):  # fmt: skip
    """For each token programs of ``BLOCK_HEADS`` KV heads each, keys and values; with ``cos_sin`` then its queries'.

    Without ``k`` the cache has keys and values, and there are queries alone. Queries and keys are turned by the same
    code: what a program reads and writes is chosen before, and what lies in between is there once. The first program of
    a token also zeroes the output row if no request owns it, and the counters of the split kernel.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    KV_TILES: tl.constexpr = 0 if k is None else (NUM_KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    is_new = tile < KV_TILES  # keys and values
    first_head = tile * BLOCK_HEADS
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if tile == 0:
        if counters is not None:
            counter = token * BLOCK_COUNTERS + tl.arange(0, BLOCK_COUNTERS)
            tl.store(counters + counter, tl.zeros([BLOCK_COUNTERS], tl.int32), mask=counter < num_counters)
        if token >= tl.load(query_start_loc + num_requests):
            for start in range(0, NUM_HEADS * HEAD_DIM, BLOCK_OUT):
                i = start + tl.arange(0, BLOCK_OUT)
                zeros = tl.zeros([BLOCK_OUT], out.dtype.element_ty)
                tl.store(out + token * (NUM_HEADS * HEAD_DIM) + i, zeros, mask=i < NUM_HEADS * HEAD_DIM)
    if k is not None and is_new:
        write_rows(
            v + token * v_stride_t, v_cache, v_scale, slot, v_stride_h, first_head,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, CODE_MAX, BLOCK_HEADS, BLOCK_H, v_norm, eps,
        )  # fmt: skip
    if cos_sin is None:
        write_rows(
            k + token * k_stride_t, k_cache, k_scale, slot, k_stride_h, first_head,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, CODE_MAX, BLOCK_HEADS, BLOCK_H,
        )  # fmt: skip
    else:
        dtype: tl.constexpr = q.dtype.element_ty
        if k is None:
            x, num_heads, norm = qkv + token * qkv_stride, NUM_HEADS, q_norm
        else:
            x, num_heads, norm = k + token * k_stride_t, NUM_KV_HEADS, k_norm
            if not is_new:
                x, num_heads, norm = qkv + token * qkv_stride, NUM_HEADS, q_norm
                first_head -= KV_TILES * BLOCK_HEADS
        first, second, places, inside = turned_heads(
            x, cos_sin + token * cos_sin_stride, norm, eps, first_head, dtype, num_heads, HALF, BLOCK_HEADS,
            BLOCK_H // 2,
        )  # fmt: skip
        if is_new:
            slots, known = _slots(slot, first_head, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_HEADS)
            _write_halves(first, second, inside, k_cache, k_scale, slots, known, HEAD_DIM, CODE_MAX, BLOCK_H)
        else:
            if query_scale is not None:
                factor = tl.load(query_scale + token).to(tl.float32)
                first = cast(first.to(tl.float32) * factor, dtype)
                second = cast(second.to(tl.float32) * factor, dtype)
            target = q + token * (NUM_HEADS * HEAD_DIM) + places
            tl.store(target, first, mask=inside)
            tl.store(target + HALF, second, mask=inside)
