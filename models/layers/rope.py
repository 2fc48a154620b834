"""The angles of rotary position embeddings (Su et al., 2021); ``ops.rope`` rotates by them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from compiled_llm.models.rope_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRope,
    Rope,
    YarnRopeScaling,
)
from compiled_llm.ops import table_rows
from compiled_llm.ops.user_warnings import warn


def inverse_frequencies(rope: Rope, head_dim: int, length: int) -> Tensor:
    """Angle a position of each pair that is turned, ``[H / 2]`` float32 or fewer.

    They are scaled as ``rope`` says for texts of up to ``length`` tokens.
    """
    turned, scaling = rope.rotary_dim(head_dim), rope.scaling
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned)
    if isinstance(scaling, LinearRopeScaling):
        inv_freq = inv_freq / scaling.factor
    elif isinstance(scaling, Llama3RopeScaling):
        inv_freq = _llama3_scaled(inv_freq, scaling)
    elif isinstance(scaling, YarnRopeScaling):
        inv_freq = _yarn_scaled(inv_freq, scaling, rope.theta)
    elif isinstance(scaling, LongRopeScaling):
        is_long = length > scaling.original_max_position_embeddings
        inv_freq = inv_freq / torch.tensor(scaling.long_factor if is_long else scaling.short_factor)
    elif isinstance(scaling, ProportionalRope):
        inv_freq = inv_freq[: int(scaling.share * head_dim // 2)] / scaling.factor
    return inv_freq


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


def head_arrangement(rope: Rope, head_dim: int) -> Callable[[Tensor], Tensor] | None:
    """Puts a checkpoint's elements of queries and keys where ``ops.rope`` pairs them; None where they are there.

    The op pairs a head's first half with its second. Scores are the same for any order of a head's elements, so the
    weights are put in one where these are the pairs, those that are not turned come last in each half.
    """
    turned = rope.rotary_dim(head_dim)
    if turned == head_dim and not rope.interleaved:
        return None
    first, second = (range(0, turned, 2), range(1, turned, 2)) if rope.interleaved else _halves(range(turned))
    kept = _halves(range(turned, head_dim))
    order = torch.tensor([*first, *kept[0], *second, *kept[1]])
    return lambda rows: rows.unflatten(0, (-1, head_dim))[:, order.to(rows.device)].flatten(0, 1)


def _halves(elements: range) -> tuple[range, range]:
    return elements[: len(elements) // 2], elements[len(elements) // 2 :]


def rope_table(rope: Rope, head_dim: int, length: int, device: torch.device) -> Tensor:
    """Cosines, then sines, of the positions below ``length``, ``[length, H]`` float32.

    A table, since the compiler would compute them anew in every layer, for every head. Warns where it has the divisors
    of ``LongRopeScaling`` for long texts, which short ones get then, too.
    """
    if device.type == "meta":
        return torch.empty(length, head_dim, device=device)
    _warn_of_long_factors(rope, length)
    dtype = torch.float64 if rope.precise else torch.float32
    positions = torch.arange(length, dtype=dtype)
    table = torch.empty(length, head_dim, dtype=dtype)
    cosines, sines = table.chunk(2, dim=-1)
    frequencies = inverse_frequencies(rope, head_dim, length).to(dtype)
    still = frequencies.new_zeros(head_dim // 2 - len(frequencies))  # of pairs that are not turned
    torch.mul(positions[:, None], torch.cat([frequencies, still]), out=sines)  # a long table takes memory once
    torch.cos(sines, out=cosines)
    sines.sin_()
    if rope.attention_factor != 1:
        for half in (cosines, sines):
            half[:, : len(frequencies)] *= rope.attention_factor
    return table.float().to(device)


def _warn_of_long_factors(rope: Rope, length: int) -> None:
    if isinstance(rope.scaling, LongRopeScaling) and length > rope.scaling.original_max_position_embeddings:
        original = int(rope.scaling.original_max_position_embeddings)
        warn(
            f"max_model_len={length} is longer than original_max_position_embeddings={original}: all texts are "
            f"computed with the long_factor of config.json, short ones too. With max_model_len={original} they are "
            "computed with its short_factor",
        )


def query_scale_table(rope: Rope, length: int, like: Tensor) -> Tensor:
    """What multiplies the query of each position below ``length``, ``[length, 1]`` in dtype and device of ``like``."""
    if like.is_meta:
        return like.new_empty(length, 1)
    assert isinstance(rope.scaling, YarnRopeScaling)
    periods = torch.floor(torch.arange(length) / rope.scaling.original_max_position_embeddings)
    return (1 + rope.query_beta * torch.log(1 + periods))[:, None].to(like.device, like.dtype)


def rope_cos_sin(positions: Tensor, table: Tensor) -> Tensor:
    """Cosines, then sines, for tokens at ``positions`` ``[T]``: ``[T, H]`` float32."""
    return table_rows(table, positions)
