"""Ministral 3: Mistral with yarn, and queries scaled by their position.

The scale keeps attention sharp in long texts (Nakanishi, 2025, arXiv:2501.19399; its form is that of Llama 4).
"""

import dataclasses
from typing import Any

from torch import Tensor

from compiled_llm.models import llama, mistral
from compiled_llm.models.family import Family
from compiled_llm.models.layers.rope import query_scale_table
from compiled_llm.models.llama import Weights
from compiled_llm.models.mistral import MistralConfig
from compiled_llm.models.rope_config import Rope, read_query_scale, read_rope
from compiled_llm.models.weights import Source


def take(config: MistralConfig, source: Source) -> Weights:
    """The weights, with the table of the queries' scales as the second of ``ropes``."""
    weights = llama.take(config, source)
    assert isinstance(weights.final_norm, Tensor)
    scales = query_scale_table(config.ropes[0], config.max_position_embeddings, weights.final_norm)
    return weights._replace(ropes=(*weights.ropes, scales))


def read_ropes(config: Any) -> tuple[Rope, ...]:
    """One for all layers. Its parameters have the queries' scale, too, and a length that says nothing."""
    beta, rest = read_query_scale(config.rope_parameters)
    return (dataclasses.replace(read_rope(rest, config.max_position_embeddings), query_beta=beta),)


FAMILY = Family(
    "Ministral3Config",
    MistralConfig,
    take,
    mistral.layers,
    llama.forward,
    llama.head,
    requires=llama.FAMILY.requires,
    read_ropes=read_ropes,
)
