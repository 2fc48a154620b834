"""Online softmax over a quantised cache, for few query rows: the loop of the split kernel in ``triton_kernels.py``.

Codes are bytes, but the instructions that bring a tile to the tensor cores (``ldmatrix``, transposed for values) move
16 bits. So two neighbouring codes of a key are loaded as one number of 16 bits, as wide as any load, and are taken
apart in registers: into a tile of a head's even elements and one of its odd ones, each multiplied by itself. No byte is
moved alone, and four codes become four float16 in five instructions.

float16 has every code of both kinds. Queries are in it too: a row is divided by the power of two of its largest
element, so that none is out of range, and what is rounded away is less than 2^-24 of that element.
"""

import triton
import triton.language as tl

from compiled_llm.ops.attention.triton_slots import load_blocks, rows_of
from compiled_llm.ops.attention.triton_softmax import SMALLEST_UNIT, capped, factor_of, no_keys, seen_keys, weighed

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def parts(pairs, IS_FP8: tl.constexpr):
    """The even and the odd elements of int16 ``pairs`` of codes, float16 both."""
    if INTERPRET:
        even, odd = (pairs & 0xFF).to(tl.uint8), ((pairs >> 8) & 0xFF).to(tl.uint8)
        if IS_FP8:
            even, odd = even.to(tl.float8e4nv, bitcast=True), odd.to(tl.float8e4nv, bitcast=True)
        else:
            even, odd = even.to(tl.int8, bitcast=True), odd.to(tl.int8, bitcast=True)
        return even.to(tl.float16), odd.to(tl.float16)
    elif IS_FP8:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            .reg .b32 first, second;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 first, low;
            cvt.rn.f16x2.e4m3x2 second, high;
            prmt.b32 $0, first, second, 0x5410;
            prmt.b32 $1, first, second, 0x7632;
            }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        # 0x6480 is 1152 in float16, whose last 8 bits count ones: a code plus 128 in them makes 1024 + 128 + code.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 even, odd, bias;
            mov.b32 bias, 0x64806480;
            shr.u32 odd, $2, 8;
            lop3.b32 even, $2, 0x00FF00FF, bias, 0x6A;
            lop3.b32 odd, odd, 0x00FF00FF, bias, 0x6A;
            sub.f16x2 $0, even, bias;
            sub.f16x2 $1, odd, bias;
            }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def dot_codes(a, b, acc):
    if INTERPRET:  # whose tl.dot of 16 bits is exact in float32 alone
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def row_units(rows):
    """Of float32 rows ``[M, H]`` the powers of two of their largest elements: their inverses, and they themselves."""
    exponents = tl.max(tl.abs(rows), 1).to(tl.int32, bitcast=True) & 0x7F800000
    exponents = tl.minimum(tl.maximum(exponents, 4 << 23), 250 << 23)  # their inverses are normal numbers
    return ((254 << 23) - exponents).to(tl.float32, bitcast=True), exponents.to(tl.float32, bitcast=True)


@triton.jit
def in_float16(q):
    """Rows ``q`` ``[M, H]`` divided by powers of two: even and odd elements in float16, and the powers ``[M]``."""
    wide = q.to(tl.float32)
    inverse, unit = row_units(wide)
    scaled = (wide * inverse[:, None]).to(tl.float16)
    even, odd = tl.split(scaled.reshape([q.shape[0], q.shape[1] // 2, 2]))
    return even, odd, unit


@triton.jit
def attend_codes(
    q, visible, k_pairs, v_pairs, k_scale, v_scale, table_row, kv_head, oldest, begin, end, scale,
    IS_FP8: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr,
    nodes=None, context=0,
):  # fmt: skip
    """``attend`` of ``triton_kernels.py`` from its first key on, over int16 pairs of codes."""
    BLOCK_M: tl.constexpr = q.shape[0]
    HALF: tl.constexpr = HEAD_DIM // 2
    q_even, q_odd, unit = in_float16(q)
    dims = tl.arange(0, q.shape[1] // 2)
    in_head = (dims < HALF)[None, :]
    acc_even = tl.zeros([BLOCK_M, q.shape[1] // 2], tl.float32)
    acc_odd, row_max, row_sum = no_keys(BLOCK_M, q.shape[1] // 2)
    factor = factor_of(scale, SOFT_CAP)
    # Block numbers are loaded one tile ahead, as ``attend`` does. Weights are divided by the largest scale met so far.
    blocks = load_blocks(table_row, begin, end, BLOCK_SIZE, BLOCK_N, ALIGNED)
    largest = SMALLEST_UNIT
    for first in range(begin, end, BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        inside = positions < end
        if WINDOW > 0:
            inside = inside & (positions >= oldest)
        starts, places = rows_of(blocks, first, kv_head, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, ALIGNED)
        offsets = places[:, None] * HALF + dims[None, :]
        blocks = load_blocks(table_row, first + BLOCK_N, end, BLOCK_SIZE, BLOCK_N, ALIGNED)

        mask = inside[:, None] & in_head
        key_pairs = tl.load(k_pairs + starts[:, None] * HALF + offsets, mask=mask, other=0)
        k_even, k_odd = parts(tl.trans(key_pairs), IS_FP8)
        scores = dot_codes(q_odd, k_odd, dot_codes(q_even, k_even, tl.zeros([BLOCK_M, BLOCK_N], tl.float32)))
        scores *= unit[:, None] * tl.load(k_scale + starts + places, mask=inside, other=0.0)[None, :]
        scores = capped(scores, scale, SOFT_CAP)
        scores = tl.where(seen_keys(positions, inside, visible, WINDOW, nodes, context), scores, float("-inf"))
        probs, decay, row_max, row_sum = weighed(scores, factor, row_max, row_sum)

        value_pairs = tl.load(v_pairs + starts[:, None] * HALF + offsets, mask=mask, other=0)
        v_even, v_odd = parts(value_pairs, IS_FP8)
        scales = tl.load(v_scale + starts + places, mask=inside, other=0.0)
        new_largest = tl.maximum(largest, tl.max(scales, 0))
        weights = (probs * (scales / new_largest)[None, :]).to(tl.float16)
        decay *= largest / new_largest
        largest = new_largest
        acc_even = dot_codes(weights, v_even, acc_even * decay[:, None])
        acc_odd = dot_codes(weights, v_odd, acc_odd * decay[:, None])
    acc = tl.join(acc_even, acc_odd).reshape([BLOCK_M, q.shape[1]]) * largest
    return acc, row_max, row_sum
