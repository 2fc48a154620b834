"""OLMo 2 (OLMo team, 2025, arXiv:2501.00656).

Llama with its norms elsewhere: after each block in the place of before it, and over the queries of all heads together,
and the keys likewise.
"""

import dataclasses
from typing import NamedTuple

from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, AttentionWeights, attention
from compiled_llm.models.layers.mlp import MlpWeights, gated_mlp
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.models.weights import Source
from compiled_llm.ops import rms_norm


@dataclasses.dataclass(frozen=True)
class Olmo2Config(ModelConfig):
    attention_bias: bool


class LayerWeights(NamedTuple):
    attention: AttentionWeights
    attention_norm: Tensor  # [D] float32, as all norms here; of what attention gave
    mlp: MlpWeights
    mlp_norm: Tensor  # [D], of what the MLP gave


class Weights(NamedTuple):
    embedding: Linear  # [V, D]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [D] float32
    head: Linear  # [V, D]
    ropes: tuple[Tensor, ...]  # [max_position_embeddings, H] float32; where there are two, the last is the windows'


def _norm(source: Source, name: str, size: int) -> Tensor:
    return source.norm(name, size, in_float32=True)


def _take_layer(config: Olmo2Config, source: Source, name: str) -> LayerWeights:
    d, h = config.hidden_size, config.head_dim
    return LayerWeights(
        attention=source.attention(f"{name}.self_attn", config, bias=config.attention_bias)._replace(
            q_norm=_norm(source, f"{name}.self_attn.q_norm", config.num_heads * h),
            k_norm=_norm(source, f"{name}.self_attn.k_norm", config.num_kv_heads * h),
        ),
        attention_norm=_norm(source, f"{name}.post_attention_layernorm", d),
        mlp=source.mlp(f"{name}.mlp", config),
        mlp_norm=_norm(source, f"{name}.post_feedforward_layernorm", d),
    )


def take(config: Olmo2Config, source: Source) -> Weights:
    """The weights."""
    embedding, head = source.embedding_and_head(
        "model.embed_tokens", "lm_head", config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    return Weights(
        embedding=embedding,
        layers=tuple(_take_layer(config, source, f"model.layers.{i}") for i in range(config.num_layers)),
        final_norm=_norm(source, "model.norm", config.hidden_size),
        head=head,
        ropes=tuple(source.rope(rope, config.head_dim, config.max_position_embeddings) for rope in config.ropes),
    )


def layers(config: Olmo2Config) -> Layers:
    """All are alike."""
    spec = AttentionSpec(config.num_heads, config.num_kv_heads, config.head_dim, scale=config.head_dim**-0.5)
    return (spec,) * config.num_layers


def forward(
    weights: Weights, step: StepInput, kv_cache: KVCache, config: Olmo2Config, layers: Layers, max_query_len: int
) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
    eps = config.rms_norm_eps
    x = weights.embedding.rows(step.input_ids)
    angles = [rope_cos_sin(step.positions, table) for table in weights.ropes]
    for w, cache, spec in zip(weights.layers, kv_cache, layers, strict=True):
        cos_sin = angles[-1 if spec.window else 0]
        attended = attention(x, w.attention, cos_sin, cache, step, spec, eps, max_query_len)
        x = x + rms_norm(attended, w.attention_norm, eps)
        x = x + rms_norm(gated_mlp(x, w.mlp), w.mlp_norm, eps)
    return x


def head(weights: Weights, rows: Tensor, config: Olmo2Config) -> Tensor:
    """Logits ``[R, V]`` of rows ``[R, D]`` of what ``forward`` gave."""
    return weights.head.apply(rms_norm(rows, weights.final_norm, config.rms_norm_eps))


FAMILY = Family(
    "Olmo2Config",
    Olmo2Config,
    take,
    layers,
    forward,
    head,
    requires={"hidden_act": ("silu", "swish")},
    old_fields=("head_dim",),
)
