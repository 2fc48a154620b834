"""GLM-4 as published in 2024 (GLM team, arXiv:2406.12793).

Llama with biases of queries, keys and values, and a rotary embedding of half of each head, of neighbouring elements.
"""

import dataclasses
from typing import Any

from compiled_llm.models import llama
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.layers.attention import AttentionWeights
from compiled_llm.models.layers.mlp import MlpWeights
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.models.llama import LayerWeights, LlamaConfig, Weights
from compiled_llm.models.rope_config import Rope, read_partial_rope
from compiled_llm.models.sharding import by_outputs, of_elements
from compiled_llm.models.weights import Source


def take_attention(source: Source, name: str, config: LlamaConfig) -> AttentionWeights:
    """The projections, of which the output's never has a bias."""
    return source.attention(name, config, bias=config.attention_bias, o_bias=False)


def take_mlp(source: Source, name: str, config: ModelConfig) -> MlpWeights:
    """The MLP, whose gate and up are one tensor."""
    d, intermediate = config.hidden_size, config.intermediate_size
    own = of_elements(intermediate)
    gate_up = StoredLinear(f"{name}.gate_up_proj", 2 * intermediate, d, cut=by_outputs(own, own))
    down = StoredLinear(f"{name}.down_proj", d, intermediate, cut=own.inputs)
    return MlpWeights(source.linear(gate_up), source.linear(down))


def take_layer(config: LlamaConfig, source: Source, name: str) -> LayerWeights:
    """The layer whose tensors' names begin with ``name``."""
    return LayerWeights(
        input_norm=source.norm(f"{name}.input_layernorm", config.hidden_size),
        attention=take_attention(source, f"{name}.self_attn", config),
        mlp_norm=source.norm(f"{name}.post_attention_layernorm", config.hidden_size),
        mlp=take_mlp(source, f"{name}.mlp", config),
    )


def take(config: LlamaConfig, source: Source) -> Weights:
    """The weights."""
    return llama.take(config, source, take_layer)


def read_ropes(config: Any) -> tuple[Rope, ...]:
    """One for all layers."""
    rope = read_partial_rope(config.rope_parameters, config.max_position_embeddings)
    return (dataclasses.replace(rope, interleaved=True),)


FAMILY = dataclasses.replace(
    llama.FAMILY, hf_config="GlmConfig", take=take, read_ropes=read_ropes, old_fields=("partial_rotary_factor",)
)
