"""Mixtral: Mistral with a mixture of experts in the place of each MLP (Jiang et al., 2024, arXiv:2401.04088)."""

import dataclasses
import functools

from torch import Tensor

from compiled_llm.models import llama, mistral
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import attention
from compiled_llm.models.layers.moe import MoeWeights, Router, check_router, experts
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.llama import Weights
from compiled_llm.models.mistral import MistralConfig
from compiled_llm.models.weights import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(MistralConfig):
    num_local_experts: int
    num_experts_per_tok: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_router(self, "num_local_experts")


def take_mlp(config: MixtralConfig, source: Source, name: str) -> MoeWeights:
    """The experts of the layer whose tensors' names begin with ``name``."""
    source.may_be_called(f"{name}.block_sparse_moe.gate.weight", f"{name}.mlp.gate.weight")
    return source.mixture(
        f"{name}.block_sparse_moe.gate",
        f"{name}.block_sparse_moe.experts",
        config,
        config.num_local_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        names=("w1", "w3", "w2"),
        stacked=f"{name}.mlp.experts",
    )


def take(config: MixtralConfig, source: Source) -> Weights:
    """The weights: Llama's, with experts."""
    return llama.take(config, source, functools.partial(llama.take_layer, take_mlp=take_mlp))


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: MixtralConfig, layers: Layers) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
    x = Residual(weights.embedding.rows(step.input_ids), config.rms_norm_eps)
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    router = Router(config.num_experts_per_tok, "softmax_of_chosen")  # the weights add up to 1
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        x += attention(x.normed(w.input_norm), w.attention, cos_sin, spec, cache, step)
        x += experts(x.normed(w.mlp_norm), w.mlp, router, step)
    return x.tensor()


FAMILY = Family(
    "MixtralConfig", MixtralConfig, take, mistral.layers, forward, llama.head, requires=llama.FAMILY.requires
)
