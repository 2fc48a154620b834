"""Attention with a gate of its output (Qiu et al., 2025, arXiv:2505.06708)."""

import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import LayerCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, AttentionWeights, attended
from compiled_llm.models.layers.residual import BlockOutput, Normed
from compiled_llm.models.layers.rope import head_arrangement
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.models.sharding import by_outputs, of_heads
from compiled_llm.models.weights import Source
from compiled_llm.ops import sigmoid_gated


def take_gated_attention(config: ModelConfig, source: Source, name: str, *, bias: bool) -> AttentionWeights:
    """The projections of a layer whose ``q_proj`` has each head's query and gate, and norms of heads by ``1 + w``.

    ``qkv`` gives ``[T, N * H]`` gates first, then what it gives in other families.
    """
    d, h, size = config.hidden_size, config.head_dim, config.num_heads * config.head_dim
    arrange = head_arrangement(config.ropes[0], h)

    def gates_first(rows: Tensor) -> Tensor:
        queries, gates = (part.flatten(0, 1) for part in rows.unflatten(0, (-1, 2 * h)).split(h, dim=1))
        return torch.cat([gates, queries if arrange is None else arrange(queries)])

    own, parts = of_heads(config, size), source.query_key_value(name, config, bias)
    gates_queries = StoredLinear(f"{name}.q_proj", 2 * size, d, bias, arrange=gates_first, cut=by_outputs(own, own))
    qkv = source.linear(gates_queries, parts["k"]._replace(arrange=arrange), parts["v"])
    q_norm, k_norm = (source.norm_plus_one(f"{name}.{x}_norm", h) for x in "qk")
    if arrange is not None and not q_norm.is_meta:  # a norm's elements are in the order of the heads'
        q_norm, k_norm = arrange(q_norm), arrange(k_norm)
    return AttentionWeights(
        qkv, source.linear(StoredLinear(f"{name}.o_proj", d, size, bias, cut=own.inputs)), q_norm, k_norm
    )


def gated_attention(
    x: Normed, w: AttentionWeights, cos_sin: Tensor, spec: AttentionSpec, cache: LayerCache, step: StepInput
) -> BlockOutput:
    """As ``attention``; what it sees is multiplied by the sigmoid of the gates, the first columns of ``w.qkv``."""
    qkv, size = x.linear(w.qkv), spec.num_heads * spec.head_dim
    gate, qkv = qkv.split([size, qkv.shape[1] - size], dim=-1)
    return BlockOutput(sigmoid_gated(attended(qkv, w, cos_sin, spec, cache, step, x.eps), gate), w.o)
