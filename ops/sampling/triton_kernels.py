"""The sampling kernels in Triton. The order of their launches: ``triton_sampling.py``.

Depths. A token's depth is the distance of its logit from the row's largest, as an int32: 0 for the most likely token,
2^24 more for each halving of the weight. So equal depths are equal weights, to the resolution of a float32. Together,
top-k, top-p, min-p and top-n-sigma are a limit: the largest depth that stays.

Exact sums. A weight is ``2^(-depth / 2^24)`` in whole units, an int64, the unit such that the sum of any row fits. So a
sum does not depend on the order of its terms, nor a token on the rows beside it, on the number of programs or on which
of them comes first. At 2^18 tokens a unit is 2^-44 of the largest weight, and no token is off by more.

The search. A pass compares all depths with ``CELLS`` limits, which leaves a ``CELLS``-th of the range. After ``LEVELS``
passes the few depths that are left in the range are gathered in a list, and one program a row halves the range over
the list until one depth is left. With top-k the list has all that top-k keeps, so that top-p is searched in it as well.
They may not fit, since thousands of tokens may have the same weight: then the range often has one depth alone, and
else the passes go on, by one program. No pass reads chunks whose largest logit is below the range.

The draw. A noise is of the same unit as a depth, and the token of a row is the one of the largest noise less depth
(``noise.py``). The largest noise of a block less the least depth in it bounds what its tokens can reach. So one program
a row looks into the blocks with the largest bounds, ``GROUPS`` at a time, until none is left that could win.
"""

import triton
import triton.language as tl

from compiled_llm.ops.sampling import noise, reference
from compiled_llm.ops.sampling.triton_noise import BLOCK, gumbel, least_of_blocks, more_of_tokens

CHUNK = tl.constexpr(512)  # tokens
TILE = tl.constexpr(8)  # chunks of a program that has no loop
CELLS = tl.constexpr(16)  # limits of a pass
LEVELS = tl.constexpr(3)  # passes that are spread over the GPU
GROUPS = tl.constexpr(16)  # blocks that are looked into together
BANNED = tl.constexpr(reference.DEEPEST)  # a depth without weight: 2^-64 of the largest, or -inf
HALVING = tl.constexpr(float(noise.HALVING))  # depths in a factor of two
LOSES = tl.constexpr(-(2**31))  # less than any noise less depth
LOG2_E = tl.constexpr(reference.LOG2_E)
MIN_TEMPERATURE = tl.constexpr(reference.MIN_TEMPERATURE)
NO_TOKEN = tl.constexpr(reference.NO_TOKEN)


@triton.jit
def _load_logits(row_logits, tokens, vocabulary):
    """As float32; -inf past the end; +inf for NaN, since a row with either has no token."""
    x = tl.load(row_logits + tokens, mask=tokens < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("inf"))


@triton.jit
def _scale(maxima, temperature, row, num_chunks, BLOCK_C: tl.constexpr):
    """The row's largest logit, the depths of a logit's unit, and whether a token is drawn: else the row is greedy."""
    chunks = tl.arange(0, BLOCK_C)
    largest = tl.max(tl.load(maxima + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf")), 0)
    divisor = tl.load(temperature + row)
    per_unit = tl.div_rn(divisor * 0 + LOG2_E * HALVING, tl.maximum(divisor, MIN_TEMPERATURE))
    return largest, per_unit, (divisor > 0) & (tl.abs(largest) < float("inf"))


@triton.jit
def _depths(x, largest, per_unit):
    return tl.minimum((largest - x) * per_unit, BANNED * 1.0).to(tl.int32)


@triton.jit
def _weights(depths, UNIT: tl.constexpr):
    return (tl.exp2(depths.to(tl.float32) * (-1.0 / HALVING)) * UNIT).to(tl.int64)


@triton.jit
def _share(top_p, total):
    """The sum of weights that top-p keeps, of a sum ``total`` of all of them."""
    return tl.maximum((top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _amounts(
    row_logits, row_maxima, largest, per_unit, by_count, low, step, first, end, vocabulary, UNIT: tl.constexpr
):
    """The amounts of some chunks, numbers of tokens or sums of weights, as ``[CELLS]`` int64: of the tokens down to the
    depth ``low + step``, to ``low + 2 * step`` and so on."""
    limits = low + step * (1 + tl.arange(0, CELLS))
    sums = tl.zeros([CELLS, CHUNK], tl.int64)
    for chunk in range(first, end):
        if _depths(tl.load(row_maxima + chunk), largest, per_unit) <= low + step * CELLS:
            x = _load_logits(row_logits, chunk * CHUNK + tl.arange(0, CHUNK)[None, :], vocabulary)
            depths = _depths(x, largest, per_unit)
            amounts = tl.where(by_count, 1, _weights(depths, UNIT))
            sums += tl.where(depths <= limits[:, None], amounts, 0)
    return tl.sum(sums, 1)


@triton.jit
def _range(partial, top_k, top_p, row, splits, vocabulary, PASSES: tl.constexpr, BLOCK_S: tl.constexpr):
    """What is known after some passes of the limit that top-k asks for, or top-p where top-k is off.

    It is above ``low`` and at most ``high``. Also the amount of the tokens down to ``low``, and the target: not reached
    where fewer than top_k tokens have a weight.
    """
    k = tl.load(top_k + row)
    by_count = k < vocabulary
    target = tl.maximum(k, 1).to(tl.int64)
    low = tl.full([], -1, tl.int32)
    step = tl.full([], BANNED, tl.int32)
    amount = tl.zeros([], tl.int64)
    cells = tl.arange(0, CELLS)
    parts = tl.arange(0, BLOCK_S)[:, None]
    for level in tl.static_range(PASSES):
        part = ((level * tl.num_programs(0) + row) * splits + parts) * CELLS + cells[None, :]
        amounts = tl.sum(tl.load(partial + part, mask=parts < splits, other=0), 0)
        if level == 0:
            target = tl.where(by_count, target, _share(tl.load(top_p + row), tl.max(amounts, 0)))
        short = (amounts < target) & (cells < CELLS - 1)
        amount = tl.maximum(amount, tl.max(tl.where(short, amounts, 0), 0))
        step = step // CELLS
        low += tl.sum(short.to(tl.int32), 0) * step
    return low, low + step, amount, target


@triton.jit
def _search_list(depths, amounts, low, high, amount, target):
    """The first limit above ``low`` that reaches the target, or ``high``. ``amount``: of tokens outside the list."""
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = amount + tl.sum(tl.where(depths <= middle, amounts, 0), 0) >= target
        low = tl.where(enough, low, middle)
        high = tl.where(enough, middle, high)
    return high


@triton.jit
def _search_row(
    row_logits, row_maxima, largest, per_unit, by_count, low, high, target, num_chunks, vocabulary, UNIT: tl.constexpr
):
    """The same over all tokens of the row."""
    while high - low > 1:
        step = tl.cdiv(high - low, CELLS)
        amounts = _amounts(
            row_logits, row_maxima, largest, per_unit, by_count, low, step, 0, num_chunks, vocabulary, UNIT
        )  # fmt: skip
        short = (amounts < target) & (tl.arange(0, CELLS) < CELLS - 1)
        low += tl.sum(short.to(tl.int32), 0) * step
        high = tl.minimum(high, low + step)
    return high


@triton.jit
def _standard_deviation(row_moments, num_chunks, BLOCK_C: tl.constexpr):
    """From the moments of chunks. Infinite, so that every token stays, where a square overflows."""
    chunks = tl.arange(0, BLOCK_C)
    counts = tl.load(row_moments + chunks, mask=chunks < num_chunks, other=0.0)
    means = tl.load(row_moments + num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
    squares = tl.load(row_moments + 2 * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
    count = tl.sum(counts, 0)
    deviations = means - tl.sum(counts * means, 0) / count
    variance = tl.sum(squares + counts * deviations * deviations, 0) / count
    return tl.where(variance == variance, tl.sqrt(variance), float("inf"))


@triton.jit
def maxima_kernel(logits, top_n_sigma, maxima, moments, found, row_stride, vocabulary, num_chunks):
    """The largest logit of each chunk; an empty list; and for top-n-sigma, of each chunk's logits above -inf, their
    number, mean and sum of squared deviations, in ``moments`` ``[R, 3, num_chunks]``."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.program_id(1) * TILE + tl.arange(0, TILE)
    tokens = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = _load_logits(logits + row * row_stride, tokens, vocabulary)
    tl.store(maxima + row * num_chunks + chunks, tl.max(x, 1), mask=chunks < num_chunks)
    if tl.load(top_n_sigma + row) > 0:
        allowed = x > float("-inf")
        count = tl.sum(allowed.to(tl.float32), 1)
        mean = tl.sum(tl.where(allowed, x, 0.0), 1) / tl.maximum(count, 1.0)
        deviations = tl.where(allowed, x - mean[:, None], 0.0)
        place = moments + row * 3 * num_chunks + chunks
        tl.store(place, count, mask=chunks < num_chunks)
        tl.store(place + num_chunks, mean, mask=chunks < num_chunks)
        tl.store(place + 2 * num_chunks, tl.sum(deviations * deviations, 1), mask=chunks < num_chunks)
    if tl.program_id(1) == 0:
        tl.store(found + row * 3, 0)
        tl.store(found + row * 3 + 1, BANNED)
        tl.store(found + row * 3 + 2, -1)


@triton.jit
def narrow_kernel(
    logits, temperature, top_k, top_p, maxima, partial, row_stride, vocabulary, num_chunks, chunks_per_split,
    LEVEL: tl.constexpr, UNIT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Pass ``LEVEL`` of the search over a split of a row, into ``partial`` ``[LEVELS, R, splits, CELLS]``."""
    row = tl.program_id(0).to(tl.int64)
    split, splits = tl.program_id(1), tl.num_programs(1)
    by_count = tl.load(top_k + row) < vocabulary
    if by_count | (tl.load(top_p + row) < 1):
        largest, per_unit, drawn = _scale(maxima, temperature, row, num_chunks, BLOCK_C)
        if drawn:
            low, high, _, _ = _range(partial, top_k, top_p, row, splits, vocabulary, LEVEL, BLOCK_S)
            first = split * chunks_per_split
            amounts = _amounts(
                logits + row * row_stride, maxima + row * num_chunks, largest, per_unit, by_count,
                low, (high - low) // CELLS, first, tl.minimum(first + chunks_per_split, num_chunks), vocabulary, UNIT,
            )  # fmt: skip
            part = ((LEVEL * tl.num_programs(0) + row) * splits + split) * CELLS
            tl.store(partial + part + tl.arange(0, CELLS), amounts)


@triton.jit
def gather_kernel(
    logits, temperature, top_k, top_p, maxima, partial, found, listed,
    row_stride, vocabulary, num_chunks, chunks_per_split,
    LISTED: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The depths still in question into ``listed`` ``[R, LISTED]``, in any order.

    ``found`` ``[R, 3]``: how many, also if they do not fit, and the least and the largest of those in the range.
    """
    row = tl.program_id(0).to(tl.int64)
    by_count = tl.load(top_k + row) < vocabulary
    if by_count | (tl.load(top_p + row) < 1):
        largest, per_unit, drawn = _scale(maxima, temperature, row, num_chunks, BLOCK_C)
        if drawn:
            low, high, _, _ = _range(partial, top_k, top_p, row, tl.num_programs(1), vocabulary, LEVELS, BLOCK_S)
            above = tl.where(by_count, -1, low)
            first = tl.program_id(1) * chunks_per_split
            for chunk in range(first, tl.minimum(first + chunks_per_split, num_chunks)):
                if _depths(tl.load(maxima + row * num_chunks + chunk), largest, per_unit) <= high:
                    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
                    depths = _depths(_load_logits(logits + row * row_stride, tokens, vocabulary), largest, per_unit)
                    chosen = ((depths > above) & (depths <= high)).to(tl.int32)
                    count = tl.sum(chosen, 0)
                    if count > 0:
                        place = tl.atomic_add(found + row * 3, count, sem="relaxed") + tl.cumsum(chosen, 0) - 1
                        tl.store(listed + row * LISTED + place, depths, mask=(chosen > 0) & (place < LISTED))
                        in_range = (depths > low) & (depths <= high)
                        tl.atomic_min(found + row * 3 + 1, tl.min(tl.where(in_range, depths, BANNED), 0), sem="relaxed")
                        tl.atomic_max(found + row * 3 + 2, tl.max(tl.where(in_range, depths, -1), 0), sem="relaxed")


@triton.jit
def limit_kernel(
    logits, temperature, top_k, top_p, min_p, top_n_sigma, maxima, moments, partial, found, listed, limits,
    row_stride, vocabulary, num_chunks, splits,
    UNIT: tl.constexpr, LISTED: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The largest depth that stays."""
    row = tl.program_id(0).to(tl.int64)
    largest, per_unit, drawn = _scale(maxima, temperature, row, num_chunks, BLOCK_C)
    if drawn:
        smallest = tl.maximum(tl.load(min_p + row), 2.0**-64)
        limit = tl.minimum(tl.maximum(-tl.log2(smallest) * HALVING, 0.0).to(tl.int32), BANNED - 1)
        deviations = tl.load(top_n_sigma + row)
        if deviations > 0:
            reach = deviations * _standard_deviation(moments + row * 3 * num_chunks, num_chunks, BLOCK_C)
            limit = tl.minimum(limit, tl.minimum(reach * per_unit, BANNED * 1.0).to(tl.int32))
        by_count = tl.load(top_k + row) < vocabulary
        share = tl.load(top_p + row)
        if by_count | (share < 1):
            low, high, amount, target = _range(partial, top_k, top_p, row, splits, vocabulary, LEVELS, BLOCK_S)
            count = tl.load(found + row * 3)
            deepest = tl.load(found + row * 3 + 2)
            high = tl.where(deepest > low, deepest, high)
            low = tl.maximum(low, tl.load(found + row * 3 + 1) - 1)
            if count <= LISTED:
                i = tl.arange(0, LISTED)
                depths = tl.load(listed + row * LISTED + i, mask=i < count, other=BANNED)
                weights = _weights(depths, UNIT)
                amount = tl.where(by_count, 0, amount)
                high = _search_list(depths, tl.where(by_count, 1, weights), low, high, amount, target)
                if by_count & (share < 1):
                    total = tl.sum(tl.where(depths <= high, weights, 0), 0)
                    high = _search_list(depths, weights, tl.full([], -1, tl.int32), high, amount, _share(share, total))
            else:
                row_logits, row_maxima = logits + row * row_stride, maxima + row * num_chunks
                high = _search_row(
                    row_logits, row_maxima, largest, per_unit, by_count, low, high, target,
                    num_chunks, vocabulary, UNIT,
                )  # fmt: skip
                if by_count & (share < 1):
                    amounts = _amounts(
                        row_logits, row_maxima, largest, per_unit, False, high - CELLS, 1,
                        0, num_chunks, vocabulary, UNIT,
                    )  # fmt: skip
                    high = _search_row(
                        row_logits, row_maxima, largest, per_unit, False, tl.full([], -1, tl.int32), high,
                        _share(share, tl.max(amounts, 0)), num_chunks, vocabulary, UNIT,
                    )  # fmt: skip
            limit = tl.minimum(limit, high)
        tl.store(limits + row, limit)


@triton.jit
def bounds_kernel(
    logits, temperature, seed, position, maxima, limits, bounds, row_stride, vocabulary, num_chunks,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The bound of each block into ``bounds`` ``[R, num_chunks * CHUNK / BLOCK]``; ``LOSES`` where no token stays."""
    row = tl.program_id(0).to(tl.int64)
    largest, per_unit, drawn = _scale(maxima, temperature, row, num_chunks, BLOCK_C)
    if drawn:
        limit = tl.load(limits + row)
        chunks = tl.program_id(1) * TILE + tl.arange(0, TILE)
        nearest = tl.load(maxima + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
        per_tile: tl.constexpr = TILE * CHUNK // BLOCK
        blocks = tl.program_id(1) * per_tile + tl.arange(0, per_tile)
        bound = tl.full([per_tile], LOSES, tl.int32)
        if tl.min(_depths(nearest, largest, per_unit), 0) <= limit:
            tokens = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            depths = _depths(_load_logits(logits + row * row_stride, tokens, vocabulary), largest, per_unit)
            depth = tl.min(depths, 1)
            least, _ = least_of_blocks(tl.load(seed + row), tl.load(position + row), blocks)
            bound = tl.where(depth <= limit, gumbel(least) - depth, LOSES)
        num_blocks = num_chunks * (CHUNK // BLOCK)
        tl.store(bounds + row * num_blocks + blocks, bound, mask=blocks < num_blocks)


@triton.jit
def _best_of_blocks(row_logits, seed, position, blocks, looked_into, limit, largest, per_unit, vocabulary):
    """Of some blocks the largest noise less depth, and the first token that has it."""
    places = tl.arange(0, BLOCK)[None, :]
    tokens = blocks[:, None] * BLOCK + places
    inside = tl.where(looked_into[:, None], tokens, vocabulary)
    depths = _depths(_load_logits(row_logits, inside, vocabulary), largest, per_unit)
    least, place = least_of_blocks(seed, position, blocks)
    more = more_of_tokens(seed, position, tokens)
    noise = gumbel(tl.where(places == place[:, None], least[:, None] + more * 0, least[:, None] + more))
    sums = tl.where(depths <= limit, noise - depths, LOSES)
    best = tl.max(tl.max(sums, 1), 0)
    return best, tl.min(tl.min(tl.where(sums == best, tokens, 2147483647), 1), 0)


@triton.jit
def draw_kernel(
    logits, temperature, seed, position, maxima, limits, bounds, out, row_stride, vocabulary, num_chunks,
    TOGETHER: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The token: from the bounds, ``TOGETHER`` of which are held at a time; or the most likely one.

    No token where the largest logit is infinite.
    """
    row = tl.program_id(0).to(tl.int64)
    largest, per_unit, drawn = _scale(maxima, temperature, row, num_chunks, BLOCK_C)
    row_logits = logits + row * row_stride
    token = tl.full([], 2147483647, tl.int32)
    if drawn:
        limit = tl.load(limits + row)
        row_seed, row_position = tl.load(seed + row), tl.load(position + row)
        num_blocks = num_chunks * (CHUNK // BLOCK)
        width: tl.constexpr = TOGETHER // GROUPS
        groups, columns = tl.arange(0, GROUPS), tl.arange(0, width)[None, :]
        best = tl.full([], LOSES + 1, tl.int32)
        for start in range(0, num_blocks, TOGETHER):
            held = start + groups[:, None] * width + columns
            bound = tl.load(bounds + row * num_blocks + held, mask=held < num_blocks, other=LOSES)
            while tl.max(tl.max(bound, 1), 0) >= best:
                top, column = tl.max(bound, 1), tl.argmax(bound, 1)
                blocks = start + groups * width + column
                found, first = _best_of_blocks(
                    row_logits, row_seed, row_position, blocks, top >= best, limit, largest, per_unit, vocabulary
                )
                token = tl.where(found > best, first, tl.where(found == best, tl.minimum(first, token), token))
                best = tl.maximum(best, found)
                bound = tl.where(columns == column[:, None], LOSES, bound)
    else:
        chunks, places = tl.arange(0, BLOCK_C), tl.arange(0, CHUNK)
        of_chunks = tl.load(maxima + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
        chunk = tl.min(tl.where(of_chunks == largest, chunks, BLOCK_C), 0)
        x = _load_logits(row_logits, chunk * CHUNK + places, vocabulary)
        token = chunk * CHUNK + tl.min(tl.where(x == largest, places, CHUNK), 0)
    tl.store(out + row, tl.where(tl.abs(largest) < float("inf"), token, NO_TOKEN).to(tl.int64))
