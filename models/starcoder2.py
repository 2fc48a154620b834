"""StarCoder 2 (Lozhkov et al., 2024, arXiv:2402.19173): Mistral with layer norms, biases and a plain MLP."""

import dataclasses
from typing import Any

from torch import Tensor

from compiled_llm.models import llama
from compiled_llm.models.config import ModelConfig, check_window
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, attention
from compiled_llm.models.layers.mlp import mlp, plain_activation
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.llama import LayerWeights, Weights
from compiled_llm.models.weights import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Starcoder2Config(ModelConfig):
    hidden_act: str
    sliding_window: int | None  # None: queries see all keys
    use_bias: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        plain_activation(self.hidden_act)
        if self.sliding_window is not None:
            check_window(self.sliding_window)


def _take_layer(config: Starcoder2Config, source: Source, name: str) -> LayerWeights:
    d, intermediate, bias = config.hidden_size, config.intermediate_size, config.use_bias
    return LayerWeights(
        input_norm=source.layer_norm(f"{name}.input_layernorm", d),
        attention=source.attention(f"{name}.self_attn", config, bias=bias),
        mlp_norm=source.layer_norm(f"{name}.post_attention_layernorm", d),
        mlp=source.plain_mlp(f"{name}.mlp.c_fc", f"{name}.mlp.c_proj", d, intermediate, bias),
    )


def take(config: Starcoder2Config, source: Source) -> Weights:
    """The weights."""
    return llama.take(config, source, _take_layer, Source.layer_norm)


def layers(config: Starcoder2Config) -> Layers:
    """All are alike."""
    scale, window = config.head_dim**-0.5, config.sliding_window or 0
    return (AttentionSpec(config.num_heads, config.num_kv_heads, config.head_dim, scale, window),) * config.num_layers


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: Starcoder2Config, layers: Layers) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
    x = Residual(weights.embedding.rows(step.input_ids), config.rms_norm_eps)
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    activation = plain_activation(config.hidden_act)
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        x += attention(x.normed(w.input_norm), w.attention, cos_sin, spec, cache, step)
        x += mlp(x.normed(w.mlp_norm), w.mlp, activation)
    return x.tensor()


def sizes(config: Any) -> dict[str, Any]:
    """The norms' epsilon has a name of its own."""
    return {"rms_norm_eps": config.norm_epsilon}


FAMILY = Family(
    "Starcoder2Config",
    Starcoder2Config,
    take,
    layers,
    forward,
    llama.head,
    old_fields=("head_dim", "norm_epsilon"),
    sizes=sizes,
)
