"""The kernel that writes a step's keys and values to the paged cache, quantised if the cache is (``kv_quant.py``)."""

import triton
import triton.language as tl

from compiled_llm.ops.attention import kv_quant

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
def _quantise(x, CODE_MAX: tl.constexpr):
    """``kv_quant.quantise`` of the rows of ``x``, bit for bit: the same operations in the same order, none fused.

    ``CODE_MAX`` tells the dtype: 127 is that of int8, 448 that of float8_e4m3fn.
    """
    magnitude = tl.abs(x)
    finite = tl.max(tl.where(magnitude < float("inf"), 0, 1), 1) == 0  # NaN is not below infinity either
    maximum = tl.where(finite, tl.max(magnitude, 1), 0.0)
    maximum = tl.maximum(maximum, SMALLEST_MAXIMUM)
    one = tl.full(maximum.shape, 1.0, tl.float32)
    inverse = tl.div_rn(one, maximum) * CODE_MAX
    scaled = tl.where(finite[:, None], x * inverse[:, None], 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -CODE_MAX), CODE_MAX)
    codes = ((scaled + TO_INTEGER) - TO_INTEGER).to(tl.int8) if CODE_MAX == 127 else _to_fp8(scaled)
    return codes, tl.where(finite, tl.div_rn(maximum, one * CODE_MAX), float("nan"))


@triton.jit
def _write_rows(
    new, cache, scale, token, slot, stride_t, stride_h,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, CODE_MAX: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One token's keys, or values, of all KV heads to its slot."""
    heads = tl.arange(0, BLOCK_K)
    dims = tl.arange(0, BLOCK_H)
    inside = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    rows = tl.load(new + token * stride_t + heads[:, None] * stride_h + dims[None, :], mask=inside, other=0.0)
    slots = (slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    target = cache + slots[:, None] * HEAD_DIM + dims[None, :]
    if scale is None:
        tl.store(target, rows, mask=inside)
    else:
        codes, row_scale = _quantise(rows.to(tl.float32), CODE_MAX)
        tl.store(target, codes, mask=inside)
        tl.store(scale + slots, row_scale, mask=heads < NUM_KV_HEADS)


@triton.jit
def write_kernel(
    k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, query_start_loc, out,
    num_requests, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CODE_MAX: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """One program a token. Also zeroes the output rows that no request owns."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    _write_rows(
        k, k_cache, k_scale, token, slot, k_stride_t, k_stride_h,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, CODE_MAX, BLOCK_K, BLOCK_H,
    )  # fmt: skip
    _write_rows(
        v, v_cache, v_scale, token, slot, v_stride_t, v_stride_h,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, CODE_MAX, BLOCK_K, BLOCK_H,
    )  # fmt: skip

    if token >= tl.load(query_start_loc + num_requests):
        i = tl.arange(0, BLOCK_OUT)
        zeros = tl.zeros([BLOCK_OUT], out.dtype.element_ty)
        tl.store(out + token * (NUM_HEADS * HEAD_DIM) + i, zeros, mask=i < NUM_HEADS * HEAD_DIM)
