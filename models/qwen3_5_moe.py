"""Qwen3.5 with experts: Qwen3-Next's mixture of experts in Qwen3.5's layers."""

import dataclasses
from typing import Any

from compiled_llm.models import qwen3_5, qwen3_next
from compiled_llm.models.config_values import check_size
from compiled_llm.models.layers.moe import MoeWeights
from compiled_llm.models.llama import LayerWeights, Weights
from compiled_llm.models.qwen3_next import Qwen3NextConfig
from compiled_llm.models.weights import Source


def take_mlp(config: Qwen3NextConfig, source: Source, name: str) -> MoeWeights:
    """The experts of the layer whose tensors' names begin with ``name``; no layer has a plain MLP."""
    name = f"{name}.mlp"
    routed = source.mixture(
        f"{name}.gate", f"{name}.experts", config, config.num_experts, config.num_experts_per_tok,
        config.moe_intermediate_size,
    )  # fmt: skip
    return routed._replace(shared=qwen3_next.take_shared(config, source, name))


def take_layer(config: Qwen3NextConfig, source: Source, name: str) -> LayerWeights:
    """The layer whose tensors' names begin with ``name``."""
    return qwen3_5.take_layer(config, source, name, take_mlp)


def take(config: Qwen3NextConfig, source: Source) -> Weights:
    """The weights."""
    return qwen3_5.take(config, source, take_layer)


def sizes(config: Any) -> dict[str, Any]:
    """No layer has a plain MLP: the size is that of an expert."""
    check_size("intermediate_size", config.moe_intermediate_size, "moe_intermediate_size")
    return {"intermediate_size": config.moe_intermediate_size, **qwen3_5.FAMILY.sizes(config)}


FAMILY = dataclasses.replace(
    qwen3_next.FAMILY,
    hf_config="Qwen3_5MoeTextConfig",
    take=take,
    old_fields=qwen3_5.FAMILY.old_fields,
    sizes=sizes,
)
