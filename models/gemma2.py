"""Gemma 2 (Gemma team, 2024, arXiv:2408.00118).

Windows in some layers, soft caps of scores and logits, norms by ``1 + w`` before and after each block, GeGLU.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.config import WindowedConfig
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, AttentionWeights, attention, windowed_layers
from compiled_llm.models.layers.mlp import MlpWeights, gated_mlp
from compiled_llm.models.layers.norm import add_rms_norm
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.models.weights import Source
from compiled_llm.ops import rms_norm, soft_cap


@dataclasses.dataclass(frozen=True)
class Gemma2Config(WindowedConfig):
    attention_bias: bool
    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
            value = getattr(self, name)
            if value is None and name != "query_pre_attn_scalar":
                continue
            if not 0 < value < math.inf:
                raise ValueError(f"config.json: {name} must be a positive number, given {value}")


class LayerWeights(NamedTuple):
    input_norm: Tensor  # [D] float32, as all norms here
    attention: AttentionWeights
    attention_norm: Tensor  # [D], of what attention gave
    mlp_norm: Tensor  # [D]
    mlp: MlpWeights
    output_norm: Tensor  # [D], of what the MLP gave


class Weights(NamedTuple):
    embedding: Linear  # [V, D]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [D] float32
    head: Linear  # [V, D]
    ropes: tuple[Tensor, ...]  # [max_position_embeddings, H] float32; where there are two, the last is the windows'


def take_layer(config: Gemma2Config, source: Source, name: str) -> LayerWeights:
    """The layer whose tensors' names begin with ``name``."""
    d = config.hidden_size
    return LayerWeights(
        input_norm=source.norm_plus_one(f"{name}.input_layernorm", d),
        attention=source.attention(f"{name}.self_attn", config, bias=config.attention_bias),
        attention_norm=source.norm_plus_one(f"{name}.post_attention_layernorm", d),
        mlp_norm=source.norm_plus_one(f"{name}.pre_feedforward_layernorm", d),
        mlp=source.mlp(f"{name}.mlp", config),
        output_norm=source.norm_plus_one(f"{name}.post_feedforward_layernorm", d),
    )


def take(
    config: Gemma2Config,
    source: Source,
    take_layer: Callable[[Gemma2Config, Source, str], LayerWeights] = take_layer,
) -> Weights:
    """The weights. A family that differs in its layers' tensors alone passes its own ``take_layer``."""
    embedding, head = source.embedding_and_head(
        "model.embed_tokens", "lm_head", config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    return Weights(
        embedding=embedding,
        layers=tuple(take_layer(config, source, f"model.layers.{i}") for i in range(config.num_layers)),
        final_norm=source.norm_plus_one("model.norm", config.hidden_size),
        head=head,
        ropes=tuple(source.rope(rope, config.head_dim, config.max_position_embeddings) for rope in config.ropes),
    )


def layers(config: Gemma2Config) -> Layers:
    """Those of ``layer_types``: with the window and without."""
    full = AttentionSpec(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        scale=config.query_pre_attn_scalar**-0.5,
        soft_cap=config.attn_logit_softcapping or 0.0,
    )
    return windowed_layers(config, full)


def rounded(value: float, dtype: torch.dtype) -> float:
    """The positive ``value`` in the precision of ``dtype``, as a number: a compiler may skip the rounding."""
    unit = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(value))
    return round(value / unit) * unit


def forward(
    weights: Weights, step: StepInput, kv_cache: KVCache, config: Gemma2Config, layers: Layers, max_query_len: int
) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
    eps = config.rms_norm_eps
    x = weights.embedding.rows(step.input_ids)
    x = x * rounded(config.hidden_size**0.5, x.dtype)
    delta: Tensor | None = None
    angles = [rope_cos_sin(step.positions, table) for table in weights.ropes]
    for w, cache, spec in zip(weights.layers, kv_cache, layers, strict=True):
        cos_sin = angles[-1 if spec.window else 0]
        x, normed = add_rms_norm(x, delta, w.input_norm, eps)
        attended = attention(normed, w.attention, cos_sin, cache, step, spec, eps, max_query_len)
        x, normed = add_rms_norm(x, rms_norm(attended, w.attention_norm, eps), w.mlp_norm, eps)
        delta = rms_norm(gated_mlp(normed, w.mlp, "gelu_tanh"), w.output_norm, eps)
    assert delta is not None
    return x + delta


def head(weights: Weights, rows: Tensor, config: Gemma2Config) -> Tensor:
    """Logits ``[R, V]`` of rows ``[R, D]`` of what ``forward`` gave."""
    logits = weights.head.apply(rms_norm(rows, weights.final_norm, config.rms_norm_eps))
    cap = config.final_logit_softcapping
    return logits if cap is None else soft_cap(logits, cap)


FAMILY = Family(
    "Gemma2Config",
    Gemma2Config,
    take,
    layers,
    forward,
    head,
    requires={"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (None, False)},
)
