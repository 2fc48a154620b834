"""GLM-4 as published from April 2025 on: GLM with a norm after each block, too."""

from torch import Tensor

from compiled_llm.models import glm, llama
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.gemma2 import LayerWeights
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import attention
from compiled_llm.models.layers.mlp import mlp
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.layers.rope import rope_cos_sin
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


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: LlamaConfig, layers: Layers) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
    x = Residual(weights.embedding.rows(step.input_ids), config.rms_norm_eps)
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        x += attention(x.normed(w.input_norm), w.attention, cos_sin, spec, cache, step).normed(w.attention_norm)
        x += mlp(x.normed(w.mlp_norm), w.mlp).normed(w.output_norm)
    return x.tensor()


FAMILY = Family(
    "Glm4Config",
    LlamaConfig,
    take,
    llama.layers,
    forward,
    llama.head,
    requires=glm.FAMILY.requires,
    read_ropes=glm.read_ropes,
    old_fields=glm.FAMILY.old_fields,
)
