"""DeepSeek-V2 and Coder-V2, also Lite: latent attention and a mixture of experts (DeepSeek-AI, 2024, arXiv:2405.04434).

As DeepSeek-V3, but for the router: its weights are a softmax of all logits, and it takes groups by their best expert.
"""

import dataclasses
from typing import Any

from compiled_llm.models import deepseek_v3, glm4_moe, llama
from compiled_llm.models.deepseek_v3 import DeepseekConfig
from compiled_llm.models.family import Family
from compiled_llm.models.layers.mlp import MlpWeights
from compiled_llm.models.layers.moe import MoeWeights
from compiled_llm.models.linears.mixture import Router
from compiled_llm.models.llama import LayerWeights, Weights
from compiled_llm.models.rope_config import Rope, read_latent_rope
from compiled_llm.models.weights import Source

_METHODS = ("greedy", "group_limited_greedy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(DeepseekConfig):
    topk_method: str

    def __post_init__(self) -> None:
        if self.topk_method not in _METHODS:
            raise ValueError(
                f"config.json: topk_method must be {' or '.join(_METHODS)}, given {self.topk_method!r:.100}"
            )
        super().__post_init__()
        if self.mlp_bias:
            raise ValueError("config.json: mlp_bias must be false for this architecture, given true")

    @property
    def router(self) -> Router:
        groups = self.n_group, self.topk_group
        return Router(self.num_experts_per_tok, "softmax", self.routed_scaling_factor, *groups, in_float32=True)


def take_mlp(config: Any, source: Source, name: str) -> MlpWeights | MoeWeights:
    """As DeepSeek-V3's, whose choice of experts has a bias besides."""
    return glm4_moe.take_mlp(config, source, name, has_choice_bias=False)


def take_layer(config: DeepseekV2Config, source: Source, name: str) -> LayerWeights:
    """The layer whose tensors' names begin with ``name``."""
    return deepseek_v3.take_layer(config, source, name, take_mlp)


def take(config: DeepseekV2Config, source: Source) -> Weights:
    """The weights."""
    return llama.take(config, source, take_layer)


def read_ropes(config: Any) -> tuple[Rope, ...]:
    """One for all layers."""
    return (read_latent_rope(config.rope_parameters, config.max_position_embeddings, interleaved=True),)


def _groups(config: Any) -> dict[str, int]:
    """Of experts: the greedy choice has none."""
    if config.topk_method == "greedy":
        return {"n_group": 1, "topk_group": 1}
    return {"n_group": config.n_group or 0, "topk_group": config.topk_group or 0}


FAMILY = Family(
    "DeepseekV2Config",
    DeepseekV2Config,
    take,
    deepseek_v3.layers,
    deepseek_v3.forward,
    llama.head,
    requires={**llama.FAMILY.requires, "norm_topk_prob": (False,)},
    read_ropes=read_ropes,
    check=deepseek_v3.check,
    old_fields=deepseek_v3.DERIVED,
    sizes=_groups,
)
