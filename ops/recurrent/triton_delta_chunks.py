"""The gated delta rule on a GPU, chunk after chunk: prompts in bfloat16 that need not be exact.

With decays G_ij from token j to i of a chunk, lengths of keys 1 and the state S before it, what is written of all its
tokens follows from a triangular system (Yang et al., 2024, arXiv:2412.06464, section 3.3):

    (I + A) d = beta * (v - G_0 * (k S)),   A_ij = beta_i G_ij (k_i . k_j) for j < i
    o = G_0 * (q S) + P d,   P_ij = G_ij (q_i . k_j) for j <= i;    S' = G_0n S + k^T (G_in * d)

``delta_factors_kernel`` computes what needs no state, in a program for each chunk: the inverse of I + A times beta, and
P. ``delta_chunks_kernel`` goes over the chunks with the state in registers. A chunk has ``CHUNK`` tokens of a request,
or what is left of it; a state that is wanted inside of a chunk is made of the tokens before alone.

Precision: products are of bfloat16, sums are in float32. Queries and keys are factors as they were given, their lengths
are divided out afterwards; a factor in float32 is taken as two numbers of bfloat16, whose sum has 16 bits of it. So
errors are some 2^-17 of the terms, not the 2^-9 of numbers that are rounded to bfloat16.
"""

import triton
import triton.language as tl

from compiled_llm.ops.recurrent.triton_recurrent import request_of
from compiled_llm.ops.recurrent.triton_steps import delta_gates, delta_steps, state_tile
from compiled_llm.ops.rowwise.triton_kernels import INTERPRET, cast

CHUNK = tl.constexpr(64)
FEW = tl.constexpr(16)  # tokens of a request, at most, that are computed one after the other
LARGEST = 128  # elements of a key, at most: of more the registers do not hold a tile of the state
BLOCK = tl.constexpr(16)  # of a matrix whose inverse is made column by column
LEVELS = tl.constexpr(2)  # doublings of BLOCK to CHUNK


def most_chunks(tokens: int, requests: int) -> int:
    """Of a step, however its tokens are shared out among its requests."""
    long = min(requests, tokens // (FEW.value + 1))
    return max(1, (tokens + long * (CHUNK.value - 1)) // CHUNK.value)


@triton.jit
def _dot(x, y):
    if INTERPRET:  # Triton's interpreter does not multiply matrices of bfloat16
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y)


@triton.jit
def _halves(x):
    """Two of bfloat16 whose sum is ``x``, but for 2^-17 of it."""
    x = x.to(tl.float32)
    high = cast(x, tl.bfloat16)
    return high, cast(x - high.to(tl.float32), tl.bfloat16)


@triton.jit
def _pairs(x):
    """``_halves`` of ``x`` ``[M, N]`` in one matrix ``[M, 2 * N]``, whose columns they are in turn."""
    high, low = _halves(x)
    return tl.reshape(tl.join(high, low), [x.shape[0], 2 * x.shape[1]])


@triton.jit
def _sum_of_pairs(x):
    first, second = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return first + second


@triton.jit
def _product(x, pairs):
    """Of ``x`` in bfloat16, as it was given, and a matrix as ``_pairs``."""
    return _sum_of_pairs(_dot(x, pairs))


@triton.jit
def _product_of_halves(high, low, pairs):
    """Of a matrix, as ``_halves``, and one as ``_pairs``."""
    return _sum_of_pairs(_dot(low, pairs) + _dot(high, pairs))


@triton.jit
def _chunk_of(query_start_loc, seq_lens, chunk, num_requests, BLOCK_R: tl.constexpr):
    """(request, its first token in the chunk) of chunk number ``chunk`` of the step; BLOCK_R if it has fewer."""
    r = tl.arange(0, BLOCK_R)
    inside = r < num_requests
    starts = tl.load(query_start_loc + r, mask=inside, other=0)
    lengths = tl.load(query_start_loc + 1 + r, mask=inside, other=0) - starts
    is_long = (tl.load(seq_lens + r, mask=inside, other=0) > 0) & (lengths > FEW)
    chunks = tl.where(is_long, (lengths + CHUNK - 1) // CHUNK, 0)
    request = tl.sum((tl.cumsum(chunks, 0) <= chunk).to(tl.int32), 0)
    return request, (chunk - tl.sum(tl.where(r < request, chunks, 0), 0)) * CHUNK


@triton.jit
def _inverse_of_blocks(below):
    """The inverse of I + ``below`` for a triangular matrix, of its blocks on the diagonal; zeros elsewhere.

    Column after column is eliminated, in all blocks at a time.
    """
    COUNT: tl.constexpr = CHUNK // BLOCK
    block, place = tl.arange(0, COUNT), tl.arange(0, BLOCK)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    parts = tl.reshape(below, [COUNT, BLOCK, COUNT, BLOCK])
    parts = tl.sum(tl.where(on_diagonal, parts, 0.0), 2)
    rows, columns = place[None, :, None], place[None, None, :]
    inverse = tl.zeros([COUNT, BLOCK, BLOCK], tl.float32) + (rows == columns).to(tl.float32)
    for i in range(BLOCK - 1):
        factors = tl.sum(tl.where(columns == i, parts, 0.0), 2)
        row = tl.sum(tl.where(rows == i, inverse, 0.0), 1)
        inverse -= factors[:, :, None] * row[:, None, :]
    return tl.reshape(tl.where(on_diagonal, inverse[:, :, None, :], 0.0), [CHUNK, CHUNK])


@triton.jit
def _inverse(below):
    """Of I + ``below`` ``[CHUNK, CHUNK]``, a triangular matrix: of blocks, which are joined to larger ones.

    [X 0; B Y] has the inverse [X' 0; -Y' B X' Y'].
    """
    i = tl.arange(0, CHUNK)
    inverse = _inverse_of_blocks(below)
    for level in tl.static_range(LEVELS):
        rows, columns = i[:, None] // (BLOCK << level), i[None, :] // (BLOCK << level)
        between = tl.where((rows == columns + 1) & (columns % 2 == 0), below, 0.0)
        high, low = _halves(between)
        product = _product_of_halves(high, low, _pairs(inverse))
        high, low = _halves(inverse)
        inverse -= _product_of_halves(high, low, _pairs(product))
    return inverse


@triton.jit
def _store_halves(target, half, x, inside):
    high, low = _halves(x)
    tl.store(target, high, mask=inside)
    tl.store(target + half, low, mask=inside)


@triton.jit
def _rows(x, first, stride, i):
    """Where elements ``i`` of a chunk's tokens are, ``[CHUNK, len(i)]``; ``x`` is token 0, ``first`` the chunk's."""
    return x + first.to(tl.int64) * stride + (tl.arange(0, CHUNK)[:, None] * stride + i[None, :])


@triton.jit
def _products(
    q, k, first, is_token, q_token, k_token, eps, DK: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Of keys with keys ``[CHUNK, CHUNK]``, 1 / their lengths, and both of queries with keys; some elements at a time.

    Lengths of what is no token are infinite.
    """
    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    key_squares = tl.zeros([CHUNK], tl.float32)
    query_squares = tl.zeros([CHUNK], tl.float32)
    for start in range(0, DK, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        inside = is_token[:, None] & (keys < DK)[None, :]
        key = tl.load(_rows(k, first, k_token, keys), mask=inside, other=0.0)
        query = tl.load(_rows(q, first, q_token, keys), mask=inside, other=0.0)
        products += _dot(key, tl.trans(key))
        scores += _dot(query, tl.trans(key))
        key_squares += tl.sum(key.to(tl.float32) * key.to(tl.float32), 1)
        query_squares += tl.sum(query.to(tl.float32) * query.to(tl.float32), 1)
    key_scale = tl.where(is_token, tl.rsqrt(key_squares + eps), 0.0)
    return products, key_scale, scores, tl.where(is_token, tl.rsqrt(query_squares + eps), 0.0)


@triton.jit(do_not_specialize=["num_requests", "num_tokens"])
def delta_factors_kernel(
    q, k, a, b, A_log, dt_bias, inverses, scores, scalars, query_start_loc, seq_lens, num_requests, num_tokens,
    q_token, q_head, k_token, k_head, a_token, b_token, eps, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Program (chunk, value head): a row of two matrices and three numbers for each token.

    inverses, scores: ``[2, T, HEADS, CHUNK]``, of what the module says, two halves.
    scalars: ``[3, HEADS, T]``, the logarithm of the decay since the chunk began, and 1 / the length of key and query.
    """
    head = tl.program_id(1)
    request, start = _chunk_of(query_start_loc, seq_lens, tl.program_id(0), num_requests, BLOCK_R)
    if request < num_requests:
        first, length, _ = request_of(query_start_loc, seq_lens, request)
        i = tl.arange(0, CHUNK)
        rows, columns = i[:, None], i[None, :]
        is_token = start + i < length
        first += start
        products, key_scale, score, query_scale = _products(
            q + (head // GROUP) * q_head, k + (head // GROUP) * k_head, first, is_token, q_token, k_token, eps, DK,
            BLOCK_K,
        )  # fmt: skip
        query_scale *= scale
        rate, bias = tl.exp(tl.load(A_log + head)), tl.load(dt_bias + head)
        decay, beta = delta_gates(
            tl.load(a + first.to(tl.int64) * a_token + head + i * a_token, mask=is_token, other=0.0),
            tl.load(b + first.to(tl.int64) * b_token + head + i * b_token, mask=is_token, other=0.0), rate, bias,
        )  # fmt: skip
        sums = tl.cumsum(tl.where(is_token, decay, 0.0), 0)
        between = tl.exp(tl.where(rows >= columns, sums[:, None] - sums[None, :], float("-inf"))) * key_scale[None, :]
        half = num_tokens.to(tl.int64) * (HEADS * CHUNK)
        target = _rows(scores + head * CHUNK, first, HEADS * CHUNK, i)
        _store_halves(target, half, score * between * query_scale[:, None], is_token[:, None])
        products *= between * (beta * key_scale)[:, None]
        inverse = _inverse(tl.where(rows > columns, products, 0.0)) * beta[None, :]
        target = _rows(inverses + head * CHUNK, first, HEADS * CHUNK, i)
        _store_halves(target, half, inverse, is_token[:, None])
        numbers = scalars + head.to(tl.int64) * num_tokens + first + i
        tl.store(numbers, sums, mask=is_token)
        tl.store(numbers + HEADS * num_tokens, key_scale, mask=is_token)
        tl.store(numbers + 2 * HEADS * num_tokens, query_scale, mask=is_token)


@triton.jit
def _state_after(kept, key, written, sums, key_scale, count):
    """The state after ``count`` tokens of a chunk, from that before it and what is written of each token."""
    i = tl.arange(0, CHUNK)
    whole = tl.sum(tl.where(i == count - 1, sums, 0.0), 0)
    shares = tl.exp(tl.where(i < count, whole - sums, float("-inf"))) * key_scale
    return kept * tl.exp(whole) + _product(tl.trans(key), _pairs(written * shares[:, None]))


@triton.jit(do_not_specialize=["num_requests", "num_tokens"])
def delta_chunks_kernel(
    q, k, v, a, b, A_log, dt_bias, state, out,
    query_start_loc, seq_lens, read_slot, write_slot, write_after, num_requests, num_tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, a_token, b_token, eps, scale, inverses, scores, scalars,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WRITES: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (columns, value head, request)."""
    request, first, length, head, keys, columns, places, kept = state_tile(
        state, out, query_start_loc, seq_lens, read_slot, num_requests, num_tokens, HEADS, DK, DV, BLOCK_K, BLOCK_V,
        False,
    )  # fmt: skip
    if length <= FEW:
        delta_steps(
            q, k, v, a, b, A_log, dt_bias, state, out, write_slot, write_after,
            q_token, q_head, k_token, k_head, v_token, v_head, a_token, b_token, eps, scale,
            request, first, length, head, keys, columns, places, kept, HEADS, GROUP, DK, DV, WRITES,
        )  # fmt: skip
    else:
        i = tl.arange(0, CHUNK)
        half = num_tokens.to(tl.int64) * (HEADS * CHUNK)
        for start in range(0, length, CHUNK):
            is_token = start + i < length
            of_keys = is_token[:, None] & (keys < DK)[None, :]
            of_columns = is_token[:, None] & (columns < DV)[None, :]
            key = tl.load(_rows(k + (head // GROUP) * k_head, first, k_token, keys), mask=of_keys, other=0.0)
            query = tl.load(_rows(q + (head // GROUP) * q_head, first, q_token, keys), mask=of_keys, other=0.0)
            value = tl.load(_rows(v + head * v_head, first, v_token, columns), mask=of_columns, other=0.0)
            numbers = scalars + head.to(tl.int64) * num_tokens + first + i
            sums = tl.load(numbers, mask=is_token, other=0.0)
            key_scale = tl.load(numbers + HEADS * num_tokens, mask=is_token, other=0.0)
            query_scale = tl.load(numbers + 2 * HEADS * num_tokens, mask=is_token, other=0.0)
            rows = _rows(inverses + head * CHUNK, first, HEADS * CHUNK, i)
            high = tl.load(rows, mask=is_token[:, None], other=0.0)
            low = tl.load(rows + half, mask=is_token[:, None], other=0.0)
            since = tl.exp(sums)

            before = _pairs(kept)
            seen = _product(key, before) * (since * key_scale)[:, None]
            written = _product_of_halves(high, low, _pairs(value.to(tl.float32) - seen))
            rows = _rows(scores + head * CHUNK, first, HEADS * CHUNK, i)
            high = tl.load(rows, mask=is_token[:, None], other=0.0)
            low = tl.load(rows + half, mask=is_token[:, None], other=0.0)
            y = _product(query, before) * (since * query_scale)[:, None]
            y += _product_of_halves(high, low, _pairs(written))
            target = _rows(out + head * DV, first, HEADS * DV, columns)
            tl.store(target, cast(y, out.dtype.element_ty), mask=of_columns)

            end = tl.minimum(start + CHUNK, length)
            for w in range(WRITES):
                slot = tl.load(write_slot + request * WRITES + w).to(tl.int64)
                after = tl.load(write_after + request * WRITES + w)
                if (slot != 0) & (after > start) & (after <= end):
                    wanted = _state_after(kept, key, written, sums, key_scale, after - start)
                    inside = (keys < DK)[:, None] & (columns < DV)[None, :]
                    tl.store(state + slot * (HEADS * DK * DV) + places, wanted, mask=inside)
            kept = _state_after(kept, key, written, sums, key_scale, end - start)
            first += CHUNK
