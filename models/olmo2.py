"""OLMo 2 (OLMo team, 2025, arXiv:2501.00656).

Llama with its norms elsewhere: after each block in the place of before it, and over the queries of all heads together,
and the keys likewise.
"""

import dataclasses

from torch import Tensor

from compiled_llm.models import llama
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec
from compiled_llm.models.layers.decoder import LayerWeights, decoder_layers
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.llama import Weights
from compiled_llm.models.weights import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo2Config(ModelConfig):
    attention_bias: bool


def _norm(source: Source, name: str, size: int) -> Tensor:
    return source.norm(name, size, in_float32=True)


def _take_layer(config: Olmo2Config, source: Source, name: str) -> LayerWeights:
    d, h = config.hidden_size, config.head_dim
    return LayerWeights(
        input_norm=None,
        attention=source.attention(f"{name}.self_attn", config, bias=config.attention_bias)._replace(
            q_norm=_norm(source, f"{name}.self_attn.q_norm", config.num_heads * h),
            k_norm=_norm(source, f"{name}.self_attn.k_norm", config.num_kv_heads * h),
        ),
        attention_norm=_norm(source, f"{name}.post_attention_layernorm", d),
        mlp_norm=None,
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


def forward(
    weights: Weights, step: StepInput, kv_cache: KVCache, config: Olmo2Config, layers: Layers, max_query_len: int
) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
    return decoder_layers(
        weights.embedding.rows(step.input_ids), weights.layers, step, kv_cache, layers, max_query_len,
        eps=config.rms_norm_eps,
        angles=[rope_cos_sin(step.positions, table) for table in weights.ropes],
    )  # fmt: skip


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
