"""Qwen3-MoE: Qwen3 with a mixture of experts in the place of some or all MLPs (Yang et al., 2025, arXiv:2505.09388)."""

import dataclasses
import functools
from typing import Any

from torch import Tensor

from compiled_llm.models import llama, qwen3
from compiled_llm.models.config import check_at_least_one
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import attention
from compiled_llm.models.layers.mlp import MlpWeights, mlp
from compiled_llm.models.layers.moe import MoeWeights, Router, check_router, experts
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.llama import LlamaConfig, Weights
from compiled_llm.models.weights import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(LlamaConfig):
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_router(self, "num_experts")
        check_at_least_one(self, "moe_intermediate_size", "decoder_sparse_step")

    def has_experts(self, layer: int) -> bool:
        """Whether layer number ``layer`` has experts, and no plain MLP."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    @property
    def router(self) -> Router:
        return Router(self.num_experts_per_tok, "softmax_of_chosen" if self.norm_topk_prob else "softmax")


def take_mlp(config: Qwen3MoeConfig, source: Source, name: str) -> MlpWeights | MoeWeights:
    """The experts of the layer whose tensors' names begin with ``name``, or its MLP."""
    if not config.has_experts(int(name.rsplit(".", 1)[1])):
        return llama.take_mlp(config, source, name)
    return source.mixture(
        f"{name}.mlp.gate",
        f"{name}.mlp.experts",
        config,
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
    )


def take(config: Qwen3MoeConfig, source: Source) -> Weights:
    """The weights: Qwen3's, with experts in the layers that have some."""
    return llama.take(config, source, functools.partial(qwen3.take_layer, take_mlp=take_mlp))


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: Any, layers: Layers) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
    x = Residual(weights.embedding.rows(step.input_ids), config.rms_norm_eps)
    return through_layers(x, weights, step, kv_cache, config, layers).tensor()


def through_layers(x: Residual, weights: Any, step: StepInput, kv_cache: KVCache, config: Any, layers: Any) -> Residual:
    """What all layers make of ``x``; of ``weights``, ``layers`` and ``ropes`` are read."""
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        x += attention(x.normed(w.input_norm), w.attention, cos_sin, spec, cache, step)
        normed = x.normed(w.mlp_norm)
        x += experts(normed, w.mlp, config.router, step) if isinstance(w.mlp, MoeWeights) else mlp(normed, w.mlp)
    return x


FAMILY = Family(
    "Qwen3MoeConfig",
    Qwen3MoeConfig,
    take,
    llama.layers,
    forward,
    llama.head,
    requires={"hidden_act": ("silu", "swish")},
    old_fields=("head_dim",),
)
