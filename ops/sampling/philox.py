"""Random numbers from a seed and a position, in plain torch.

They are made by the counter-based generator Philox4x32-10 (Salmon et al., 2011, "Parallel random numbers: as easy as 1,
2, 3"). Integers alone until the last line, so the bits are the same on every device.
"""

from torch import Tensor, zeros_like

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10
_MASK32 = 0xFFFFFFFF


def uniform_reference(seed: Tensor, position: Tensor) -> Tensor:
    """A number in [0, 1) for each row, ``[R]`` float64 with 53 random bits: two words of ``philox``.

    The key is the seed's two halves, the counter is ``(position, 0, 0, 0)``.
    """
    high, low = philox(seed, position)[:2]
    return ((high << 21) | (low >> 11)).double() * 2.0**-53


def philox(seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of Philox4x32-10 for seeds ``[R]`` int64 and positions ``[R]`` int32: ``[R]`` int64, 32 bits."""
    key0, key1 = seed & _MASK32, (seed >> 32) & _MASK32
    c0 = position.long() & _MASK32
    c1 = c2 = c3 = zeros_like(c0)
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
