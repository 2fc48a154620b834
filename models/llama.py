"""Llama: Llama 2, 3, 3.1, 3.2 and the many checkpoints of the same architecture.

Touvron et al., 2023 (arXiv:2302.13971, 2307.09288); Llama 3: arXiv:2407.21783.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import KVCache, LayerCache, StepInput
from compiled_llm.models.layers import (
    AnyLinear,
    AttentionWeights,
    MlpWeights,
    attention,
    gated_mlp,
    rms_norm,
    rope_cos_sin,
    rope_table,
)
from compiled_llm.models.weights import Convert, Linear, PackedLinear, concat, embed, linear, map_linears

HF_CONFIG = "LlamaConfig"


class LayerWeights(NamedTuple):
    input_norm: Tensor  # [D]
    attention: AttentionWeights
    mlp_norm: Tensor  # [D]
    mlp: MlpWeights


LayerMaker = Callable[[ModelConfig, Callable[[str], Tensor]], LayerWeights]


class Weights(NamedTuple):
    embedding: Tensor | PackedLinear  # [V, D]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [D]
    lm_head: AnyLinear  # [V, D]; the embedding's own tensor when the two are tied
    rope: Tensor  # [max_position_embeddings, H] float32, from the config


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of one layer's tensors in a checkpoint, without the prefix ``model.layers.<i>.``."""
    d, inter, h = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * h, config.num_kv_heads * h
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
    projections = [
        ("self_attn.q_proj", q_size, d, config.attention_bias),
        ("self_attn.k_proj", kv_size, d, config.attention_bias),
        ("self_attn.v_proj", kv_size, d, config.attention_bias),
        ("self_attn.o_proj", d, q_size, config.attention_bias),
        ("mlp.gate_proj", inter, d, config.mlp_bias),
        ("mlp.up_proj", inter, d, config.mlp_bias),
        ("mlp.down_proj", d, inter, config.mlp_bias),
    ]
    for name, out_features, in_features, has_bias in projections:
        shapes[f"{name}.weight"] = (out_features, in_features)
        if has_bias:
            shapes[f"{name}.bias"] = (out_features,)
    return shapes


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a Hugging Face checkpoint of this config holds."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for i in range(config.num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer_shapes(config).items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def assemble_layer(config: ModelConfig, take: Callable[[str], Tensor]) -> LayerWeights:
    """One layer from its checkpoint tensors; ``take(name)`` hands each out once."""

    def take_linear(name: str, has_bias: bool) -> Linear:
        return Linear(take(f"{name}.weight"), take(f"{name}.bias") if has_bias else None)

    qkv = concat(*(take_linear(f"self_attn.{name}_proj", config.attention_bias) for name in "qkv"))
    gate_up = concat(*(take_linear(f"mlp.{name}_proj", config.mlp_bias) for name in ("gate", "up")))
    return LayerWeights(
        input_norm=take("input_layernorm.weight"),
        attention=AttentionWeights(qkv, take_linear("self_attn.o_proj", config.attention_bias)),
        mlp_norm=take("post_attention_layernorm.weight"),
        mlp=MlpWeights(gate_up, take_linear("mlp.down_proj", config.mlp_bias)),
    )


def assemble(
    config: ModelConfig, take: Callable[[str], Tensor], convert: Convert, layer: LayerMaker = assemble_layer
) -> Weights:
    """The weights from checkpoint tensors, each linear layer made into what ``convert`` gives.

    One layer is converted before the next is taken, so that memory holds one unconverted layer at a time. A family that
    differs in its layers alone passes its own ``layer``.
    """

    def take_layer(index: int) -> LayerWeights:
        return map_linears(layer(config, lambda name: take(f"model.layers.{index}.{name}")), convert)

    table = take("model.embed_tokens.weight")
    tied = config.tie_word_embeddings
    lm_head = convert(Linear(table if tied else take("lm_head.weight")))
    rope = rope_table(config, table.device)
    embedding: Tensor | PackedLinear = table
    if tied and isinstance(lm_head, PackedLinear) and config.hidden_size % 2 == 0:
        embedding = lm_head
    del table  # before the layers are taken: it may be the largest tensor of all
    return Weights(
        embedding=embedding,
        layers=tuple(take_layer(index) for index in range(config.num_layers)),
        final_norm=take("model.norm.weight"),
        lm_head=lm_head,
        rope=rope,
    )


class Stream(NamedTuple):
    """What runs from layer to layer.

    The last projection is left to be added by the next norm, which reads both: one pass over memory instead of two, and
    the same rounding, wherever one compiled graph ends and the next begins.
    """

    x: Tensor  # [T, D]
    pending: Tensor  # [T, D], to be added to x


def embed_step(weights: Weights, step: StepInput) -> tuple[Stream, Tensor]:
    """What goes into the first layer, and the cosines and sines for all of them. ``weights.layers`` are not read."""
    x = embed(step.input_ids, weights.embedding)
    return Stream(x, torch.zeros_like(x)), rope_cos_sin(step.positions, weights.rope)


def layer_step(
    stream: Stream,
    cos_sin: Tensor,
    layer: LayerWeights,
    cache: LayerCache,
    step: StepInput,
    config: ModelConfig,
    max_query_len: int,
) -> Stream:
    """One decoder layer; the step's keys and values go to ``cache``."""
    x = stream.x + stream.pending
    normed = rms_norm(x, layer.input_norm, config.rms_norm_eps)
    x = x + attention(normed, layer.attention, cos_sin, cache, step, config, max_query_len)
    return Stream(x, gated_mlp(rms_norm(x, layer.mlp_norm, config.rms_norm_eps), layer.mlp))


def head_step(weights: Weights, hidden: Tensor, indices: Tensor, config: ModelConfig) -> Tensor:
    """Logits ``[R, V]`` of the tokens at ``indices`` ``[R]`` of ``hidden``. ``weights.layers`` are not read."""
    rows = torch.index_select(hidden, 0, indices)
    return linear(rms_norm(rows, weights.final_norm, config.rms_norm_eps), weights.lm_head)


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: ModelConfig, max_query_len: int) -> Tensor:
    """What ``head_step`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
    stream, cos_sin = embed_step(weights, step)
    for layer, cache in zip(weights.layers, kv_cache, strict=True):
        stream = layer_step(stream, cos_sin, layer, cache, step, config, max_query_len)
    return stream.x + stream.pending
