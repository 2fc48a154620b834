"""Phi-3 and Phi-4 (Abdin et al., 2024, arXiv:2404.14219 and 2412.08905).

Mistral whose checkpoints have projections of the same input as one tensor; longrope, and heads turned in part.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models import llama, mistral
from compiled_llm.models.family import Family
from compiled_llm.models.glm import take_mlp
from compiled_llm.models.layers.attention import AttentionWeights
from compiled_llm.models.layers.decoder import LayerWeights
from compiled_llm.models.layers.rope import head_arrangement
from compiled_llm.models.linears.protocol import Part
from compiled_llm.models.llama import LlamaConfig, Weights
from compiled_llm.models.mistral import MistralConfig
from compiled_llm.models.rope_config import Rope, read_partial_rope
from compiled_llm.models.weights import Source


def _arrangement(config: LlamaConfig) -> Callable[[Tensor], Tensor] | None:
    """That of the heads of queries and keys in a tensor that has the values behind them."""
    arrange, turned = head_arrangement(config.ropes[0], config.head_dim), config.num_heads + config.num_kv_heads
    if arrange is None:
        return None
    return lambda rows: torch.cat([arrange(rows[: turned * config.head_dim]), rows[turned * config.head_dim :]])


def _take_attention(source: Source, name: str, config: LlamaConfig) -> AttentionWeights:
    d, h, heads = config.hidden_size, config.head_dim, config.num_heads + 2 * config.num_kv_heads
    qkv = source.linear(Part(f"{name}.qkv_proj", heads * h, d, arrange=_arrangement(config)))
    return AttentionWeights(qkv, source.linear(Part(f"{name}.o_proj", d, config.num_heads * h)))


def take_layer(config: LlamaConfig, source: Source, name: str) -> LayerWeights:
    """The layer whose tensors' names begin with ``name``."""
    return LayerWeights(
        input_norm=source.norm(f"{name}.input_layernorm", config.hidden_size),
        attention=_take_attention(source, f"{name}.self_attn", config),
        mlp_norm=source.norm(f"{name}.post_attention_layernorm", config.hidden_size),
        mlp=take_mlp(source, f"{name}.mlp", config),
    )


def take(config: MistralConfig, source: Source) -> Weights:
    """The weights."""
    return llama.take(config, source, take_layer)


def read_ropes(config: dict[str, Any]) -> tuple[Rope, ...]:
    """One for all layers. Its kind is "default" or "longrope", which older files call "su" or "yarn"."""
    config = {"original_max_position_embeddings": 4096, **config}
    for name in ("rope_parameters", "rope_scaling"):
        given = config.get(name)
        if not isinstance(given, dict):
            continue
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in ("default", "longrope", "su", "yarn"):
            raise ValueError(
                f"config.json: rope_type must be 'default' or 'longrope' for this architecture, given {kind!r:.100}"
            )
        config[name] = {**given, "rope_type": "default" if kind == "default" else "longrope"}
    return (read_partial_rope(config, default=1.0),)


FAMILY = Family(
    "Phi3Config",
    MistralConfig,
    take,
    mistral.layers,
    llama.forward,
    llama.head,
    requires=llama.FAMILY.requires,
    read_ropes=read_ropes,
    old_fields=("head_dim", "partial_rotary_factor"),
)
