"""Granite: Llama with four multipliers, of embeddings, scores, what a block adds, and logits (as in muP; Yang et al.,
2022, arXiv:2203.03466).
"""

import dataclasses

from torch import Tensor

from compiled_llm.models import llama
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import attention
from compiled_llm.models.layers.mlp import mlp
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.llama import LlamaConfig, Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float  # logits are divided by it

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"):
            value = getattr(self, name)
            if not 0 < value <= 1e6:
                raise ValueError(f"config.json: {name} must be a positive number, at most 1e6, given {value}")


def layers(config: GraniteConfig) -> Layers:
    """Llama's, with the multiplier of scores in the place of ``H ** -0.5``."""
    return tuple(dataclasses.replace(spec, scale=config.attention_multiplier) for spec in llama.layers(config))


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: GraniteConfig, layers: Layers) -> Tensor:
    """What ``head`` takes, ``[T, D]``, normalised; the step's keys and values go to ``kv_cache``."""
    embeddings, multiplier = weights.embedding.rows(step.input_ids), config.residual_multiplier
    x = Residual(embeddings * config.embedding_multiplier, config.rms_norm_eps)
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        x += attention(x.normed(w.input_norm), w.attention, cos_sin, spec, cache, step) * multiplier
        x += mlp(x.normed(w.mlp_norm), w.mlp) * multiplier
    # Normalised here: the op rounds what was multiplied before it adds it, in compiled code as well.
    return x.normed(weights.final_norm).tensor()


def head(weights: Weights, rows: Tensor, config: GraniteConfig) -> Tensor:
    """Logits ``[R, V]`` of rows ``[R, D]`` of what ``forward`` gave."""
    # Before the head, since the compiler may leave out the rounding of what is behind it.
    return weights.head.apply(rows * (1 / config.logits_scaling))


FAMILY = Family(
    "GraniteConfig",
    GraniteConfig,
    llama.take,
    layers,
    forward,
    head,
    requires=llama.FAMILY.requires,
    old_fields=("head_dim",),
    ends_normed=True,
)
