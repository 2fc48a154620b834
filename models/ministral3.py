"""Ministral 3: Mistral with yarn, and queries scaled by their position.

The scale keeps attention sharp in long texts (Nakanishi, 2025, arXiv:2501.19399; its form is that of Llama 4).
"""

import dataclasses
from typing import Any

from torch import Tensor

from compiled_llm.models import llama, mistral
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import attention
from compiled_llm.models.layers.mlp import mlp
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.layers.rope import query_scale_table, rope_cos_sin
from compiled_llm.models.llama import Weights
from compiled_llm.models.mistral import MistralConfig
from compiled_llm.models.rope_config import Rope, read_query_scale, read_rope
from compiled_llm.models.weights import Source
from compiled_llm.ops import table_rows


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


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: MistralConfig, layers: Layers) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
    x = Residual(weights.embedding.rows(step.input_ids), config.rms_norm_eps)
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    query_scale = table_rows(weights.ropes[1], step.positions)
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        x += attention(x.normed(w.input_norm), w.attention, cos_sin, spec, cache, step, query_scale)
        x += mlp(x.normed(w.mlp_norm), w.mlp)
    return x.tensor()


FAMILY = Family(
    "Ministral3Config",
    MistralConfig,
    take,
    mistral.layers,
    forward,
    llama.head,
    requires=llama.FAMILY.requires,
    read_ropes=read_ropes,
)
