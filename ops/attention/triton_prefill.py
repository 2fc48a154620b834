"""The prefill kernel in Triton: requests of more query rows than the split kernel serves, a tile of rows at a time.

Its main loop runs once for each tile of keys, so little else is in it than products and the softmax:

- where a row of keys lies in its block is the same in every tile, as tiles begin at multiples of their size: an address
  is what lies before the loop plus one product (``_places``);
- block numbers are loaded one tile ahead;
- codes become float16 four at a time (``numbers``), which has every one of them, and so are queries, as in
  ``triton_codes.py``. Products read them from shared memory, so they are converted once for all rows of a tile. Scales
  multiply scores and weights, not keys and values.
"""

import triton
import triton.language as tl

from compiled_llm.ops.attention.triton_codes import row_units
from compiled_llm.ops.attention.triton_kernels import (
    add_sinks,
    load_rows,
    normalised,
    owner,
)
from compiled_llm.ops.attention.triton_softmax import LOG2_E, SMALLEST_UNIT, no_keys, seen_keys

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def numbers(codes, dtype: tl.constexpr):
    """Codes, int8 or fp8, as the same numbers of ``dtype``: float16 or float32."""
    if INTERPRET or dtype == tl.float32:
        return codes.to(dtype)
    elif codes.dtype == tl.int8:
        # 0x6480 is 1152 in float16, whose last 8 bits count ones: a code plus 128 in them makes 1024 + 128 + code.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 above, low, high, bias;
            mov.b32 bias, 0x64806480;
            xor.b32 above, $2, 0x80808080;
            prmt.b32 low, above, bias, 0x5150;
            prmt.b32 high, above, bias, 0x5352;
            sub.f16x2 $0, low, bias;
            sub.f16x2 $1, high, bias;
            }""",
            "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def dot(a, b, acc):
    if INTERPRET:  # whose tl.dot of 16 bits is exact in float32 alone
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _places(start, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of the keys from ``start`` on, a multiple of ``BLOCK_N``: their entries of the table, their places in a block."""
    n = tl.arange(0, BLOCK_N)
    if BLOCK_N % BLOCK_SIZE == 0:
        return start // BLOCK_SIZE + n // BLOCK_SIZE, n % BLOCK_SIZE
    elif BLOCK_SIZE % BLOCK_N == 0:
        return start // BLOCK_SIZE + tl.zeros_like(n), start % BLOCK_SIZE + n
    else:
        return (start + n) // BLOCK_SIZE, (start + n) % BLOCK_SIZE


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=mask, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def attend_tiles(
    acc, row_max, row_sum, largest, q, factor, unit, visible, k_cache, v_cache, k_scale, v_scale, table_row, oldest,
    begin, end,
    MASKED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax of rows ``q`` over keys ``begin``, a multiple of ``BLOCK_N``, to ``end``.

    Row i sees the keys before ``visible[i]``, with a window only the last ``WINDOW`` of them, and no key before
    ``oldest`` is loaded; not MASKED says that these are whole tiles that every row sees.

    Caches and scales begin at the KV head. ``factor`` of each row makes scores exponents of two; with SOFT_CAP ``unit``
    of each row makes them twice what the cap's tanh takes, as an exponent of two. ``largest`` is the largest scale of
    the values met so far, by which ``acc`` is divided if weights are float16.
    """
    STRIDE: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE  # rows of a block
    BLOCK_M: tl.constexpr = q.shape[0]
    IN_FLOAT16: tl.constexpr = v_scale is not None and q.dtype == tl.float16
    dims = tl.arange(0, acc.shape[1])
    n = tl.arange(0, BLOCK_N)
    entries, places = _places(begin, BLOCK_SIZE, BLOCK_N)
    blocks = tl.load(table_row + entries, mask=begin + n < end, other=0)
    for start in range(begin, end, BLOCK_N):
        positions = start + n
        inside = positions < end
        if WINDOW > 0:
            inside = inside & (positions >= oldest)
        places = _places(start, BLOCK_SIZE, BLOCK_N)[1]
        rows = blocks.to(tl.int64) * (STRIDE * HEAD_DIM)
        within = places[:, None] * HEAD_DIM + dims[None, :]
        scale_rows = blocks.to(tl.int64) * STRIDE + places
        if MASKED:
            following = _places(start + BLOCK_N, BLOCK_SIZE, BLOCK_N)[0]
            blocks = tl.load(table_row + following, mask=positions + BLOCK_N < end, other=0)
        else:  # once more the last one's, instead of a mask
            following = _places(tl.minimum(start + BLOCK_N, end - BLOCK_N), BLOCK_SIZE, BLOCK_N)[0]
            blocks = tl.load(table_row + following)

        keys = load_rows(k_cache + within + rows[:, None], inside, dims, MASKED, HEAD_DIM)
        scores = dot(
            q,
            tl.trans(numbers(keys, q.dtype) if k_scale is not None else keys),
            tl.zeros([BLOCK_M, BLOCK_N], tl.float32),
        )
        if k_scale is not None:
            scores *= _load(k_scale + scale_rows, inside, MASKED)[None, :]
        if SOFT_CAP > 0:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
            scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * unit[:, None]))
        if MASKED:
            scores = tl.where(seen_keys(positions, inside, visible, WINDOW), scores, float("-inf"))
        # As ``weighed``, of a factor for each row.
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        probs = tl.exp2(tl.fma(scores, factor[:, None], -new_max[:, None]))
        decay = tl.exp2(row_max - new_max)
        row_sum = tl.fma(row_sum, decay, tl.sum(probs, 1))
        row_max = new_max

        values = load_rows(v_cache + within + rows[:, None], inside, dims, MASKED, HEAD_DIM)
        if v_scale is not None:
            scales = _load(v_scale + scale_rows, inside, MASKED)
            if IN_FLOAT16:
                new_largest = tl.maximum(largest, tl.max(scales, 0))
                inverse = 1.0 / new_largest
                decay *= largest * inverse
                largest = new_largest
                scales *= inverse
            probs *= scales[None, :]
            acc = dot(probs.to(q.dtype), numbers(values, q.dtype), acc * decay[:, None])
        else:
            acc = dot(probs.to(q.dtype), values, acc * decay[:, None])
    return acc, row_max, row_sum, largest


@triton.jit
def _prefill_tile(
    q, k_cache, v_cache, k_scale, v_scale, block_table, query_start_loc, seq_lens, sinks, out,
    ends, task, scale, table_stride, q_stride_t, q_stride_n,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A tile of a request's rows, for one KV head; ``ends`` are prefix sums of tiles a request."""
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = task % NUM_KV_HEADS
    request, tile = owner(ends, task // NUM_KV_HEADS)
    seq_len = tl.load(seq_lens + request)
    first_row = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first_row
    first_token = tile * BLOCK_Q
    table_row = block_table + request * table_stride
    k_cache += kv_head * (BLOCK_SIZE * HEAD_DIM)
    v_cache += kv_head * (BLOCK_SIZE * HEAD_DIM)
    if k_scale is not None:
        k_scale += kv_head * BLOCK_SIZE
        v_scale += kv_head * BLOCK_SIZE
    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_H)
    tokens = first_token + m // GROUP
    heads = kv_head * GROUP + m % GROUP
    row_mask = (m < BLOCK_Q * GROUP) & (tokens < query_len)
    rows = (first_row + tokens).to(tl.int64)
    q_rows = q + (rows * q_stride_t + heads * q_stride_n)[:, None] + dims[None, :]
    q_tile = load_rows(q_rows, row_mask, dims, True, HEAD_DIM)

    # For a padding request (seq_len 0) begin and end are 0, so its rows are zero.
    context_len = tl.maximum(seq_len - query_len, 0)
    visible = context_len + tokens + 1
    end = tl.minimum(context_len + first_token + BLOCK_Q, seq_len)
    # Tiles start at multiples of BLOCK_N. Those between whole_begin and whole_end are seen whole by every row.
    whole_end = tl.minimum(context_len + first_token + 1, seq_len) // BLOCK_N * BLOCK_N
    acc, row_max, row_sum = no_keys(BLOCK_M, BLOCK_H)
    unit = tl.full([BLOCK_M], 1.0, tl.float32)
    largest = SMALLEST_UNIT
    if k_scale is not None and q_tile.dtype != tl.float32:
        inverse, unit = row_units(q_tile.to(tl.float32))
        q_tile = (q_tile.to(tl.float32) * inverse[:, None]).to(tl.float16)
    factor = unit * (scale * LOG2_E)
    if SOFT_CAP > 0:
        unit *= scale * (2.0 * LOG2_E / SOFT_CAP)
        factor = tl.full([BLOCK_M], SOFT_CAP * LOG2_E, tl.float32)
    oldest = 0
    whole_begin = 0
    if WINDOW > 0:
        oldest = tl.maximum(context_len + first_token + 1 - WINDOW, 0)
        whole_begin = tl.cdiv(tl.maximum(context_len + first_token + BLOCK_Q - WINDOW, 0), BLOCK_N) * BLOCK_N
        acc, row_max, row_sum, largest = attend_tiles(
            acc, row_max, row_sum, largest, q_tile, factor, unit, visible, k_cache, v_cache, k_scale, v_scale,
            table_row, oldest, oldest // BLOCK_N * BLOCK_N, tl.minimum(whole_begin, end),
            True, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, BLOCK_N,
        )  # fmt: skip
    acc, row_max, row_sum, largest = attend_tiles(
        acc, row_max, row_sum, largest, q_tile, factor, unit, visible, k_cache, v_cache, k_scale, v_scale,
        table_row, oldest, whole_begin, whole_end,
        False, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, BLOCK_N,
    )  # fmt: skip
    acc, row_max, row_sum, largest = attend_tiles(
        acc, row_max, row_sum, largest, q_tile, factor, unit, visible, k_cache, v_cache, k_scale, v_scale,
        table_row, oldest, tl.maximum(whole_begin, whole_end), end,
        True, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, BLOCK_N,
    )  # fmt: skip
    if v_scale is not None and q_tile.dtype == tl.float16:
        acc *= largest
    row_sum = add_sinks(row_max, row_sum, sinks, heads, row_mask)
    target = out + (rows * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    store_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(target, normalised(acc, row_sum).to(out.dtype.element_ty), mask=store_mask)


@triton.jit
def prefill_kernel(
    q, k_cache, v_cache, k_scale, v_scale, block_table, query_start_loc, seq_lens, sinks, out, counter,
    scale, num_requests, table_stride, q_stride_t, q_stride_n,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ONE_TASK: tl.constexpr, SHORT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """All requests of more than ``SHORT`` rows.

    A task is ``BLOCK_M // GROUP`` tokens of one request for one KV head. There are as many programs as run at once.
    Each looks through the requests once, and then takes task after task, as it comes to them: ``counter``, zero before
    the launch, has how many are taken. So a grid for the most tasks that a step may have costs nothing where there
    are few. With ONE_TASK there is a program for each task, for tiles that take all registers without the loop.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    requests = tl.arange(0, BLOCK_R)
    known = requests < num_requests
    first_rows = tl.load(query_start_loc + requests, mask=known, other=0)
    query_lens = tl.load(query_start_loc + requests + 1, mask=known, other=0) - first_rows
    ends = tl.cumsum(tl.where(query_lens > SHORT, tl.cdiv(query_lens, BLOCK_Q), 0), 0)
    num_tasks = tl.max(ends, 0) * NUM_KV_HEADS
    # Last tiles first: in a causal prompt they are the longest, and the short ones then fill the gaps at the end.
    if ONE_TASK:
        if tl.program_id(0) < num_tasks:
            _prefill_tile(
                q, k_cache, v_cache, k_scale, v_scale, block_table, query_start_loc, seq_lens, sinks, out,
                ends, num_tasks - 1 - tl.program_id(0), scale, table_stride, q_stride_t, q_stride_n,
                GROUP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, BLOCK_M, BLOCK_N, BLOCK_H,
            )  # fmt: skip
    else:
        taken = tl.atomic_add(counter, 1, sem="relaxed")
        while taken < num_tasks:
            _prefill_tile(
                q, k_cache, v_cache, k_scale, v_scale, block_table, query_start_loc, seq_lens, sinks, out,
                ends, num_tasks - 1 - taken, scale, table_stride, q_stride_t, q_stride_n,
                GROUP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, BLOCK_M, BLOCK_N, BLOCK_H,
            )  # fmt: skip
            taken = tl.atomic_add(counter, 1, sem="relaxed")
