"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values (Yang et al., 2024, arXiv:2407.10671)."""

import dataclasses

from compiled_llm.models import llama
from compiled_llm.models.config import WindowedConfig
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.layers.attention import windowed_layers
from compiled_llm.models.llama import LayerWeights, LlamaConfig, Weights
from compiled_llm.models.weights import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(LlamaConfig, WindowedConfig):
    """``layer_types`` follows from the fields below where the file leaves it out."""

    use_sliding_window: bool
    max_window_layers: int  # the first layer with a window


def take_layer(config: LlamaConfig, source: Source, name: str) -> LayerWeights:
    """Llama's layer, with the biases."""
    attention = source.attention(f"{name}.self_attn", config, bias=True, o_bias=False)
    return LayerWeights(
        input_norm=source.norm(f"{name}.input_layernorm", config.hidden_size),
        attention=attention,
        mlp_norm=source.norm(f"{name}.post_attention_layernorm", config.hidden_size),
        mlp=source.mlp(f"{name}.mlp", config),
    )


def take(config: Qwen2Config, source: Source) -> Weights:
    """The weights, each layer's with the biases."""
    return llama.take(config, source, take_layer)


def layers(config: Qwen2Config) -> Layers:
    """Llama's, with a window where ``layer_types`` says so."""
    return windowed_layers(config, llama.layers(config)[0])


FAMILY = Family(
    "Qwen2Config",
    Qwen2Config,
    take,
    layers,
    llama.forward,
    llama.head,
    requires=llama.FAMILY.requires,
    old_fields=("head_dim",),
)
