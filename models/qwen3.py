"""Qwen3 (dense): Qwen2 with an RMS norm on every head's query and key (Yang et al., 2025, arXiv:2505.09388)."""

from compiled_llm.models import llama, qwen2
from compiled_llm.models.family import Family
from compiled_llm.models.llama import LayerWeights, LlamaConfig, TakeMlp, Weights
from compiled_llm.models.qwen2 import Qwen2Config
from compiled_llm.models.weights import Source


def take_layer(config: LlamaConfig, source: Source, name: str, take_mlp: TakeMlp = llama.take_mlp) -> LayerWeights:
    """Llama's layer, with the two norms; biases where ``attention_bias`` says so."""
    layer = llama.take_layer(config, source, name, take_mlp)
    q_norm, k_norm = (source.norm(f"{name}.self_attn.{x}_norm", config.head_dim) for x in "qk")
    return layer._replace(attention=layer.attention._replace(q_norm=q_norm, k_norm=k_norm))


def take(config: Qwen2Config, source: Source) -> Weights:
    """The weights, each layer's with the two norms."""
    return llama.take(config, source, take_layer)


FAMILY = Family(
    "Qwen3Config", Qwen2Config, take, qwen2.layers, llama.forward, llama.head, requires=llama.FAMILY.requires
)
