"""LFM2 with a mixture of experts in the place of most MLPs (LFM2-8B-A1B, LFM2-24B-A2B; arXiv:2511.23404)."""

import dataclasses

import torch
from torch import Tensor

from compiled_llm.models import lfm2, llama
from compiled_llm.models.config import check_at_least_one, check_positive
from compiled_llm.models.family import Family, MixedLayers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import attention
from compiled_llm.models.layers.mlp import MlpWeights, mlp
from compiled_llm.models.layers.moe import MoeWeights, Router, check_router, experts
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.layers.short_convolution import gated_convolution
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.lfm2 import Lfm2Config
from compiled_llm.models.llama import LayerWeights, Weights
from compiled_llm.models.sharding import REPLICATED
from compiled_llm.models.weights import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(Lfm2Config):
    num_dense_layers: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    use_expert_bias: bool
    routed_scaling_factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_router(self, "num_experts")
        check_at_least_one(self, "moe_intermediate_size")
        check_positive(self, "routed_scaling_factor")

    @property
    def router(self) -> Router:
        return Router(self.num_experts_per_tok, "sigmoid", self.routed_scaling_factor)


def take_mlp(config: Lfm2MoeConfig, source: Source, name: str) -> MlpWeights | MoeWeights:
    """The experts of the layer whose tensors' names begin with ``name``, or its MLP."""
    if int(name.rsplit(".", 1)[1]) < config.num_dense_layers:
        return lfm2.take_mlp(config, source, name)
    name, experts = f"{name}.feed_forward", config.num_experts
    routed = source.mixture(
        f"{name}.gate", f"{name}.experts", config, experts, config.num_experts_per_tok, config.moe_intermediate_size,
        names=("w1", "w3", "w2"),
    )  # fmt: skip
    if not config.use_expert_bias:
        return routed
    bias = source.tensor(f"{name}.expert_bias", (experts,), dtype=torch.float32, cut=REPLICATED)
    return routed._replace(choice_bias=bias)


def take_layer(config: Lfm2MoeConfig, source: Source, name: str) -> LayerWeights:
    """The layer whose tensors' names begin with ``name``."""
    return lfm2.take_layer(config, source, name, take_mlp)


def take(config: Lfm2MoeConfig, source: Source) -> Weights:
    """The weights."""
    return lfm2.take(config, source, take_layer)


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: Lfm2MoeConfig, layers: MixedLayers) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys, values and states go to ``kv_cache``."""
    x = Residual(weights.embedding.rows(step.input_ids), config.rms_norm_eps)
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        normed = x.normed(w.input_norm)
        if isinstance(spec, StateSpec):
            x += gated_convolution(normed, w.attention, spec, cache, step)
        else:
            x += attention(normed, w.attention, cos_sin, spec, cache, step)
        normed = x.normed(w.mlp_norm)
        x += experts(normed, w.mlp, config.router, step) if isinstance(w.mlp, MoeWeights) else mlp(normed, w.mlp)
    return x.tensor()


FAMILY = Family(
    "Lfm2MoeConfig",
    Lfm2MoeConfig,
    take,
    lfm2.layers,
    forward,
    llama.head,
    requires={"norm_topk_prob": (True,)},
    old_fields=("norm_eps", "head_dim", "tie_embedding"),
    sizes=lambda config: {"rms_norm_eps": config.norm_eps},
)
