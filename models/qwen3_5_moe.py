"""Qwen3.5 with experts: Qwen3-Next's mixture of experts, which lie in one tensor, in Qwen3.5's layers."""

import dataclasses
import functools
from typing import Any

from compiled_llm.models import qwen3_5, qwen3_next
from compiled_llm.models.config_sizes import check_size
from compiled_llm.models.layers.decoder import LayerWeights
from compiled_llm.models.layers.moe import MoeWeights
from compiled_llm.models.linears.protocol import Part
from compiled_llm.models.llama import Weights
from compiled_llm.models.qwen3_next import GatedMoeWeights, Qwen3NextConfig
from compiled_llm.models.weights import Source


def take_mlp(config: Qwen3NextConfig, source: Source, name: str) -> GatedMoeWeights:
    """The experts of the layer whose tensors' names begin with ``name``."""
    d, inner, name = config.hidden_size, config.moe_intermediate_size, f"{name}.mlp"
    stacked = functools.partial(
        source.stacked_experts, num_experts=config.num_experts, top_k=config.num_experts_per_tok, transposed=False,
        bias=False,
    )  # fmt: skip
    routed = MoeWeights(
        router=source.linear(Part(f"{name}.gate", config.num_experts, d)),
        gate_up=stacked(f"{name}.experts.gate_up_proj", out_features=2 * inner, in_features=d),
        down=stacked(f"{name}.experts.down_proj", out_features=d, in_features=inner),
        used=source.used_experts(),
    )
    return GatedMoeWeights(routed, qwen3_next.take_shared(config, source, name))


def take_layer(config: Qwen3NextConfig, source: Source, name: str) -> LayerWeights:
    """The layer whose tensors' names begin with ``name``."""
    return qwen3_5.take_layer(config, source, name, take_mlp)


def take(config: Qwen3NextConfig, source: Source) -> Weights:
    """The weights."""
    return qwen3_5.take(config, source, take_layer)


def sizes(config: Any) -> dict[str, Any]:
    """No layer has a plain MLP: the size is that of an expert."""
    check_size("intermediate_size", config.moe_intermediate_size, "moe_intermediate_size")
    return {"intermediate_size": config.moe_intermediate_size}


FAMILY = dataclasses.replace(qwen3_next.FAMILY, hf_config="Qwen3_5MoeTextConfig", take=take, sizes=sizes)
