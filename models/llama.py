"""Llama: Llama 2, 3, 3.1, 3.2 and the many checkpoints of the same architecture.

Touvron et al., 2023 (arXiv:2302.13971, 2307.09288); Llama 3: arXiv:2407.21783.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, AttentionWeights, attended
from compiled_llm.models.layers.mlp import MlpWeights, gated_block
from compiled_llm.models.layers.norm import add_rms_norm
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.linears.fused import added_linear, normed_linear
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.models.weights import Source
from compiled_llm.ops import rms_norm


@dataclasses.dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    attention_bias: bool = False
    mlp_bias: bool = False


class LayerWeights(NamedTuple):
    input_norm: Tensor  # [D]
    attention: AttentionWeights
    mlp_norm: Tensor  # [D]
    mlp: Any  # MlpWeights; in families with experts also MoeWeights


class Weights(NamedTuple):
    embedding: Linear  # [V, D]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [D]
    head: Linear  # [V, D]
    ropes: tuple[
        Tensor, ...
    ]  # [max_position_embeddings, H] float32; a second one [max_position_embeddings, 1] scales queries


TakeMlp = Callable[[Any, Source, str], Any]
Experts = Callable[[Tensor, Any, StepInput, Any], Tensor]


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
    config: LlamaConfig,
    source: Source,
    take_layer: Callable[[LlamaConfig, Source, str], LayerWeights] = take_layer,
) -> Weights:
    """The weights. A family that differs in its layers' tensors alone passes its own ``take_layer``."""
    embedding, head = source.embedding_and_head(
        "model.embed_tokens", "lm_head", config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    return Weights(
        embedding=embedding,
        layers=tuple(take_layer(config, source, f"model.layers.{i}") for i in range(config.num_layers)),
        final_norm=source.norm("model.norm", config.hidden_size),
        head=head,
        ropes=(source.rope(config.ropes[0], config.head_dim, config.max_position_embeddings),),
    )


def layers(config: LlamaConfig) -> Layers:
    """All are alike."""
    spec = AttentionSpec(config.num_heads, config.num_kv_heads, config.head_dim, scale=config.head_dim**-0.5)
    return (spec,) * config.num_layers


def forward(
    weights: Weights,
    step: StepInput,
    kv_cache: KVCache,
    config: LlamaConfig,
    layers: Layers,
    max_query_len: int,
    experts: Experts | None = None,
) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``.

    A family with experts passes what computes a layer that has some.
    """
    eps = config.rms_norm_eps
    x = weights.embedding.rows(step.input_ids)
    delta: Tensor | None = None  # what is still to be added to x
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    query_scale = F.embedding(step.positions, weights.ropes[1]) if len(weights.ropes) > 1 else None
    for w, cache, spec in zip(weights.layers, kv_cache, layers, strict=True):
        x, qkv = normed_linear(x, delta, w.input_norm, eps, w.attention.qkv)
        out = attended(qkv, w.attention, cos_sin, cache, step, spec, eps, max_query_len, query_scale)
        x, delta = added_linear(x, w.attention.o, out)
        if isinstance(w.mlp, MlpWeights):
            x, delta = gated_block(x, delta, w.mlp_norm, eps, w.mlp)
        else:
            assert experts is not None
            x, normed = add_rms_norm(x, delta, w.mlp_norm, eps)
            delta = experts(normed, w.mlp, step, config)
    return x if delta is None else x + delta


def head(weights: Weights, rows: Tensor, config: LlamaConfig) -> Tensor:
    """Logits ``[R, V]`` of rows ``[R, D]`` of what ``forward`` gave."""
    return weights.head.apply(rms_norm(rows, weights.final_norm, config.rms_norm_eps))


FAMILY = Family("LlamaConfig", LlamaConfig, take, layers, forward, head, requires={"hidden_act": ("silu", "swish")})
