"""Llama: Llama 2, 3, 3.1, 3.2 and the many checkpoints of the same architecture.

Touvron et al., 2023 (arXiv:2302.13971, 2307.09288); Llama 3: arXiv:2407.21783.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, attention
from compiled_llm.models.layers.mlp import MlpWeights, mlp
from compiled_llm.models.layers.residual import Norm, Residual
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.models.weights import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    attention_bias: bool = False
    mlp_bias: bool = False


class LayerWeights(NamedTuple):
    input_norm: Norm  # [D], of what attention gets
    attention: Any  # AttentionWeights, or those of what a layer has in the place of attention
    mlp_norm: Norm  # [D], of what the MLP gets
    mlp: Any  # MlpWeights; in other families PlainMlpWeights, or MoeWeights


class Weights(NamedTuple):
    embedding: Linear  # [V, D]
    layers: tuple[Any, ...]  # LayerWeights, or a family's own
    final_norm: Norm  # [D]
    head: Linear  # [V, D]
    ropes: tuple[Tensor, ...]  # [max_position_embeddings, H] float32 each; a family's own may be more


TakeMlp = Callable[[Any, Source, str], Any]


def take_mlp(config: LlamaConfig, source: Source, name: str) -> MlpWeights:
    """The MLP of the layer whose tensors' names begin with ``name``."""
    return source.mlp(f"{name}.mlp", config, bias=config.mlp_bias)


def take_layer(config: LlamaConfig, source: Source, name: str, take_mlp: TakeMlp = take_mlp) -> LayerWeights:
    """The layer whose tensors' names begin with ``name``. A family with experts passes its own ``take_mlp``."""
    return LayerWeights(
        input_norm=source.norm(f"{name}.input_layernorm", config.hidden_size),
        attention=source.attention(f"{name}.self_attn", config, bias=config.attention_bias),
        mlp_norm=source.norm(f"{name}.post_attention_layernorm", config.hidden_size),
        mlp=take_mlp(config, source, name),
    )


def take(
    config: Any,
    source: Source,
    take_layer: Callable[[Any, Source, str], Any] = take_layer,
    take_norm: Callable[[Source, str, int], Norm] = Source.norm,
) -> Weights:
    """The weights. A family with other layers passes its own ``take_layer``, or what takes the final norm."""
    embedding, head = source.embedding_and_head(
        "model.embed_tokens", "lm_head", config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    return Weights(
        embedding=embedding,
        layers=tuple(take_layer(config, source, f"model.layers.{i}") for i in range(config.num_layers)),
        final_norm=take_norm(source, "model.norm", config.hidden_size),
        head=head,
        ropes=tuple(source.rope(rope, config.head_dim, config.max_position_embeddings) for rope in config.ropes),
    )


def layers(config: LlamaConfig) -> Layers:
    """All are alike."""
    spec = AttentionSpec(config.num_heads, config.num_kv_heads, config.head_dim, scale=config.head_dim**-0.5)
    return (spec,) * config.num_layers


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: ModelConfig, layers: Layers) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
    x = Residual(weights.embedding.rows(step.input_ids), config.rms_norm_eps)
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        x += attention(x.normed(w.input_norm), w.attention, cos_sin, spec, cache, step)
        x += mlp(x.normed(w.mlp_norm), w.mlp)
    return x.tensor()


def head(weights: Weights, rows: Tensor, config: ModelConfig) -> Tensor:
    """Logits ``[R, V]`` of rows ``[R, D]`` of what ``forward`` gave."""
    return Residual(rows, config.rms_norm_eps).normed(weights.final_norm).linear(weights.head)


FAMILY = Family("LlamaConfig", LlamaConfig, take, layers, forward, head, requires={"hidden_act": ("silu", "swish")})
