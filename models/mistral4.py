"""Mistral 4: latent attention with queries scaled by their position, and a mixture of experts.

As DeepSeek-V3 (arXiv:2412.19437), with another router.
"""

import dataclasses
from typing import Any

from torch import Tensor

from compiled_llm.models import deepseek_v3, glm4_moe, llama
from compiled_llm.models.deepseek_v3 import DeepseekConfig
from compiled_llm.models.family import Family
from compiled_llm.models.layers.mlp import MlpWeights
from compiled_llm.models.layers.moe import MoeWeights
from compiled_llm.models.layers.rope import query_scale_table
from compiled_llm.models.linears.mixture import Router
from compiled_llm.models.llama import LayerWeights, Weights
from compiled_llm.models.rope_config import Rope, read_latent_rope, read_query_scale
from compiled_llm.models.weights import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistral4Config(DeepseekConfig):
    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.n_group, self.topk_group) != (1, 1):
            raise ValueError(
                "config.json: n_group and topk_group must be 1 for this architecture, given "
                f"{self.n_group!r:.100} and {self.topk_group!r:.100}"
            )

    @property
    def router(self) -> Router:
        """The softmax of all logits, divided by the sum over the chosen ones, is the softmax of these."""
        return Router(self.num_experts_per_tok, "softmax_of_chosen", self.routed_scaling_factor)


def take_mlp(config: Any, source: Source, name: str) -> MlpWeights | MoeWeights:
    """The experts of the layer whose tensors' names begin with ``name``, or its MLP."""
    if not glm4_moe.has_experts(config, name):
        return source.mlp(f"{name}.mlp", config)
    routed = source.mixture(
        f"{name}.mlp.gate", f"{name}.mlp.experts", config, config.n_routed_experts, config.num_experts_per_tok,
        config.moe_intermediate_size,
    )  # fmt: skip
    return glm4_moe.beside_shared(config, source, name, routed)


def take_layer(config: Mistral4Config, source: Source, name: str) -> LayerWeights:
    """The layer whose tensors' names begin with ``name``."""
    return deepseek_v3.take_layer(config, source, name, take_mlp)


def take(config: Mistral4Config, source: Source) -> Weights:
    """The weights, with the table of the queries' scales as the second of ``ropes``."""
    weights = llama.take(config, source, take_layer)
    assert isinstance(weights.final_norm, Tensor)
    scales = query_scale_table(config.ropes[0], config.max_position_embeddings, weights.final_norm)
    return weights._replace(ropes=(*weights.ropes, scales))


def read_ropes(config: Any) -> tuple[Rope, ...]:
    """One for all layers. Its parameters have the queries' scale, too, and say once more which elements are turned."""
    beta, rest = read_query_scale(config.rope_parameters)
    turned = config.qk_rope_head_dim / (config.qk_nope_head_dim + config.qk_rope_head_dim)
    given = rest.pop("partial_rotary_factor")
    if given != turned:
        raise ValueError(
            f"config.json: partial_rotary_factor must be {turned}, by qk_rope_head_dim and qk_nope_head_dim, given "
            f"{given!r:.100}"
        )
    rope = read_latent_rope(rest, config.max_position_embeddings, interleaved=config.rope_interleave)
    return (dataclasses.replace(rope, query_beta=beta),)


def check(config: dict[str, Any]) -> None:
    """As DeepSeek-V3's, whose ``head_dim`` is the turned part alone."""
    head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    deepseek_v3.check_derived(config, head_dim=head_dim)
    deepseek_v3.check({**config, "head_dim": None})


FAMILY = Family(
    "Mistral4Config",
    Mistral4Config,
    take,
    deepseek_v3.layers,
    deepseek_v3.forward,
    llama.head,
    requires=deepseek_v3.FAMILY.requires,
    read_ropes=read_ropes,
    check=check,
    old_fields=deepseek_v3.DERIVED,
    sizes=lambda config: {"head_dim": config.qk_rope_head_dim},
)
