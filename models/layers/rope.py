"""The angles of rotary position embeddings (Su et al., 2021); ``ops.rope`` rotates by them."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.models.rope_config import Llama3RopeScaling, Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Angle a position of each pair that is turned, ``[H / 2]`` float32 or fewer, scaled as ``rope`` says."""
    turned = rope.rotary_dim(head_dim)
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned)
    return inv_freq if rope.scaling is None else _llama3_scaled(inv_freq, rope.scaling)


def _llama3_scaled(inv_freq: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama 3.1's long-context scaling: low frequencies divided by ``factor``, high ones kept, a ramp between."""
    wavelength = 2 * math.pi / inv_freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_position_embeddings / wavelength - low) / (high - low)
    keep = smooth.clamp(0, 1)
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

    A table, since the compiler would compute them anew in every layer, for every head.
    """
    if device.type == "meta":
        return torch.empty(length, head_dim, device=device)
    positions = torch.arange(length, dtype=torch.float32)
    table = torch.empty(length, head_dim)
    cosines, sines = table.chunk(2, dim=-1)
    frequencies = inverse_frequencies(rope, head_dim)
    still = frequencies.new_zeros(head_dim // 2 - len(frequencies))  # of pairs that are not turned
    torch.mul(positions[:, None], torch.cat([frequencies, still]), out=sines)  # a long table takes memory once
    torch.cos(sines, out=cosines)
    sines.sin_()
    return table.to(device)


def rope_cos_sin(positions: Tensor, table: Tensor) -> Tensor:
    """Cosines, then sines, for tokens at ``positions`` ``[T]``: ``[T, H]`` float32."""
    return F.embedding(positions, table)
