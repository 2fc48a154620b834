"""gpt-oss (OpenAI, 2025, arXiv:2508.10925): a mixture of experts with biases and clamped gates, and attention sinks.

Windows in every second layer; each query head has a sink, the score of one more key whose value is zero.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models import llama
from compiled_llm.models.config import WindowedConfig, check_positive
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import attention, windowed_layers
from compiled_llm.models.layers.moe import Gate, MoeWeights, Router, check_router, experts
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.models.llama import LayerWeights, LlamaConfig, Weights
from compiled_llm.models.sharding import REPLICATED, by_outputs, of_elements, of_heads
from compiled_llm.models.weights import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(LlamaConfig, WindowedConfig):
    num_local_experts: int
    num_experts_per_tok: int
    swiglu_alpha: float
    swiglu_limit: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_router(self, "num_local_experts")
        check_positive(self, "swiglu_alpha", "swiglu_limit")


def take_mlp(config: GptOssConfig, source: Source, name: str) -> MoeWeights:
    """The experts of the layer whose tensors' names begin with ``name``."""
    d, inner, num_experts, top_k = (
        config.hidden_size,
        config.intermediate_size,
        config.num_local_experts,
        config.num_experts_per_tok,
    )
    experts, own = f"{name}.mlp.experts", of_elements(inner)
    if config.gguf_layout:
        each = [f"{experts}.{e}" for e in range(num_experts)]
        gates = [
            [StoredLinear(f"{e}.{x}_proj", inner, d, bias=True, cut=own.outputs) for x in ("gate", "up")] for e in each
        ]
        gate_up = source.experts(gates, top_k)
        downs = [[StoredLinear(f"{e}.down_proj", d, inner, bias=True, cut=own.inputs)] for e in each]
        down = source.experts(downs, top_k)
    else:
        gate_up = source.stacked_experts(
            f"{experts}.gate_up_proj", num_experts, 2 * inner, d, top_k, in_turn=2, cut=by_outputs(own, own)
        )
        down = source.stacked_experts(f"{experts}.down_proj", num_experts, d, inner, top_k, cut=own.inputs)
    router = source.linear(StoredLinear(f"{name}.mlp.router", num_experts, d, bias=True, cut=REPLICATED))
    return MoeWeights(router, gate_up, down, source.used_experts())


def take_layer(config: Any, source: Source, name: str) -> LayerWeights:
    """Llama's layer, with experts and sinks."""
    layer = llama.take_layer(config, source, name, take_mlp)
    own = of_heads(config, config.num_heads)
    sinks = source.tensor(f"{name}.self_attn.sinks", (own.size,), dtype=torch.float32, cut=own.outputs)
    return layer._replace(attention=layer.attention._replace(sinks=sinks))


def take(config: GptOssConfig, source: Source) -> Weights:
    """The weights."""
    return llama.take(config, source, take_layer)


def layers(config: GptOssConfig) -> Layers:
    """Llama's, with a window where ``layer_types`` says so."""
    return windowed_layers(config, llama.layers(config)[0])


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: GptOssConfig, layers: Layers) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
    x = Residual(weights.embedding.rows(step.input_ids), config.rms_norm_eps)
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    router = Router(config.num_experts_per_tok, "softmax_of_chosen")  # the weights add up to 1
    gate = Gate("clamped_swiglu", config.swiglu_alpha, config.swiglu_limit)
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        x += attention(x.normed(w.input_norm), w.attention, cos_sin, spec, cache, step)
        x += experts(x.normed(w.mlp_norm), w.mlp, router, step, gate)
    return x.tensor()


FAMILY = Family(
    "GptOssConfig",
    GptOssConfig,
    take,
    layers,
    forward,
    llama.head,
    requires=llama.FAMILY.requires,
    quantizations=("mxfp4", "gguf"),
)
