"""GLM-4 as published from April 2025 on: GLM with a norm after each block, too."""

from compiled_llm.models import glm, llama
from compiled_llm.models.family import Family
from compiled_llm.models.layers.decoder import LayerWeights
from compiled_llm.models.llama import LlamaConfig, Weights
from compiled_llm.models.weights import Source


def _take_layer(config: LlamaConfig, source: Source, name: str) -> LayerWeights:
    return LayerWeights(
        input_norm=source.norm(f"{name}.input_layernorm", config.hidden_size),
        attention=glm.take_attention(source, f"{name}.self_attn", config),
        attention_norm=source.norm(f"{name}.post_self_attn_layernorm", config.hidden_size),
        mlp_norm=source.norm(f"{name}.post_attention_layernorm", config.hidden_size),
        mlp=glm.take_mlp(source, f"{name}.mlp", config),
        output_norm=source.norm(f"{name}.post_mlp_layernorm", config.hidden_size),
    )


def take(config: LlamaConfig, source: Source) -> Weights:
    """The weights, each layer's with the two norms."""
    return llama.take(config, source, _take_layer)


FAMILY = Family(
    "Glm4Config",
    LlamaConfig,
    take,
    llama.layers,
    llama.forward,
    llama.head,
    requires=glm.FAMILY.requires,
    read_ropes=glm.read_ropes,
    old_fields=glm.FAMILY.old_fields,
)
