"""OLMo 2 (OLMo team, 2025, arXiv:2501.00656).

Llama with its norms elsewhere: after each block in the place of before it, over the queries of all heads together, and
over the keys of all heads together.
"""

import dataclasses
from typing import NamedTuple

from torch import Tensor

from compiled_llm.models import llama
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, AttentionWeights, attention
from compiled_llm.models.layers.mlp import MlpWeights, mlp
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.llama import Weights
from compiled_llm.models.weights import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo2Config(ModelConfig):
    attention_bias: bool


class LayerWeights(NamedTuple):
    """Norms, ``[D]`` float32 each, after each block."""

    attention: AttentionWeights
    attention_norm: Tensor
    mlp: MlpWeights
    output_norm: Tensor


def _norm(source: Source, name: str, size: int) -> Tensor:
    return source.norm(name, size, in_float32=True)


def _take_layer(config: Olmo2Config, source: Source, name: str) -> LayerWeights:
    d = config.hidden_size
    attention = source.attention(f"{name}.self_attn", config, bias=config.attention_bias)
    return LayerWeights(
        attention=attention._replace(**source.norms_of_all_heads(f"{name}.self_attn", config)),
        attention_norm=_norm(source, f"{name}.post_attention_layernorm", d),
        mlp=source.mlp(f"{name}.mlp", config),
        output_norm=_norm(source, f"{name}.post_feedforward_layernorm", d),
    )


def take(config: Olmo2Config, source: Source) -> Weights:
    """The weights. All norms are in float32."""
    return llama.take(config, source, _take_layer, _norm)


def layers(config: Olmo2Config) -> Layers:
    """All are alike."""
    spec = AttentionSpec(config.num_heads, config.num_kv_heads, config.head_dim, scale=config.head_dim**-0.5)
    return (spec,) * config.num_layers


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: Olmo2Config, layers: Layers) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
    x = Residual(weights.embedding.rows(step.input_ids), config.rms_norm_eps)
    angles = [rope_cos_sin(step.positions, table) for table in weights.ropes]  # of two, the last is for windows
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        cos_sin = angles[-1 if spec.window else 0]
        x += attention(x.normed(None), w.attention, cos_sin, spec, cache, step).normed(w.attention_norm)
        x += mlp(x.normed(None), w.mlp).normed(w.output_norm)
    return x.tensor()


FAMILY = Family(
    "Olmo2Config",
    Olmo2Config,
    take,
    layers,
    forward,
    llama.head,
    requires={"hidden_act": ("silu", "swish")},
    old_fields=("head_dim",),
)
