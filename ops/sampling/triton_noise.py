"""The noise of tokens in Triton, with the bits of ``noise.py``, which explains it."""

import triton
import triton.language as tl

from compiled_llm.ops.sampling import noise

BLOCK = tl.constexpr(noise.BLOCK)
_COEFFICIENTS = tl.constexpr(noise.LOG_COEFFICIENTS)


@triton.jit
def least_of_blocks(seed, position, blocks):
    """Of blocks, int32: the least E of each, float32, and its place in the block, int32."""
    first, second = _words(seed, position, blocks, 0)
    return _exponential(first) * (1.0 / BLOCK), (second % BLOCK).to(tl.int32)


@triton.jit
def more_of_tokens(seed, position, tokens):
    """What the E of tokens, int32, is more than the least of their block: float32."""
    first, _ = _words(seed, position, tokens, 1)
    return _exponential(first)


@triton.jit
def gumbel(exponential):
    """The noise of an E: int32."""
    bits = exponential.to(tl.int32, bitcast=True)
    y = (0x800000 - (bits & 0x7FFFFF)) << 7
    return (_high_product(_log_quotient(y), y) >> 4) - (((bits >> 23) - 126) << 24)


@triton.jit
def _words(seed, position, numbers, KIND: tl.constexpr):
    """The first two words of the counters (position, number, KIND, 0)."""
    zeros = numbers * 0
    first, second, _, _ = tl.philox(seed, zeros + position, numbers, zeros + KIND, zeros)
    return first, second


@triton.jit
def _exponential(word):
    v = ((word >> 1) | 1).to(tl.int32)
    halvings = 157 - ((v & ~(v >> 1)).to(tl.float32).to(tl.int32, bitcast=True) >> 23)
    rest = 0x7FFFFFFF - (v << halvings) + 1
    bits = rest.to(tl.float32).to(tl.int32, bitcast=True)
    product = _high_product(_log_quotient(rest), ((bits & 0x7FFFFF) | 0x800000) << 6)
    unit = (((bits >> 23) - 57) << 23).to(tl.float32, bitcast=True)
    return halvings.to(tl.float32) + product.to(tl.float32) * unit


@triton.jit
def _log_quotient(y):
    z = 2 * y - 1073741824
    value = z * 0 + _COEFFICIENTS[8]
    for i in tl.static_range(8):
        value = _high_product(value, z) + _COEFFICIENTS[7 - i]
    return value


@triton.jit
def _high_product(a, b):
    """The upper half of products of int32."""
    return ((a.to(tl.int64) * b.to(tl.int64)) >> 32).to(tl.int32)
