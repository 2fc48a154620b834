"""Seed-OSS (ByteDance Seed, 2025): Llama with biases of queries, keys and values, and of the output if wanted."""

import dataclasses

from compiled_llm.models import llama
from compiled_llm.models.family import Family
from compiled_llm.models.llama import LayerWeights, LlamaConfig, Weights
from compiled_llm.models.weights import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedOssConfig(LlamaConfig):
    attention_out_bias: bool


def take_layer(config: SeedOssConfig, source: Source, name: str) -> LayerWeights:
    """Llama's layer, with the biases."""
    return LayerWeights(
        input_norm=source.norm(f"{name}.input_layernorm", config.hidden_size),
        attention=source.attention(
            f"{name}.self_attn", config, bias=config.attention_bias, o_bias=config.attention_out_bias
        ),
        mlp_norm=source.norm(f"{name}.post_attention_layernorm", config.hidden_size),
        mlp=llama.take_mlp(config, source, name),
    )


def take(config: SeedOssConfig, source: Source) -> Weights:
    """The weights, each layer's with the biases."""
    return llama.take(config, source, take_layer)


FAMILY = Family(
    "SeedOssConfig", SeedOssConfig, take, llama.layers, llama.forward, llama.head, requires=llama.FAMILY.requires
)
