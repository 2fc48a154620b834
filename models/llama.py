"""Llama: Llama 2, 3, 3.1, 3.2 and the many checkpoints of the same architecture.

Touvron et al., 2023 (arXiv:2302.13971, 2307.09288); Llama 3: arXiv:2407.21783.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.family import Family, Layers, MixedLayers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, attended
from compiled_llm.models.layers.decoder import Attention, LayerWeights, decoder_layers
from compiled_llm.models.layers.mlp import MlpWeights
from compiled_llm.models.layers.norm import Norm
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.linears.fused import normed_linear
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.models.weights import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    attention_bias: bool = False
    mlp_bias: bool = False


class Weights(NamedTuple):
    embedding: Linear  # [V, D]
    layers: tuple[LayerWeights, ...]
    final_norm: Norm  # [D]
    head: Linear  # [V, D]
    # [max_position_embeddings, H] float32 each. Of two, the last is that of layers with a window, or of Ministral 3
    # [max_position_embeddings, 1], which scales queries.
    ropes: tuple[Tensor, ...]


TakeMlp = Callable[[Any, Source, str], Any]
# (x, delta, norm, eps, weights, step, config): as of ``experts_block``
Experts = Callable[[Tensor, Tensor | None, Any, float, Any, StepInput, Any], tuple[Tensor, Tensor | None]]


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
    take_layer: Callable[[Any, Source, str], LayerWeights] = take_layer,
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


def forward(
    weights: Weights,
    step: StepInput,
    kv_cache: KVCache,
    config: Any,
    layers: MixedLayers,
    max_query_len: int,
    experts: Experts | None = None,
    attention: Attention = attended,
) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``.

    A family with experts passes what computes a layer that has some, and one with another attention that.
    """

    def mixed(x: Tensor, delta: Tensor | None, norm: Any, eps: float, mlp: Any) -> tuple[Tensor, Tensor | None]:
        assert experts is not None
        return experts(x, delta, norm, eps, mlp, step, config)

    return decoder_layers(
        weights.embedding.rows(step.input_ids), weights.layers, step, kv_cache, layers, max_query_len,
        eps=config.rms_norm_eps,
        angles=(rope_cos_sin(step.positions, weights.ropes[0]),),
        query_scale=F.embedding(step.positions, weights.ropes[1]) if len(weights.ropes) > 1 else None,
        experts=None if experts is None else mixed,
        attention=attention,
    )  # fmt: skip


def head(weights: Weights, rows: Tensor, config: ModelConfig) -> Tensor:
    """Logits ``[R, V]`` of rows ``[R, D]`` of what ``forward`` gave."""
    return normed_linear(rows, None, weights.final_norm, config.rms_norm_eps, weights.head)[1]


FAMILY = Family("LlamaConfig", LlamaConfig, take, layers, forward, head, requires={"hidden_act": ("silu", "swish")})
