"""Qwen3 (dense): Llama with an RMS norm on every head's query and key (Yang et al., 2025, arXiv:2505.09388)."""

from collections.abc import Callable

from torch import Tensor

from compiled_llm.models import llama
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.llama import LayerWeights, Stream, Weights, embed_step, forward, head_step, layer_step
from compiled_llm.models.weights import Convert

__all__ = [
    "HF_CONFIG",
    "Stream",
    "Weights",
    "assemble",
    "checkpoint_shapes",
    "embed_step",
    "forward",
    "head_step",
    "layer_step",
]

HF_CONFIG = "Qwen3Config"


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a Hugging Face checkpoint of this config holds."""
    shapes = llama.checkpoint_shapes(config)
    for i in range(config.num_layers):
        for name in ("q_norm", "k_norm"):
            shapes[f"model.layers.{i}.self_attn.{name}.weight"] = (config.head_dim,)
    return shapes


def assemble_layer(config: ModelConfig, take: Callable[[str], Tensor]) -> LayerWeights:
    """One layer from its checkpoint tensors: Llama's, with the two norms."""
    layer = llama.assemble_layer(config, take)
    q_norm, k_norm = take("self_attn.q_norm.weight"), take("self_attn.k_norm.weight")
    return layer._replace(attention=layer.attention._replace(q_norm=q_norm, k_norm=k_norm))


def assemble(config: ModelConfig, take: Callable[[str], Tensor], convert: Convert) -> Weights:
    """The weights from checkpoint tensors, each linear layer made into what ``convert`` gives."""
    return llama.assemble(config, take, convert, assemble_layer)
