"""The angles of rotary position embeddings (Su et al., 2021); ``ops.rope`` rotates by them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.models.rope_config import Llama3RopeScaling, Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Angle a position, ``[H / 2]`` float32, scaled as ``rope`` says."""
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return inv_freq if rope.scaling is None else _llama3_scaled(inv_freq, rope.scaling)


def _llama3_scaled(inv_freq: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama 3.1's long-context scaling: low frequencies divided by ``factor``, high ones kept, a ramp between."""
    wavelength = 2 * math.pi / inv_freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_position_embeddings / wavelength - low) / (high - low)
    keep = smooth.clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / scaling.factor


def rope_table(rope: Rope, head_dim: int, length: int, device: torch.device) -> Tensor:
    """Cosines, then sines, of the positions below ``length``, ``[length, H]`` float32.

    A table, since the compiler would compute them anew in every layer, for every head.
    """
    if device.type == "meta":
        return torch.empty(length, head_dim, device=device)
    positions = torch.arange(length, dtype=torch.float32)
    table = torch.empty(length, head_dim)
    cosines, sines = table.chunk(2, dim=-1)
    torch.mul(positions[:, None], inverse_frequencies(rope, head_dim), out=sines)  # a long table takes memory once
    torch.cos(sines, out=cosines)
    sines.sin_()
    return table.to(device)


def rope_cos_sin(positions: Tensor, table: Tensor) -> Tensor:
    """Cosines, then sines, for tokens at ``positions`` ``[T]``: ``[T, H]`` float32."""
    return F.embedding(positions, table)
