"""The parts that families share: norm, rotary embedding, attention block, gated MLP. Pure functions."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import LayerCache, StepInput
from compiled_llm.models.rope_config import Llama3RopeScaling
from compiled_llm.models.weights import Linear, PackedLinear, linear
from compiled_llm.ops import paged_attention

AnyLinear = Linear | PackedLinear


class AttentionWeights(NamedTuple):
    qkv: AnyLinear  # [(N + 2K) * H, D]
    o: AnyLinear  # [D, N * H]
    q_norm: Tensor | None = None  # [H], for families that normalise each head's query and key
    k_norm: Tensor | None = None  # [H]


class MlpWeights(NamedTuple):
    gate_up: AnyLinear  # [2 * intermediate, D]
    down: AnyLinear  # [D, intermediate]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension, computed in float32 (Zhang and Sennrich, 2019)."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def rope_inv_freq(config: ModelConfig) -> Tensor:
    """Frequencies of the rotary embedding, ``[H / 2]`` float32 (Su et al., 2021), scaled as the config says."""
    inv_freq = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
    scaling = config.rope_scaling
    return inv_freq if scaling is None else llama3_scaled(inv_freq, scaling)


def llama3_scaled(inv_freq: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama 3.1's long-context scaling: low frequencies divided by ``factor``, high ones kept, a ramp between."""
    wavelength = 2 * math.pi / inv_freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_position_embeddings / wavelength - low) / (high - low)
    keep = smooth.clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / scaling.factor


def rope_table(config: ModelConfig, device: torch.device) -> Tensor:
    """Cosines, then sines, of every position, ``[max_position_embeddings, H]`` float32.

    A table, since the compiler would compute them anew in every layer, for every head.
    """
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    table = torch.empty(config.max_position_embeddings, config.head_dim)
    cosines, sines = table.chunk(2, dim=-1)
    torch.mul(positions[:, None], rope_inv_freq(config), out=sines)  # in place: a long table takes the memory once
    torch.cos(sines, out=cosines)
    sines.sin_()
    return table.to(device)


def rope_cos_sin(positions: Tensor, table: Tensor) -> Tensor:
    """Cosines, then sines, for each token, ``[T, 1, H]`` float32."""
    return F.embedding(positions, table)[:, None]


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate ``x`` ``[T, heads, H]``: the first half of each head pairs with the second (Hugging Face's order)."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)], dim=-1)


def attention(
    x: Tensor,
    w: AttentionWeights,
    cos_sin: Tensor,
    cache: LayerCache,
    step: StepInput,
    config: ModelConfig,
    max_query_len: int,
) -> Tensor:
    """Self-attention block on ``x`` ``[T, D]``, which also writes this step's keys and values to the cache."""
    num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    q, k, v = linear(x, w.qkv).unflatten(-1, (-1, head_dim)).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if w.q_norm is not None and w.k_norm is not None:
        q, k = rms_norm(q, w.q_norm, config.rms_norm_eps), rms_norm(k, w.k_norm, config.rms_norm_eps)
    out = paged_attention(
        apply_rope(q, cos_sin),
        apply_rope(k, cos_sin),
        v,
        cache.k,
        cache.v,
        cache.k_scale,
        cache.v_scale,
        step.slot_mapping,
        step.block_table,
        step.query_start_loc,
        step.seq_lens,
        sm_scale=head_dim**-0.5,
        max_query_len=max_query_len,
    )
    return linear(out.flatten(1), w.o)


def gated_mlp(x: Tensor, w: MlpWeights) -> Tensor:
    """SwiGLU: ``down(silu(gate(x)) * up(x))`` on ``x`` ``[T, D]`` (Shazeer, 2020)."""
    gate, up = linear(x, w.gate_up).chunk(2, dim=-1)
    return linear(F.silu(gate) * up, w.down)
