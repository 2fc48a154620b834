"""The row-wise kernels in Triton. ``triton_rowwise.py`` launches them, and says why a row's bits are its own.

Numbers are rounded where ``reference.py`` rounds them: operations are in float32, none is fused with another.
"""

import triton
import triton.language as tl

from compiled_llm.ops.triton_programmatic import prefetch_rows, wait_for_launches_before

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(1.4426950408889634)
PLACES = tl.constexpr(256)  # squares of a row's elements that are so far apart are added up first
_LEVELS = tl.constexpr(8)  # halvings of PLACES to one
_UNROLLED = tl.constexpr(8)  # loads of a row that are on their way at a time, where two sums follow each other


@triton.jit
def cast(x, dtype: tl.constexpr):
    """float32 to ``dtype``, ties to even."""
    if INTERPRET and dtype == tl.bfloat16:  # Triton's interpreter cuts digits off: give it what has none to cut
        bits = x.to(tl.int32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, even, bits).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """The float32 numbers as they are after they were stored in ``dtype``."""
    return cast(x, dtype).to(tl.float32)


@triton.jit
def load_row(row, i, inside):
    return tl.load(row + i, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_sum(x, delta, i, inside):
    y = load_row(x, i, inside)
    if delta is not None:
        y = rounded(y + load_row(delta, i, inside), x.dtype.element_ty)
    return y


@triton.jit
def inverse_root(sums, eps, SIZE: tl.constexpr):
    """``1 / sqrt(sums / SIZE + eps)``."""
    ones = tl.full(sums.shape, 1.0, tl.float32)
    return tl.div_rn(ones, tl.sqrt_rn(tl.div_rn(sums, ones * SIZE) + eps))


@triton.jit
def inverse_rms(squares, eps, SIZE: tl.constexpr):
    """Of rows whose squares, padded with zeros, are the last dimension."""
    return inverse_root(tl.sum(squares, len(squares.shape) - 1), eps, SIZE)


@triton.jit
def sum_of_places(x):
    """Rows ``[M, PLACES]`` -> ``[M]``: neighbours are added, then neighbouring sums, and so on.

    The order of ``tl.sum`` would follow from how elements lie in threads. A norm is computed by its own kernel and by
    products (``linear/triton_surroundings.py``), whose threads are others. All add up squares whose places are equal
    modulo PLACES, from the first to the last, and then this way: so a row has the same bits in all of them.
    """
    for level in tl.static_range(_LEVELS):
        first, second = tl.split(tl.reshape(x, [x.shape[0], PLACES >> (level + 1), 2]))
        x = first + second
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def weighted(y, weights, dtype: tl.constexpr):
    """Weights in ``dtype`` multiply what has been rounded to it, float32 ones what has not."""
    if weights.dtype == dtype:
        y = rounded(y, dtype)
    return cast(y * weights.to(tl.float32), dtype)


@triton.jit
def norm_kernel(
    x, delta, weight, total, out, x_stride, delta_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr = False,
):  # fmt: skip
    """A program a row."""
    if PROGRAMMATIC:
        ITEM: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        prefetch_rows(weight + tl.zeros([1], tl.int32), SIZE * ITEM, 1, BLOCK * ITEM)
        wait_for_launches_before()
    norm_row(tl.program_id(0).to(tl.int64), x, delta, weight, total, out, x_stride, delta_stride, eps, SIZE, BLOCK)


@triton.jit
def norm_row(
    row, x, delta, weight, total, out, x_stride, delta_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """``sum_of_places`` says in which order squares are added up.

    Nothing is written before the last square is read: else a block's loads would wait for the one before.
    """
    x += row * x_stride
    if delta is not None:
        delta += row * delta_stride
    squares = tl.zeros([PLACES], tl.float32)
    for start in tl.static_range(0, SIZE, PLACES):
        i = start + tl.arange(0, PLACES)
        y = load_sum(x, delta, i, i < SIZE)
        squares += y * y
    scale = inverse_root(sum_of_places(squares[None, :]), eps, SIZE)
    for start in tl.static_range(0, SIZE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        y = load_sum(x, delta, i, i < SIZE)
        if delta is not None:
            tl.store(total + row * SIZE + i, cast(y, total.dtype.element_ty), mask=i < SIZE)
        weights = tl.load(weight + i, mask=i < SIZE, other=0.0)
        tl.store(out + row * SIZE + i, weighted(y * scale, weights, out.dtype.element_ty), mask=i < SIZE)


@triton.jit
def layer_norm_kernel(
    x, delta, weight, bias, total, out, x_stride, delta_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr = False,
):  # fmt: skip
    """A program a row."""
    if PROGRAMMATIC:
        wait_for_launches_before()
    row = tl.program_id(0).to(tl.int64)
    layer_norm_row(row, x, delta, None, weight, bias, total, out, x_stride, delta_stride, eps, SIZE, BLOCK)


@triton.jit
def _load_sum_beside(x, delta, beside, i, inside):
    """``x + (delta + beside)``, rounded twice; without ``beside`` as ``load_sum``."""
    if beside is None:
        y = load_sum(x, delta, i, inside)
    else:
        y = rounded(load_row(x, i, inside) + load_sum(delta, beside, i, inside), x.dtype.element_ty)
    return y


@triton.jit
def layer_norm_row(
    row, x, delta, beside, weight, bias, total, out, x_stride, delta_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As ``norm_row``, whose order its sums have, too. ``beside``, contiguous rows, comes with a ``delta``."""
    x += row * x_stride
    if delta is not None:
        delta += row * delta_stride
    if beside is not None:
        beside += row * SIZE
    sums = tl.zeros([PLACES], tl.float32)
    for start in tl.range(0, SIZE, PLACES, loop_unroll_factor=_UNROLLED):
        i = start + tl.arange(0, PLACES)
        sums += _load_sum_beside(x, delta, beside, i, i < SIZE)
    ones = tl.full([1], 1.0, tl.float32)
    mean = tl.div_rn(sum_of_places(sums[None, :]), ones * SIZE)
    squares = tl.zeros([PLACES], tl.float32)
    for start in tl.range(0, SIZE, PLACES, loop_unroll_factor=_UNROLLED):
        i = start + tl.arange(0, PLACES)
        centred = tl.where(i < SIZE, _load_sum_beside(x, delta, beside, i, i < SIZE) - mean, 0.0)
        squares += centred * centred
    scale = inverse_root(sum_of_places(squares[None, :]), eps, SIZE)
    for start in tl.static_range(0, SIZE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        y = _load_sum_beside(x, delta, beside, i, i < SIZE)
        if delta is not None:
            tl.store(total + row * SIZE + i, cast(y, total.dtype.element_ty), mask=i < SIZE)
        normed = (y - mean) * scale * load_row(weight, i, i < SIZE) + load_row(bias, i, i < SIZE)
        tl.store(out + row * SIZE + i, cast(normed, out.dtype.element_ty), mask=i < SIZE)


@triton.jit
def inverse_rms_of_row(x, eps, SIZE: tl.constexpr):
    """``[1]``, of the row at ``x``, with the squares in the order of ``sum_of_places``."""
    squares = tl.zeros([PLACES], tl.float32)
    for start in tl.static_range(0, SIZE, PLACES):
        i = start + tl.arange(0, PLACES)
        y = tl.load(x + i, mask=i < SIZE, other=0.0).to(tl.float32)
        squares += y * y
    return inverse_root(sum_of_places(squares[None, :]), eps, SIZE)


@triton.jit
def _inverse_rms_if_normed(x, norm, eps, SIZE: tl.constexpr):
    """1 without a ``norm``."""
    if norm is None:
        return 1.0
    else:
        return inverse_rms_of_row(x, eps, SIZE)


@triton.jit
def _normed_row(x, norm, inverse, i, SIZE: tl.constexpr):
    y = tl.load(x + i, mask=i < SIZE, other=0.0)
    if norm is None:
        return y.to(tl.float32)
    else:
        weights = tl.load(norm + i, mask=i < SIZE, other=0.0)
        return weighted(y.to(tl.float32) * inverse, weights, y.dtype).to(tl.float32)


@triton.jit
def _sum_of_two(x, x_norm, x_inverse, y, y_norm, y_inverse, scale, i, SIZE: tl.constexpr):
    """As float32 that has been rounded to the dtype of ``x``."""
    dtype: tl.constexpr = x.dtype.element_ty
    total = rounded(_normed_row(x, x_norm, x_inverse, i, SIZE) + _normed_row(y, y_norm, y_inverse, i, SIZE), dtype)
    if scale is not None:
        total = rounded(total * tl.load(scale), dtype)
    return total


@triton.jit
def sum_of_norms_kernel(
    x, x_norm, y, y_norm, scale, norm, total, out, x_stride, y_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program a row."""
    row = tl.program_id(0).to(tl.int64)
    sum_of_norms_row(row, x, x_norm, y, y_norm, scale, norm, total, out, x_stride, y_stride, eps, SIZE, BLOCK)


@triton.jit
def sum_of_norms_row(
    row, x, x_norm, y, y_norm, scale, norm, total, out, x_stride, y_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    x += row * x_stride
    y += row * y_stride
    x_inverse, y_inverse = _inverse_rms_if_normed(x, x_norm, eps, SIZE), _inverse_rms_if_normed(y, y_norm, eps, SIZE)
    if norm is not None:
        squares = tl.zeros([PLACES], tl.float32)
        for start in tl.static_range(0, SIZE, PLACES):
            z = _sum_of_two(x, x_norm, x_inverse, y, y_norm, y_inverse, scale, start + tl.arange(0, PLACES), SIZE)
            squares += z * z
        inverse = inverse_root(sum_of_places(squares[None, :]), eps, SIZE)
    for start in tl.static_range(0, SIZE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        z = _sum_of_two(x, x_norm, x_inverse, y, y_norm, y_inverse, scale, i, SIZE)
        tl.store(total + row * SIZE + i, cast(z, total.dtype.element_ty), mask=i < SIZE)
        if norm is not None:
            weights = tl.load(norm + i, mask=i < SIZE, other=0.0)
            tl.store(out + row * SIZE + i, weighted(z * inverse, weights, out.dtype.element_ty), mask=i < SIZE)


@triton.jit
def _norm_part(x, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The norm of a part of a row, in one block."""
    i = tl.arange(0, BLOCK)
    y = load_row(x, i, i < SIZE)
    scale = inverse_rms(y * y, eps, SIZE)
    weights = tl.load(weight + i, mask=i < SIZE, other=0.0)
    tl.store(out + i, weighted(y * scale, weights, out.dtype.element_ty), mask=i < SIZE)


@triton.jit
def qk_norm_kernel(
    qkv, q_norm, k_norm, out, stride, eps,
    Q_SIZE: tl.constexpr, K_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program for a row's queries, one for its keys, and one that copies its values."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    qkv += row * stride
    out += row * (Q_SIZE + 2 * K_SIZE)
    if part == 0:
        _norm_part(qkv, q_norm, out, eps, Q_SIZE, BLOCK_Q)
    elif part == 1:
        _norm_part(qkv + Q_SIZE, k_norm, out + Q_SIZE, eps, K_SIZE, BLOCK_K)
    else:
        i = tl.arange(0, BLOCK_K)
        places = Q_SIZE + K_SIZE + i
        tl.store(out + places, tl.load(qkv + places, mask=i < K_SIZE), mask=i < K_SIZE)


@triton.jit
def turned_heads(
    x, cosines, norm, eps, first_head, dtype: tl.constexpr,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """``BLOCK_HEADS`` heads of one token from ``first_head`` on; each head's first half is paired with its second.

    Returns the halves, of ``dtype``, the places of the first in ``x``, and which of them are inside; zeros elsewhere.
    """
    d = tl.arange(0, BLOCK_HALF)[None, :]
    heads = first_head + tl.arange(0, BLOCK_HEADS)[:, None]
    inside = (heads < NUM_HEADS) & (d < HALF)
    places = heads * (2 * HALF) + d
    first, second = load_row(x, places, inside), load_row(x, places + HALF, inside)
    if norm is not None:
        scale = inverse_rms(first * first + second * second, eps, 2 * HALF)[:, None]
        weights = tl.load(norm + d, mask=d < HALF, other=0.0)
        first = weighted(first * scale, weights, dtype).to(tl.float32)
        weights = tl.load(norm + HALF + d, mask=d < HALF, other=0.0)
        second = weighted(second * scale, weights, dtype).to(tl.float32)
    cos, sin = load_row(cosines, d, d < HALF), load_row(cosines, HALF + d, d < HALF)
    first, second = first * cos - second * sin, second * cos + first * sin
    return cast(first, dtype), cast(second, dtype), places, inside


@triton.jit
def _rotate_heads(
    x, cosines, norm, out, eps, first_head,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    first, second, places, inside = turned_heads(
        x, cosines, norm, eps, first_head, out.dtype.element_ty, NUM_HEADS, HALF, BLOCK_HEADS, BLOCK_HALF
    )
    tl.store(out + places, first, mask=inside)
    tl.store(out + places + HALF, second, mask=inside)


@triton.jit
def rope_kernel(
    qkv, cos_sin, q_norm, k_norm, q, k, qkv_stride, cos_sin_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """A program for some heads of a token: of its queries, or its keys."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    q_tiles: tl.constexpr = tl.cdiv(NUM_HEADS, BLOCK_HEADS)
    qkv += row * qkv_stride
    cos_sin += row * cos_sin_stride
    if tile < q_tiles:
        _rotate_heads(
            qkv, cos_sin, q_norm, q + row * (NUM_HEADS * 2 * HALF), eps, tile * BLOCK_HEADS,
            NUM_HEADS, HALF, BLOCK_HEADS, BLOCK_HALF,
        )  # fmt: skip
    else:
        _rotate_heads(
            qkv + NUM_HEADS * 2 * HALF, cos_sin, k_norm, k + row * (NUM_KV_HEADS * 2 * HALF), eps,
            (tile - q_tiles) * BLOCK_HEADS, NUM_KV_HEADS, HALF, BLOCK_HEADS, BLOCK_HALF,
        )  # fmt: skip


@triton.jit
def _normal_cdf(x):
    """The normal distribution's share below ``x``.

    Of the share below -|x|, the logarithm less those of exp(-x^2 / 2) and of t = 1 / (1 + 0.4 |x|) is a polynomial in
    t, fitted at Chebyshev's points; its largest error is 1e-7.
    """
    t = 1.0 / (1.0 + 0.4 * tl.abs(x))
    p = 0.2766989 * t - 1.4162087
    p = p * t + 2.8286076
    p = p * t - 2.5461032
    p = p * t + 0.7950981
    p = p * t - 0.26705325
    p = p * t + 0.5381326
    p = p * t + 1.4383364
    p = p * t - 2.6475081
    tail = t * tl.exp2(p - 0.72134752 * (x * x))
    return tl.where(x > 0, 1.0 - tail, tail)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        y = x * _normal_cdf(x)
    elif ACTIVATION == "relu2":
        y = tl.where(x < 0, 0.0, x * x)  # a NaN stays
    else:
        exponent = x
        if ACTIVATION == "gelu_tanh":  # 0.5 * (1 + tanh(u)) is sigmoid(2 * u)
            exponent = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp2(exponent * -LOG2_E))
    return y


@triton.jit
def activation_kernel(x, out, stride, SIZE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """A program for ``BLOCK`` elements of a row."""
    activated_piece(tl.program_id(0).to(tl.int64), tl.program_id(1), x, out, stride, SIZE, ACTIVATION, BLOCK)


@triton.jit
def activated_piece(
    row, piece, x, out, stride, SIZE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of a row, elements from ``piece * BLOCK`` on."""
    i = piece * BLOCK + tl.arange(0, BLOCK)
    y = activated(load_row(x + row * stride, i, i < SIZE), ACTIVATION)
    tl.store(out + row * SIZE + i, cast(y, out.dtype.element_ty), mask=i < SIZE)


@triton.jit
def gated_kernel(gate_up, out, stride, SIZE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """A program for ``BLOCK`` outputs of a row."""
    row = tl.program_id(0).to(tl.int64)
    gated_piece(row, tl.program_id(1), gate_up, out, stride, 0.0, 0.0, SIZE, ACTIVATION, BLOCK)


@triton.jit
def gated_piece(
    row, piece, gate_up, out, stride, alpha, limit, SIZE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """Of a row, outputs from ``piece * BLOCK`` on."""
    dtype: tl.constexpr = out.dtype.element_ty
    i = piece * BLOCK + tl.arange(0, BLOCK)
    gate, up = load_row(gate_up + row * stride, i, i < SIZE), load_row(gate_up + row * stride + SIZE, i, i < SIZE)
    if ACTIVATION == "clamped_swiglu":
        y = clamped_swiglu(gate, up, alpha, limit)
    else:
        y = rounded(activated(gate, ACTIVATION), dtype) * up
    tl.store(out + row * SIZE + i, cast(y, dtype), mask=i < SIZE)


@triton.jit
def gated_norm_kernel(
    x, gate, weight, out, x_stride, gate_stride, eps, NORM_FIRST: tl.constexpr,
    SIZE: tl.constexpr, GROUP: tl.constexpr, WEIGHTS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for ``GROUPS`` groups of a row. Squares are added up by place in the block, block after block."""
    row = tl.program_id(0).to(tl.int64)
    first = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None] * GROUP
    sums = tl.zeros([GROUPS, BLOCK], tl.float32)
    for start in tl.static_range(0, GROUP, BLOCK):
        i = start + tl.arange(0, BLOCK)[None, :]
        inside = (i < GROUP) & (first < SIZE)
        y = load_row(x + row * x_stride, first + i, inside)
        if not NORM_FIRST:
            y *= activated(load_row(gate + row * gate_stride, first + i, inside), "silu")
        sums += y * y
    scale = inverse_root(tl.sum(sums, 1), eps, GROUP)[:, None]
    for start in tl.static_range(0, GROUP, BLOCK):
        i = start + tl.arange(0, BLOCK)[None, :]
        inside = (i < GROUP) & (first < SIZE)
        y = load_row(x + row * x_stride, first + i, inside)
        silu = activated(load_row(gate + row * gate_stride, first + i, inside), "silu")
        weights = tl.load(weight + (first + i) % WEIGHTS, mask=inside, other=0.0)
        if NORM_FIRST:
            y = cast(weighted(y * scale, weights, out.dtype.element_ty).to(tl.float32) * silu, out.dtype.element_ty)
        else:
            y = weighted(y * silu * scale, weights, out.dtype.element_ty)
        tl.store(out + row * SIZE + first + i, y, mask=inside)


@triton.jit
def clamped_swiglu(gate, up, alpha, limit):
    gate = tl.where(gate > limit, limit, gate)  # a NaN stays
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return (up + 1.0) * (gate / (1.0 + tl.exp2(alpha * gate * -LOG2_E)))


@triton.jit
def clamped_swiglu_kernel(gate_up, out, stride, alpha, limit, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program for ``BLOCK`` outputs of a row."""
    row = tl.program_id(0).to(tl.int64)
    gated_piece(row, tl.program_id(1), gate_up, out, stride, alpha, limit, SIZE, "clamped_swiglu", BLOCK)


@triton.jit
def _tanh(x):
    size = tl.abs(x)
    square = x * x
    # x + x^3 times a polynomial of the least largest relative error (7e-10) up to 0.7.
    p = 0.00189567 * square - 0.00788331
    p = p * square + 0.02157106
    p = p * square - 0.05392096
    p = p * square + 0.13332983
    p = p * square - 0.33333325
    e = tl.exp2(size * (-2.0 * LOG2_E))
    large = (1.0 - e) / (1.0 + e)
    return tl.where(size < 0.7, x + x * square * p, tl.where(x < 0, -large, large))


@triton.jit
def soft_cap_kernel(x, out, stride, cap, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program for ``BLOCK`` elements of a row."""
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.div_rn(load_row(x + row * stride, i, i < SIZE), tl.zeros([BLOCK], tl.float32) + cap)
    capped = rounded(_tanh(rounded(scaled, dtype)), dtype) * cap
    tl.store(out + row * SIZE + i, cast(capped, dtype), mask=i < SIZE)


@triton.jit
def scaled_sum_kernel(x, delta, scale, out, x_stride, delta_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program for ``BLOCK`` elements of a row."""
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = load_sum(x + row * x_stride, delta + row * delta_stride, i, i < SIZE)
    tl.store(out + row * SIZE + i, cast(total * tl.load(scale), dtype), mask=i < SIZE)


@triton.jit
def sigmoid_gate_kernel(
    x, gate, out, x_stride, gate_stride, SIZE: tl.constexpr, GATES: tl.constexpr, BLOCK: tl.constexpr
):
    """A program for ``BLOCK`` elements of a row, which has ``SIZE`` gates or one."""
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    place = i if GATES > 1 else i * 0
    gates = tl.load(gate + row * gate_stride + place, mask=i < SIZE, other=0.0).to(tl.float32)
    gates = 1.0 / (1.0 + tl.exp2(-gates * LOG2_E))
    tl.store(out + row * SIZE + i, cast(values * rounded(gates, dtype), dtype), mask=i < SIZE)


@triton.jit(do_not_specialize=["num_rows"])
def keep_rows_kernel(x, indices, kept, out, num_rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program a piece of a row: first of the rows that are kept, then of the rows that are given."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    if row < num_rows:
        tl.store(kept + row * SIZE + i, tl.load(x + row * SIZE + i, mask=inside), mask=inside)
    else:
        row -= num_rows
        source = tl.load(indices + row).to(tl.int64)
        tl.store(out + row * SIZE + i, tl.load(x + source * SIZE + i, mask=inside), mask=inside)


@triton.jit
def log_sum_exp_kernel(logits, peak, log_total, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program a row. Added up by place in the block, block after block, and then all places."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    places = tl.arange(0, BLOCK)
    maxima = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, SIZE, BLOCK):
        i = start + places
        maxima = tl.maximum(maxima, tl.load(logits + i, mask=i < SIZE, other=float("-inf")).to(tl.float32))
    largest = tl.max(maxima, 0)
    totals = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        i = start + places
        x = tl.load(logits + i, mask=i < SIZE, other=float("-inf")).to(tl.float32)
        totals += tl.exp2((x - largest) * LOG2_E)
    tl.store(peak + row, largest)
    tl.store(log_total + row, tl.log(tl.sum(totals, 0)))
