"""Random words from a seed and a counter, in plain torch: Philox4x32-10.

Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3". Integers alone, so the bits are the same on every
device.
"""

from torch import Tensor, zeros_like

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10
_MASK32 = 0xFFFFFFFF


def philox(seed: Tensor, counter: tuple[Tensor, Tensor, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of Philox4x32-10: int64 tensors of 32 bits, of the shape that the arguments broadcast to.

    Args:
        seed: int64, whose two halves are the key.
        counter: the first three words, of 32 bits; the fourth is 0.
    """
    key0, key1 = seed & _MASK32, (seed >> 32) & _MASK32
    c0 = (counter[0].long() & _MASK32) + zeros_like(counter[1].long())
    c1, c2, c3 = (counter[1].long() & _MASK32) + zeros_like(c0), zeros_like(c0) + counter[2], zeros_like(c0)
    for _ in range(_PHILOX_ROUNDS):
        # Products of two 32-bit numbers wrap in int64; masking the two halves makes up for the sign.
        p0, p1 = c0 * _PHILOX_MULTIPLIERS[0], c2 * _PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK32) ^ c1 ^ key0,
            p1 & _MASK32,
            ((p0 >> 32) & _MASK32) ^ c3 ^ key1,
            p0 & _MASK32,
        )
        key0, key1 = (key0 + _PHILOX_KEY_STEPS[0]) & _MASK32, (key1 + _PHILOX_KEY_STEPS[1]) & _MASK32
    return c0, c1, c2, c3
