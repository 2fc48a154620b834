"""Multi-head latent attention: what a layer has of it, and the block that computes it (DeepSeek-V2, arXiv:2405.04434).

A token keeps a latent of C elements, from which every head's key and value follow by a product, and a part of a key
that is turned by its position. Here neither is ever made: as ``q . (W_k latent) = (W_k^T q) . latent`` and
``sum p W_v latent = W_v sum p latent``, each head's query is brought to the latents' space, and what it sees out of it.
So a step reads C + H elements of each token and layer for all heads, a prompt as a decode.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import LayerCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, keys_of
from compiled_llm.models.layers.residual import BlockOutput, Normed
from compiled_llm.models.layers.rope import head_arrangement
from compiled_llm.models.linears.heads import HeadLinear, HeadRows
from compiled_llm.models.linears.protocol import Linear, StoredLinear
from compiled_llm.models.sharding import REPLICATED, of_all, of_heads
from compiled_llm.models.weights import Source
from compiled_llm.ops import rotary_latent_attention, rotary_latent_decode_attention

LATENT_EPS = 1e-6  # of the norms of latents: transformers' default, whatever rms_norm_eps is


class LatentAttentionWeights(NamedTuple):
    # Side by side: the queries, or their latents; the latents of keys and values; the turned part of keys.
    qkv: Linear  # [(N * (n + H), or Q) + C + H, D]
    q_norm: Tensor | None  # [Q], of queries' latents
    q_up: Linear | None  # [N * (n + H), Q]; None where queries have no latents
    norm: Tensor  # [C]
    q_to_latent: HeadLinear  # of each head [C, n]
    latent_to_value: HeadLinear  # of each head [v, C]
    o: Linear  # [D, N * v]


@dataclasses.dataclass(frozen=True)
class LatentSizes:
    """The fields of ``config.json`` that are sizes of latent attention, and ``rope_interleave``."""

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, config: Any) -> "LatentSizes":
        return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(cls)})

    def check(self) -> None:
        """``ValueError`` for what no kernel takes."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            most = 512 if field.name in ("kv_lora_rank", "qk_rope_head_dim") else 2**16
            if value is None and field.name == "q_lora_rank":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
                raise ValueError(f"config.json: {field.name} must be from 1 to {most}, given {value!r:.100}")


def latent_spec(config: ModelConfig, sizes: LatentSizes) -> AttentionSpec:
    """Of each layer. Scores are scaled by the size of a head's whole key."""
    scale = (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim) ** -0.5 * config.ropes[0].score_factor
    return AttentionSpec(config.num_heads, 1, sizes.qk_rope_head_dim, scale, latent_dim=sizes.kv_lora_rank)


def take_latent_attention(
    config: ModelConfig, sizes: LatentSizes, source: Source, name: str, bias: bool
) -> LatentAttentionWeights:
    """A layer's projections under the names that they have in DeepSeek's checkpoints. ``bias``: whether there are."""
    d, n, latent = config.hidden_size, config.num_heads, sizes.kv_lora_rank
    key, turned, value = sizes.qk_nope_head_dim, sizes.qk_rope_head_dim, sizes.v_head_dim
    arrange = head_arrangement(config.ropes[0], turned)
    of_queries, of_latents = (_behind(arrange, first, turned) for first in (key, latent))
    down = StoredLinear(
        f"{name}.kv_a_proj_with_mqa", latent + turned, d, bias, arrange=of_latents, cut=of_all(latent + turned).outputs
    )
    of_q = of_heads(config, n * (key + turned))
    if sizes.q_lora_rank is None:
        q = StoredLinear(f"{name}.q_proj", of_q.size, d, arrange=of_queries, cut=of_q.outputs)
        qkv = source.linear(q, down)
        q_norm = q_up = None
    else:
        qkv = source.linear(StoredLinear(f"{name}.q_a_proj", sizes.q_lora_rank, d, bias, cut=REPLICATED), down)
        q_norm = source.norm(f"{name}.q_a_layernorm", sizes.q_lora_rank)
        q_up = source.linear(
            StoredLinear(f"{name}.q_b_proj", of_q.size, sizes.q_lora_rank, arrange=of_queries, cut=of_q.outputs)
        )
    up = {"kv_b_proj": (n * (key + value), latent)}
    if config.gguf_layout:
        up = {"k_b_proj": (n * latent, key), "v_b_proj": (n * value, latent)}
    ups = [
        StoredLinear(f"{name}.{x}", outputs, inputs, cut=of_heads(config, outputs).outputs)
        for x, (outputs, inputs) in up.items()
    ]
    up_k, up_v = source.heads(ups, n, key)
    return LatentAttentionWeights(
        qkv=qkv,
        q_norm=q_norm,
        q_up=q_up,
        norm=source.norm(f"{name}.kv_a_layernorm", latent),
        q_to_latent=up_k,
        latent_to_value=up_v,
        o=source.linear(StoredLinear(f"{name}.o_proj", d, n * value, bias, cut=of_heads(config, n * value).inputs)),
    )


def _behind(arrange: Callable[[Tensor], Tensor] | None, first: int, turned: int) -> Callable[[Tensor], Tensor] | None:
    """``arrange`` for rows of which each ``first + turned`` are ``first`` that stay and ``turned`` that it arranges."""
    if arrange is None:
        return None

    def arranged(rows: Tensor) -> Tensor:
        kept, moved = rows.unflatten(0, (-1, first + turned)).split([first, turned], dim=1)
        return torch.cat([kept, arrange(moved.flatten(0, 1)).view(moved.shape)], dim=1).flatten(0, 1)

    return arranged


def latent_attention(
    x: Normed,
    w: LatentAttentionWeights,
    cos_sin: Tensor,
    spec: AttentionSpec,
    cache: LayerCache,
    step: StepInput,
    heads: HeadRows,
    query_scale: Tensor | None = None,
) -> BlockOutput:
    """As ``attention``; ``heads`` says where heads have their rows."""
    eps = LATENT_EPS
    if w.q_norm is None or w.q_up is None:
        qkv, of_latents = x.linear(w.qkv), None
    else:
        qkv, normed = x.linear_and_norm(w.qkv, w.q_norm, eps)
        of_latents = normed.linear(w.q_up)
    queries, latent, k_turned = qkv.split(
        [qkv.shape[1] - spec.latent_dim - spec.head_dim, spec.latent_dim, spec.head_dim], dim=-1
    )
    queries = queries if of_latents is None else of_latents
    by_head = queries.unflatten(-1, (spec.num_heads, -1))
    q, q_turned = by_head.split([by_head.shape[-1] - spec.head_dim, spec.head_dim], dim=-1)
    if query_scale is not None:
        q = q * query_scale[:, None]
    new = w.q_to_latent.apply(q, heads), q_turned, k_turned[:, None], latent[:, None]
    turn = cos_sin, w.norm, query_scale, eps
    if spec.plan is not None:
        seen = rotary_latent_decode_attention(*new, *turn, cache, step.plans[spec.plan], spec)
    else:
        seen = rotary_latent_attention(*new, *turn, keys_of(spec, cache, step), spec, step.ancestors)
    return BlockOutput(w.latent_to_value.apply(seen, heads).flatten(1), w.o)
