"""The angles of rotary position embeddings (Su et al., 2021); ``ops.rope`` rotates by them."""

import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.models.rope_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    Rope,
    YarnRopeScaling,
)


def inverse_frequencies(rope: Rope, head_dim: int, length: int) -> Tensor:
    """Angle a position, ``[H / 2]`` float32, scaled as ``rope`` says for texts of up to ``length`` tokens.

    Elements that are not rotated have angle 0; see ``halves_order`` for where they are.
    """
    rotated, scaling = rope.num_rotated(head_dim), rope.scaling
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    if isinstance(scaling, LinearRopeScaling):
        inv_freq = inv_freq / scaling.factor
    elif isinstance(scaling, Llama3RopeScaling):
        inv_freq = _llama3_scaled(inv_freq, scaling)
    elif isinstance(scaling, YarnRopeScaling):
        inv_freq = _yarn_scaled(inv_freq, scaling, rope.theta)
    elif isinstance(scaling, LongRopeScaling):
        is_long = length > scaling.original_max_position_embeddings
        inv_freq = inv_freq / torch.tensor(scaling.long_factor if is_long else scaling.short_factor)
    return F.pad(inv_freq, (0, (head_dim - rotated) // 2))


def _llama3_scaled(inv_freq: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama 3.1's long-context scaling: low frequencies divided by ``factor``, high ones kept, a ramp between."""
    wavelength = 2 * math.pi / inv_freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_position_embeddings / wavelength - low) / (high - low)
    keep = smooth.clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / scaling.factor


def _yarn_scaled(inv_freq: Tensor, scaling: YarnRopeScaling, theta: float) -> Tensor:
    """The same with a ramp over the index of the frequency.

    It goes from the one with ``beta_fast`` turns in the original length to the one with ``beta_slow``.
    """
    rotated = 2 * len(inv_freq)

    def index(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return rotated * math.log(wavelength) / (2 * math.log(theta))

    first, end = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        first, end = math.floor(first), math.ceil(end)
    first, end = max(first, 0), min(end, rotated - 1)
    width = end - first or 0.001
    keep = 1 - ((torch.arange(len(inv_freq), dtype=torch.float32) - first) / width).clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / scaling.factor


def rope_table(rope: Rope, head_dim: int, length: int, device: torch.device) -> Tensor:
    """Cosines, then sines, of the positions below ``length``, ``[length, H]`` float32.

    A table, since the compiler would compute them anew in every layer, for every head. Warns where it has the divisors
    of ``LongRopeScaling`` for long texts, which short ones get then, too.
    """
    if device.type == "meta":
        return torch.empty(length, head_dim, device=device)
    _warn_of_long_factors(rope, length)
    positions = torch.arange(length, dtype=torch.float32)
    table = torch.empty(length, head_dim)
    cosines, sines = table.chunk(2, dim=-1)
    # A long table takes memory once.
    torch.mul(positions[:, None], inverse_frequencies(rope, head_dim, length), out=sines)
    torch.cos(sines, out=cosines)
    sines.sin_()
    if rope.attention_factor != 1:
        rotated = rope.num_rotated(head_dim) // 2
        cosines[:, :rotated] *= rope.attention_factor
        sines *= rope.attention_factor
    return table.to(device)


def _warn_of_long_factors(rope: Rope, length: int) -> None:
    if isinstance(rope.scaling, LongRopeScaling) and length > rope.scaling.original_max_position_embeddings:
        original = int(rope.scaling.original_max_position_embeddings)
        warnings.warn(
            f"max_model_len={length} is longer than original_max_position_embeddings={original}: all texts are "
            f"computed with the long_factor of config.json, short ones too. With max_model_len={original} they are "
            "computed with its short_factor",
            stacklevel=2,
        )


def halves_order(num_heads: int, head_dim: int, num_rotated: int, *, interleaved: bool = False) -> list[int]:
    """Where ``ops.rope`` finds the elements of heads whose pairs a checkpoint has elsewhere.

    The op pairs a head's first half with its second. Here pairs are element i with i + ``num_rotated`` / 2 or, where
    they are ``interleaved``, 2i with 2i + 1; the elements from ``num_rotated`` on are not rotated. Scores do not depend
    on the order, as long as queries and keys have the same.

    Returns:
        For each of the ``num_heads * head_dim`` rows of a projection as the op needs it, that of the checkpoint.
    """
    pairs = num_rotated // 2
    first = range(0, num_rotated, 2) if interleaved else range(pairs)
    second = range(1, num_rotated, 2) if interleaved else range(pairs, num_rotated)
    middle = (num_rotated + head_dim) // 2
    head = [*first, *range(num_rotated, middle), *second, *range(middle, head_dim)]
    return [start + i for start in range(0, num_heads * head_dim, head_dim) for i in head]


def rope_cos_sin(positions: Tensor, table: Tensor) -> Tensor:
    """Cosines, then sines, for tokens at ``positions`` ``[T]``: ``[T, H]`` float32."""
    return F.embedding(positions, table)
