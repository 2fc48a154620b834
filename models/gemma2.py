"""Gemma 2 (Gemma team, 2024, arXiv:2408.00118).

Windows in some layers, soft caps of scores and logits, norms by ``1 + w`` before and after each block, GeGLU.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.models import llama
from compiled_llm.models.config import WindowedConfig, check_positive
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, AttentionWeights, attention, windowed_layers
from compiled_llm.models.layers.mlp import MlpWeights, mlp
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.llama import Weights
from compiled_llm.models.weights import Source
from compiled_llm.ops import soft_cap


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(WindowedConfig):
    attention_bias: bool
    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        caps = [x for x in ("attn_logit_softcapping", "final_logit_softcapping") if getattr(self, x) is not None]
        check_positive(self, "query_pre_attn_scalar", *caps)


class LayerWeights(NamedTuple):
    """Norms, ``[D]`` each, before each block and after it."""

    input_norm: Tensor  # of what attention gets
    attention: AttentionWeights
    attention_norm: Tensor  # of what attention gave
    mlp_norm: Tensor  # of what the MLP gets
    mlp: MlpWeights
    output_norm: Tensor  # of what the MLP gave


def take_layer(config: Gemma2Config, source: Source, name: str) -> LayerWeights:
    """The layer whose tensors' names begin with ``name``. All norms are in float32."""
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
    return llama.take(config, source, take_layer, Source.norm_plus_one)


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


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: Gemma2Config, layers: Layers) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
    embeddings = weights.embedding.rows(step.input_ids)
    x = Residual(embeddings * rounded(config.hidden_size**0.5, embeddings.dtype), config.rms_norm_eps)
    angles = [rope_cos_sin(step.positions, table) for table in weights.ropes]  # of two, the last is for windows
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        cos_sin = angles[-1 if spec.window else 0]
        x += attention(x.normed(w.input_norm), w.attention, cos_sin, spec, cache, step).normed(w.attention_norm)
        x += mlp(x.normed(w.mlp_norm), w.mlp, "gelu_tanh").normed(w.output_norm)
    return x.tensor()


def head(weights: Weights, rows: Tensor, config: Gemma2Config) -> Tensor:
    """Logits ``[R, V]`` of rows ``[R, D]`` of what ``forward`` gave."""
    logits, cap = llama.head(weights, rows, config), config.final_logit_softcapping
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
