"""The softmax of rows over tiles of keys, as the main loops of attention take it: where it starts, and its steps.

Scores times a factor are exponents of two. Maxima are kept as such exponents.
"""

import triton
import triton.language as tl

# Running maxima start here instead of at -inf: a row with no visible key then ends with sum 0, not NaN.
LOWEST = tl.constexpr(-1.0e30)
SMALLEST_UNIT = tl.constexpr(2.0**-40)  # values with scales below this are rounded by less than 1e-16
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def no_keys(BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr):
    """Of rows that have seen no key: sums of weighted values, maxima, sums of weights."""
    acc = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    return acc, tl.full([BLOCK_M], LOWEST, tl.float32), tl.zeros([BLOCK_M], tl.float32)


@triton.jit
def factor_of(scale, SOFT_CAP: tl.constexpr):
    """What makes ``capped`` scores exponents of two."""
    if SOFT_CAP > 0:
        return SOFT_CAP * LOG2_E
    else:
        return scale * LOG2_E


@triton.jit
def capped(scores, scale, SOFT_CAP: tl.constexpr):
    """Scores as they are, or what their cap is to be multiplied by."""
    if SOFT_CAP > 0:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
        return 1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale * (2.0 * LOG2_E / SOFT_CAP))))
    else:
        return scores


@triton.jit
def seen_keys(positions, inside, visible, WINDOW: tl.constexpr, nodes=None, context=0):
    """``[M, N]``: the keys that row i sees, those before ``visible[i]`` and with a window the last ``WINDOW`` of them.

    ``visible`` None: every row sees those ``inside``. ``nodes``: [M] int64, of rows of a tree bit n for the key at
    ``context + n``, of others 0; with a window of no fewer keys than a tree has rows.
    """
    if visible is None:
        return inside[None, :]
    elif nodes is not None:
        node = positions - context
        is_seen = (((nodes[:, None] >> tl.minimum(tl.maximum(node, 0), 63)[None, :]) & 1) != 0) & inside[None, :]
        before = positions[None, :] < visible[:, None]
        before = tl.where((node >= 0)[None, :] & (nodes != 0)[:, None], is_seen, before)
        if WINDOW > 0:
            before = before & (positions[None, :] >= visible[:, None] - WINDOW)
        return before
    elif WINDOW > 0:
        before = positions[None, :] < visible[:, None]
        return before & (positions[None, :] >= visible[:, None] - WINDOW)
    else:
        return positions[None, :] < visible[:, None]


@triton.jit
def weighed(scores, factor, row_max, row_sum):
    """Weights of a tile's keys, by what earlier sums of values decay, new maxima, new sums of weights.

    Maxima are scaled, which takes a positive ``factor`` and leaves one fused operation a score.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    probs = tl.exp2(tl.fma(scores, factor, -new_max[:, None]))
    decay = tl.exp2(row_max - new_max)
    return probs, decay, new_max, tl.fma(row_sum, decay, tl.sum(probs, 1))


@triton.jit
def keys_before(ancestors, rows, row_mask, context, tokens):
    """How many keys rows see, and the masks of those of a tree, which see as many as their path has; None: no trees."""
    if ancestors is None:
        return context + tokens + 1, None
    else:
        nodes = tl.load(ancestors + rows, mask=row_mask, other=0)
        # Ones of 2 bits, of 4, of 8, and of all; shifts of a negative number bring in ones, which are masked.
        count = nodes - ((nodes >> 1) & 0x5555555555555555)
        count = (count & 0x3333333333333333) + ((count >> 2) & 0x3333333333333333)
        count = (count + (count >> 4)) & 0x0F0F0F0F0F0F0F0F
        count += count >> 32
        count += count >> 16
        count += count >> 8
        return context + tl.where(nodes != 0, (count & 127).to(tl.int32), tokens + 1), nodes
