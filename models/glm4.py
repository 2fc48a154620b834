"""GLM-4 as published from April 2025 on: GLM with a norm after each block, too."""

from typing import NamedTuple

from torch import Tensor

from compiled_llm.models import glm, llama
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionWeights, attention
from compiled_llm.models.layers.mlp import MlpWeights, gated_mlp
from compiled_llm.models.layers.norm import add_rms_norm
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.models.llama import LlamaConfig
from compiled_llm.models.weights import Source
from compiled_llm.ops import rms_norm


class LayerWeights(NamedTuple):
    input_norm: Tensor  # [D]
    attention: AttentionWeights
    attention_norm: Tensor  # [D], of what attention gave
    mlp_norm: Tensor  # [D]
    mlp: MlpWeights
    output_norm: Tensor  # [D], of what the MLP gave


class Weights(NamedTuple):
    embedding: Linear  # [V, D]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [D]
    head: Linear  # [V, D]
    ropes: tuple[Tensor]  # [max_position_embeddings, H] float32


def _take_layer(config: LlamaConfig, source: Source, name: str) -> LayerWeights:
    d = config.hidden_size
    return LayerWeights(
        input_norm=source.norm(f"{name}.input_layernorm", d),
        attention=glm.take_attention(source, f"{name}.self_attn", config),
        attention_norm=source.norm(f"{name}.post_self_attn_layernorm", d),
        mlp_norm=source.norm(f"{name}.post_attention_layernorm", d),
        mlp=glm.take_mlp(source, f"{name}.mlp", config),
        output_norm=source.norm(f"{name}.post_mlp_layernorm", d),
    )


def take(config: LlamaConfig, source: Source) -> Weights:
    """The weights."""
    embedding, head = source.embedding_and_head(
        "model.embed_tokens", "lm_head", config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    return Weights(
        embedding=embedding,
        layers=tuple(_take_layer(config, source, f"model.layers.{i}") for i in range(config.num_layers)),
        final_norm=source.norm("model.norm", config.hidden_size),
        head=head,
        ropes=(source.rope(config.ropes[0], config.head_dim, config.max_position_embeddings),),
    )


def forward(
    weights: Weights, step: StepInput, kv_cache: KVCache, config: LlamaConfig, layers: Layers, max_query_len: int
) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
    eps = config.rms_norm_eps
    x = weights.embedding.rows(step.input_ids)
    delta: Tensor | None = None
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    for w, cache, spec in zip(weights.layers, kv_cache, layers, strict=True):
        x, normed = add_rms_norm(x, delta, w.input_norm, eps)
        attended = attention(normed, w.attention, cos_sin, cache, step, spec, eps, max_query_len)
        x, normed = add_rms_norm(x, rms_norm(attended, w.attention_norm, eps), w.mlp_norm, eps)
        delta = rms_norm(gated_mlp(normed, w.mlp), w.output_norm, eps)
    assert delta is not None
    return x + delta


def head(weights: Weights, rows: Tensor, config: LlamaConfig) -> Tensor:
    """Logits ``[R, V]`` of rows ``[R, D]`` of what ``forward`` gave."""
    return weights.head.apply(rms_norm(rows, weights.final_norm, config.rms_norm_eps))


FAMILY = Family(
    "Glm4Config",
    LlamaConfig,
    take,
    llama.layers,
    forward,
    head,
    requires=glm.FAMILY.requires,
    read_ropes=glm.read_ropes,
    old_fields=glm.FAMILY.old_fields,
)
