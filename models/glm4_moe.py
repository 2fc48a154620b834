"""GLM-4.5 and 4.6: a mixture of experts beside one that all tokens share (GLM team, 2025, arXiv:2508.06471).

The router is DeepSeek-V3's (arXiv:2412.19437): sigmoids in float32, a bias for the choice alone, groups of experts.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models import llama, qwen3_moe
from compiled_llm.models.config import MtpConfig, check_at_least_one, num_mtp_layers
from compiled_llm.models.family import Family, one_partial_rope
from compiled_llm.models.layers.mlp import MlpWeights
from compiled_llm.models.layers.moe import (
    MoeWeights,
    Router,
    Shared,
    check_grouped_router,
    grouped_router,
)
from compiled_llm.models.layers.rope import head_arrangement
from compiled_llm.models.llama import LayerWeights, LlamaConfig, Weights
from compiled_llm.models.sharding import REPLICATED
from compiled_llm.models.weights import Source

MTP_FIELD = "num_nextn_predict_layers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(LlamaConfig, MtpConfig):
    use_qk_norm: bool = False
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    n_group: int
    topk_group: int
    first_k_dense_replace: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_grouped_router(self)
        check_at_least_one(self, "n_shared_experts", "moe_intermediate_size")

    @property
    def router(self) -> Router:
        return grouped_router(self)


def has_experts(config: Glm4MoeConfig, name: str) -> bool:
    """Whether the layer whose tensors' names begin with ``name`` has some."""
    return int(name.rsplit(".", 1)[1]) >= config.first_k_dense_replace


def take_mlp(
    config: Glm4MoeConfig, source: Source, name: str, *, has_choice_bias: bool = True
) -> MlpWeights | MoeWeights:
    """The experts of the layer whose tensors' names begin with ``name``, or its MLP."""
    if not has_experts(config, name):
        return source.mlp(f"{name}.mlp", config)
    num_experts = config.n_routed_experts
    routed = source.mixture(
        f"{name}.mlp.gate",
        f"{name}.mlp.experts",
        config,
        num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        router_dtype=torch.float32,
    )
    if has_choice_bias:
        choice_bias = f"{name}.mlp.gate.e_score_correction_bias"
        bias = source.tensor(choice_bias, (num_experts,), dtype=torch.float32, cut=REPLICATED)
        routed = routed._replace(choice_bias=bias)
    return beside_shared(config, source, name, routed)


def beside_shared(config: Glm4MoeConfig, source: Source, name: str, routed: MoeWeights) -> MoeWeights:
    """``routed`` and the MLP that all tokens use."""
    d, size = config.hidden_size, config.moe_intermediate_size * config.n_shared_experts
    shared = source.gated_mlp(f"{name}.mlp.shared_experts", d, size)
    return routed._replace(shared=Shared(shared, source.constant(1)))


def take_layer(config: Any, source: Source, name: str) -> LayerWeights:
    """The layer whose tensors' names begin with ``name``."""
    attention = source.attention(f"{name}.self_attn", config, bias=config.attention_bias, o_bias=False)
    if config.use_qk_norm:
        q_norm, k_norm = (_head_norm(config, source, f"{name}.self_attn.{x}_norm") for x in "qk")
        attention = attention._replace(q_norm=q_norm, k_norm=k_norm)
    return LayerWeights(
        input_norm=source.norm(f"{name}.input_layernorm", config.hidden_size),
        attention=attention,
        mlp_norm=source.norm(f"{name}.post_attention_layernorm", config.hidden_size),
        mlp=take_mlp(config, source, name),
    )


def _head_norm(config: Glm4MoeConfig, source: Source, name: str) -> Tensor:
    """Its elements are in the order of the heads'."""
    weight, arrange = source.norm(name, config.head_dim), head_arrangement(config.ropes[0], config.head_dim)
    return weight if arrange is None or weight.is_meta else arrange(weight)


def take(config: Glm4MoeConfig, source: Source) -> Weights:
    """The weights."""
    return llama.take(config, source, take_layer)


FAMILY = Family(
    "Glm4MoeConfig",
    Glm4MoeConfig,
    take,
    llama.layers,
    qwen3_moe.forward,
    llama.head,
    requires={**llama.FAMILY.requires, "norm_topk_prob": (True,)},
    read_ropes=one_partial_rope,
    old_fields=("head_dim", "partial_rotary_factor", MTP_FIELD),
    sizes=lambda config: num_mtp_layers(config, "num_mtp_layers", MTP_FIELD),
)
