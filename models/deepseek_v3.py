"""DeepSeek-V3 and R1: latent attention, and experts beside one that all tokens share (arXiv:2412.19437)."""

import dataclasses
from typing import Any

from torch import Tensor

from compiled_llm.models import glm4_moe, llama
from compiled_llm.models.config_values import check_size
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.glm4_moe import Glm4MoeConfig
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.latent_attention import (
    LatentSizes,
    latent_attention,
    latent_spec,
    take_latent_attention,
)
from compiled_llm.models.layers.mlp import mlp
from compiled_llm.models.layers.moe import MoeWeights, experts
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.linears.heads import HeadRows
from compiled_llm.models.llama import LayerWeights, TakeMlp, Weights
from compiled_llm.models.rope_config import Rope, read_latent_rope
from compiled_llm.models.weights import Source
from compiled_llm.ops import table_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekConfig(Glm4MoeConfig):
    """``head_dim`` is that of the part of a head that is turned."""

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        super().__post_init__()
        LatentSizes.of(self).check()
        if self.attention_bias and self.q_lora_rank is None:
            raise ValueError("config.json: attention_bias must be false where q_lora_rank is null, given true")


def take_layer(
    config: DeepseekConfig, source: Source, name: str, take_mlp: TakeMlp = glm4_moe.take_mlp
) -> LayerWeights:
    """The layer whose tensors' names begin with ``name``. A family with other experts passes its own ``take_mlp``."""
    return LayerWeights(
        input_norm=source.norm(f"{name}.input_layernorm", config.hidden_size),
        attention=take_latent_attention(
            config, LatentSizes.of(config), source, f"{name}.self_attn", config.attention_bias
        ),
        mlp_norm=source.norm(f"{name}.post_attention_layernorm", config.hidden_size),
        mlp=take_mlp(config, source, name),
    )


def take(config: DeepseekConfig, source: Source) -> Weights:
    """The weights."""
    return llama.take(config, source, take_layer)


def layers(config: DeepseekConfig) -> Layers:
    """All are alike."""
    return (latent_spec(config, LatentSizes.of(config)),) * config.num_layers


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: Any, layers: Layers) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
    x = Residual(weights.embedding.rows(step.input_ids), config.rms_norm_eps)
    return through_layers(x, weights, step, kv_cache, config, layers).tensor()


def through_layers(x: Residual, weights: Any, step: StepInput, kv_cache: KVCache, config: Any, layers: Any) -> Residual:
    """What all layers make of ``x``; of ``weights``, ``layers`` and ``ropes`` are read."""
    heads = HeadRows.of(step.positions, config.num_heads)
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    query_scale = table_rows(weights.ropes[1], step.positions) if len(weights.ropes) > 1 else None  # Mistral 4
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        normed = x.normed(w.input_norm)
        x += latent_attention(normed, w.attention, cos_sin, spec, cache, step, heads, query_scale)
        normed = x.normed(w.mlp_norm)
        x += experts(normed, w.mlp, config.router, step) if isinstance(w.mlp, MoeWeights) else mlp(normed, w.mlp)
    return x


def read_ropes(config: Any) -> tuple[Rope, ...]:
    """One for all layers."""
    longest, interleaved = config.max_position_embeddings, config.rope_interleave
    return (read_latent_rope(config.rope_parameters, longest, interleaved=interleaved),)


DERIVED = ("head_dim", "qk_head_dim")
"""Fields that transformers writes, and that follow from others."""


def check(config: dict[str, Any]) -> None:
    """``ValueError`` for sizes of heads, and for fields of ``DERIVED`` that do not follow from them."""
    for name in ("qk_nope_head_dim", "qk_rope_head_dim"):
        check_size("head_dim", config[name], name)
    turned = config["qk_rope_head_dim"]
    check_derived(config, head_dim=turned, qk_head_dim=config["qk_nope_head_dim"] + turned)


def check_derived(config: dict[str, Any], **wanted: int) -> None:
    """``ValueError`` for a field of ``wanted`` that is given and has another value."""
    for name, value in wanted.items():
        if config.get(name) not in (None, value):
            raise ValueError(
                f"config.json: {name} must be {value}, by qk_nope_head_dim and qk_rope_head_dim, given "
                f"{config[name]!r:.100}"
            )


FAMILY = Family(
    "DeepseekV3Config",
    DeepseekConfig,
    take,
    layers,
    forward,
    llama.head,
    requires={**llama.FAMILY.requires, "norm_topk_prob": (True,), "rope_interleave": (True, False)},
    read_ropes=read_ropes,
    check=check,
    old_fields=(*DERIVED, glm4_moe.MTP_FIELD),
    sizes=glm4_moe.FAMILY.sizes,
)
