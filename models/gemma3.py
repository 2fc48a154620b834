"""Gemma 3 (Gemma team, 2025, arXiv:2503.19786): its language model.

Gemma 2 with an RMS norm by ``1 + w`` on every head's query and key in the place of soft caps, and a rotary embedding of
their own for layers with a window.
"""

import dataclasses
from typing import Any

from compiled_llm.models import gemma2
from compiled_llm.models.config import FULL, SLIDING
from compiled_llm.models.gemma2 import Gemma2Config, LayerWeights
from compiled_llm.models.llama import Weights
from compiled_llm.models.rope_config import Rope, read_ropes_by_layer_type
from compiled_llm.models.rope_fields import check_by_layer_type
from compiled_llm.models.weights import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attn_logit_softcapping is not None:  # which transformers' config has, and its model does not use
            raise ValueError(
                f"config.json: attn_logit_softcapping must be null for Gemma 3, given {self.attn_logit_softcapping}"
            )


def take_layer(config: Gemma2Config, source: Source, name: str) -> LayerWeights:
    """Gemma 2's layer, with the two norms."""
    layer = gemma2.take_layer(config, source, name)
    q_norm, k_norm = (source.norm_plus_one(f"{name}.self_attn.{x}_norm", config.head_dim) for x in "qk")
    return layer._replace(attention=layer.attention._replace(q_norm=q_norm, k_norm=k_norm))


def take(config: Gemma2Config, source: Source) -> Weights:
    """The weights, each layer's with the two norms."""
    return gemma2.take(config, source, take_layer)


def read_ropes(config: Any) -> tuple[Rope, ...]:
    """That of layers without a window, and that of layers with one."""
    return read_ropes_by_layer_type(config.rope_parameters, (FULL, SLIDING), config.max_position_embeddings)


FAMILY = dataclasses.replace(
    gemma2.FAMILY,
    hf_config="Gemma3TextConfig",
    config=Gemma3Config,
    take=take,
    read_ropes=read_ropes,
    check=check_by_layer_type,
    old_fields=("rope_local_base_freq", "sliding_window_pattern"),
)
