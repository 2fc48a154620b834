"""The noise of a token: a Gumbel variable that follows from (seed, position, token id) alone, in plain torch.

The token of a row is the one of the largest ``log2(weight) + noise`` (Gumbel-max: Gumbel, 1954; Maddison et al., 2014,
arXiv:1411.0030). Here a noise is ``-log2(E)`` with E exponential, in whole units of 2^-24, an int32. So one unit more
is a weight of 2^(2^-24) times as much, and the sum with a log-weight in the same units is exact on every device.

Blocks. Most tokens of a vocabulary cannot win, and should cost nothing. So the noise of the ``BLOCK`` tokens of a block
is made from the top: first the least E of them, which is exponential with ``BLOCK`` times the rate; then its place,
which is any of theirs; and each other E is that least one and an exponential variable more, as those have no memory.
These are independent exponential variables like any others. But now one random number bounds the noise of a block, and
a block is looked into only where that bound and its largest weight could win.

Numbers. Of a Philox counter (position, block, 0, 0) the first word is the least E and the second its place; of
(position, token, 1, 0) the first is what the token's E is more. Of a word's bits 30 count. So the probability of a
token that has 2^-34 of the sum of weights is right to 0.3%, and one that has less than 2^-40 is as good as never drawn.
Logarithms are a polynomial in whole numbers; E is a float32, of which no operation but one sum is rounded.
"""

import torch
from torch import Tensor

from compiled_llm.ops.sampling.philox import philox

BLOCK = 64  # tokens
HALVING = 2**24  # units of noise in a factor of two
# -log2(1 - y) / y = sum over k of c[k] (y - 1/4)^k for y in (0, 1/2], to 2^-25 of it; in units of 2^-29.
LOG_COEFFICIENTS = (
    891286246, 565739656, 490959671, 484234587, 511902098, 556261366, 628879074, 918918427, 1116196858,
)  # fmt: skip
_LEAST, _MORE = 0, 1  # the third word of a counter


def token_noise(seed: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
    """The noise of tokens: int32, of the shape that the arguments broadcast to.

    It is that of the model's own sampling, so whoever draws the argmax of its sum with other logits, divided by a
    temperature, draws the model's token as often as can be.

    Args:
        seed: int64, of the request.
        position: int32, of the token to be sampled.
        tokens: int64, ids of the vocabulary.
    """
    blocks = tokens // BLOCK
    least, place = _least_of_block(seed, position, blocks)
    more = _exponential(philox(seed, (position, tokens, _MORE))[0])
    return _gumbel(torch.where(tokens - blocks * BLOCK == place, least, least + more))


def block_noise(seed: Tensor, position: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of blocks of tokens, int64: the largest noise of each, int32, and the place in the block that has it, int64.

    Arguments broadcast. The block b has the tokens ``b * BLOCK`` to ``(b + 1) * BLOCK - 1``.
    """
    least, place = _least_of_block(seed, position, blocks)
    return _gumbel(least), place


def _least_of_block(seed: Tensor, position: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The least E of each, float32, and its place."""
    first, second = philox(seed, (position, blocks, _LEAST))[:2]
    return _exponential(first) / BLOCK, second % BLOCK


def _exponential(word: Tensor) -> Tensor:
    """``-log2(v / 2^31)``, float32, for v the odd number of a word's upper 30 bits and a 1; words are int64."""
    v = (word >> 1) | 1
    # v = 2^(30 - halvings) * (1 to 2). Without the bit below its highest it is not rounded up to the next power of two.
    halvings = 157 - (_bits(v & ~(v >> 1)) >> 23)
    rest = (1 << 31) - (v << halvings)  # 1 to 2^30
    # A float32 of 24 significant bits as a whole number and an exponent, to keep small ones as exact as others.
    bits = _bits(rest)
    product = (_log_quotient(rest) * (((bits & 0x7FFFFF) | 0x800000) << 6)) >> 32
    return halvings.float() + product.float() * (((bits >> 23) - 57) << 23).int().view(torch.float32)


def _gumbel(exponential: Tensor) -> Tensor:
    """``-log2(E)`` in units of 1 / HALVING, int32."""
    bits = exponential.contiguous().view(torch.int32).long()
    y = (0x800000 - (bits & 0x7FFFFF)) << 7  # E is 2^exponent * 2 (1 - y / 2^31)
    return (((_log_quotient(y) * y) >> 36) - (((bits >> 23) - 126) << 24)).int()


def _log_quotient(y: Tensor) -> Tensor:
    """``-log2(1 - y) / y`` in units of 2^-29, for y in units of 2^-31, 1 to 2^30; int64."""
    z = 2 * y - (1 << 30)
    value = torch.full_like(z, LOG_COEFFICIENTS[-1])
    for coefficient in LOG_COEFFICIENTS[-2::-1]:
        value = coefficient + ((value * z) >> 32)
    return value


def _bits(number: Tensor) -> Tensor:
    """Of the float32 of a whole number above 0: int64."""
    return number.to(torch.float32).view(torch.int32).long()
