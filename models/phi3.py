"""Phi-3 and Phi-4 (Abdin et al., 2024, arXiv:2404.14219 and 2412.08905).

Mistral whose checkpoints have projections of the same input as one tensor; longrope, and heads turned in part.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models import llama, mistral
from compiled_llm.models.family import Family, one_partial_rope
from compiled_llm.models.glm import take_mlp
from compiled_llm.models.layers.attention import AttentionWeights
from compiled_llm.models.layers.rope import head_arrangement
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.models.llama import LayerWeights, LlamaConfig, Weights
from compiled_llm.models.mistral import MistralConfig
from compiled_llm.models.sharding import by_outputs, of_heads, of_kv_heads
from compiled_llm.models.weights import Source


def _arrangement(config: LlamaConfig) -> Callable[[Tensor], Tensor] | None:
    """That of the heads of queries and keys in a tensor that has the values behind them."""
    arrange, turned = head_arrangement(config.ropes[0], config.head_dim), config.num_heads + config.num_kv_heads
    if arrange is None:
        return None
    return lambda rows: torch.cat([arrange(rows[: turned * config.head_dim]), rows[turned * config.head_dim :]])


def _take_attention(source: Source, name: str, config: LlamaConfig) -> AttentionWeights:
    d, h, size = config.hidden_size, config.head_dim, config.num_heads * config.head_dim
    q, kv = of_heads(config, size), of_kv_heads(config, config.num_kv_heads * h)
    outputs, cut = size + 2 * kv.size, by_outputs(q, kv, kv)
    qkv = source.linear(StoredLinear(f"{name}.qkv_proj", outputs, d, arrange=_arrangement(config), cut=cut))
    return AttentionWeights(qkv, source.linear(StoredLinear(f"{name}.o_proj", d, size, cut=q.inputs)))


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


def updated(config: dict[str, Any]) -> dict[str, Any]:
    """A parsed ``config.json`` whose kind of rotary embedding is "default" or "longrope", as "su" and "yarn" are now.

    ``ValueError`` for another kind.
    """
    config = dict(config)
    for name in ("rope_parameters", "rope_scaling"):
        given = config.get(name)
        if not given:
            continue
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in ("default", "longrope", "su", "yarn"):
            raise ValueError(
                f"config.json: rope_type must be 'default' or 'longrope' for this architecture, given {kind!r:.100}"
            )
        config[name] = {**given, "rope_type": "default" if kind == "default" else "longrope"}
    return config


def check(config: dict[str, Any]) -> None:
    """``ValueError`` for divisors that are more or fewer than the frequencies."""
    heads, share = config["num_attention_heads"], config.get("partial_rotary_factor")
    for name in ("rope_parameters", "rope_scaling"):
        given = config.get(name) or {}
        share = given.get("partial_rotary_factor", 1.0 if share is None else share)
        count = int(config["hidden_size"] // heads * share) // 2
        for field in [name for name in ("short_factor", "long_factor") if name in given]:
            if not isinstance(given[field], list) or len(given[field]) != count:
                raise ValueError(
                    f"config.json: {field} must have a number for each of the {count} frequencies of a head, by "
                    f"hidden_size={config['hidden_size']}, num_attention_heads={heads} and partial_rotary_factor="
                    f"{share!r:.100}, given {given[field]!r:.100}"
                )


FAMILY = Family(
    "Phi3Config",
    MistralConfig,
    take,
    mistral.layers,
    llama.forward,
    llama.head,
    requires=llama.FAMILY.requires,
    read_ropes=one_partial_rope,
    updated=updated,
    check=check,
    old_fields=("head_dim", "partial_rotary_factor"),
)
