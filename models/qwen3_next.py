"""Qwen3-Next: Gated DeltaNet in most layers, and a mixture of experts beside one that all tokens share.

Layers of Qwen3.5, with projections of DeltaNet that lie by key head in two tensors.
"""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models import llama, qwen3_5, qwen3_moe
from compiled_llm.models.config import check_at_least_one, num_mtp_layers
from compiled_llm.models.family import Family, MixedLayers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.delta_net import delta_net
from compiled_llm.models.layers.gated_attention import gated_attention
from compiled_llm.models.layers.mlp import MlpWeights, mlp
from compiled_llm.models.layers.moe import MoeWeights, Shared, experts
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.linears.protocol import Linear, StoredLinear
from compiled_llm.models.llama import LayerWeights, Weights
from compiled_llm.models.qwen3_5 import Qwen35Config
from compiled_llm.models.qwen3_moe import Qwen3MoeConfig
from compiled_llm.models.sharding import REPLICATED, Cut, by_outputs
from compiled_llm.models.weights import Source

MTP_FIELD = "num_nextn_predict_layers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(Qwen35Config, Qwen3MoeConfig):
    norm_topk_prob: bool = True  # as Qwen3.5 with experts has it, whose class lacks the field
    shared_expert_intermediate_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(self, "shared_expert_intermediate_size")


def take_projections(config: Qwen3NextConfig, source: Source, name: str) -> Linear:
    """As Qwen3.5's, of tensors that have each key head's rows together, with those of its value heads."""
    key_heads, dk = config.linear_num_key_heads, config.linear_key_head_dim
    group = config.linear_num_value_heads // key_heads
    values = group * config.linear_value_head_dim

    def apart(rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
        parts = rows.unflatten(0, (key_heads, -1)).split(sizes, dim=1)
        return torch.cat([part.flatten(0, 1) for part in parts])

    def together(part: str, cut: Cut, *sizes: int) -> StoredLinear:
        outputs, arrange = key_heads * sum(sizes), functools.partial(apart, sizes=sizes)
        return StoredLinear(f"{name}.in_proj_{part}", outputs, config.hidden_size, arrange=arrange, cut=cut)

    own, heads = config.convolved_sections, config.of_value_heads(config.linear_num_value_heads)
    of_values = own[-1]
    first = [together("qkvz", by_outputs(*own, of_values), dk, dk, values, values)]
    if config.gguf_layout:
        first = [
            StoredLinear(f"{name}.in_proj_{x}", sum(s.size for s in sections), config.hidden_size, cut=Cut(sections))
            for x, sections in {"qkv": own, "z": (of_values,)}.items()
        ]
    return source.linear(*first, together("ba", by_outputs(heads, heads), group, group))


def take_shared(config: Qwen3NextConfig, source: Source, name: str) -> Shared:
    """The MLP that all tokens use, and its gate; names begin with ``name``."""
    d, inner = config.hidden_size, config.shared_expert_intermediate_size
    shared = source.gated_mlp(f"{name}.shared_expert", d, inner)
    gate = source.linear(StoredLinear(f"{name}.shared_expert_gate", 1, d, cut=REPLICATED))
    return Shared(shared, source.constant(1), gate)


def take_mlp(config: Qwen3NextConfig, source: Source, name: str) -> MlpWeights | MoeWeights:
    """The experts of the layer whose tensors' names begin with ``name``, or its MLP."""
    routed = qwen3_moe.take_mlp(config, source, name)
    if isinstance(routed, MlpWeights):
        return routed
    return routed._replace(shared=take_shared(config, source, f"{name}.mlp"))


def take_layer(config: Qwen3NextConfig, source: Source, name: str) -> LayerWeights:
    """The layer whose tensors' names begin with ``name``."""
    return qwen3_5.take_layer(config, source, name, take_mlp, take_projections)


def take(config: Qwen3NextConfig, source: Source) -> Weights:
    """The weights."""
    return qwen3_5.take(config, source, take_layer)


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: Any, layers: MixedLayers) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys, values and states go to ``kv_cache``."""
    x = Residual(weights.embedding.rows(step.input_ids), config.rms_norm_eps)
    return through_layers(x, weights, step, kv_cache, config, layers).tensor()


def through_layers(x: Residual, weights: Any, step: StepInput, kv_cache: KVCache, config: Any, layers: Any) -> Residual:
    """What all layers make of ``x``; of ``weights``, ``layers`` and ``ropes`` are read."""
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        normed = x.normed(w.input_norm)
        if isinstance(spec, StateSpec):
            x += delta_net(normed, w.attention, spec, cache, step)
        else:
            x += gated_attention(normed, w.attention, cos_sin, spec, cache, step)
        normed = x.normed(w.mlp_norm)
        x += experts(normed, w.mlp, config.router, step) if isinstance(w.mlp, MoeWeights) else mlp(normed, w.mlp)
    return x


FAMILY = Family(
    "Qwen3NextConfig",
    Qwen3NextConfig,
    take,
    qwen3_5.layers,
    forward,
    llama.head,
    requires=llama.FAMILY.requires,
    read_ropes=qwen3_5.read_ropes,
    old_fields=("full_attention_interval", "partial_rotary_factor", MTP_FIELD),
    sizes=lambda config: num_mtp_layers(config, MTP_FIELD),
)
