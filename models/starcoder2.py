"""StarCoder 2 (Lozhkov et al., 2024, arXiv:2402.19173): Mistral with layer norms, biases and a plain MLP."""

import dataclasses
from typing import Any

from torch import Tensor

from compiled_llm.models.config import ModelConfig, check_window
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.gpt_neox import LayerWeights, Weights
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, attention
from compiled_llm.models.layers.mlp import PlainMlpWeights, plain_activation, plain_mlp
from compiled_llm.models.layers.norm import add_layer_norm
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.linears.protocol import Part
from compiled_llm.models.weights import Source
from compiled_llm.ops import layer_norm


@dataclasses.dataclass(frozen=True)
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
        mlp=PlainMlpWeights(
            up=source.linear(Part(f"{name}.mlp.c_fc", intermediate, d, bias)),
            down=source.linear(Part(f"{name}.mlp.c_proj", d, intermediate, bias)),
        ),
    )


def take(config: Starcoder2Config, source: Source) -> Weights:
    """The weights."""
    embedding, head = source.embedding_and_head(
        "model.embed_tokens", "lm_head", config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    return Weights(
        embedding=embedding,
        layers=tuple(_take_layer(config, source, f"model.layers.{i}") for i in range(config.num_layers)),
        final_norm=source.layer_norm("model.norm", config.hidden_size),
        head=head,
        ropes=(source.rope(config.ropes[0], config.head_dim, config.max_position_embeddings),),
    )


def layers(config: Starcoder2Config) -> Layers:
    """All are alike."""
    scale, window = config.head_dim**-0.5, config.sliding_window or 0
    return (AttentionSpec(config.num_heads, config.num_kv_heads, config.head_dim, scale, window),) * config.num_layers


def forward(
    weights: Weights, step: StepInput, kv_cache: KVCache, config: Starcoder2Config, layers: Layers, max_query_len: int
) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
    eps, activation = config.rms_norm_eps, plain_activation(config.hidden_act)
    x = weights.embedding.rows(step.input_ids)
    delta: Tensor | None = None  # what the last block adds to x
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    for w, cache, spec in zip(weights.layers, kv_cache, layers, strict=True):
        x, normed = add_layer_norm(x, delta, w.input_norm, eps)
        delta = attention(normed, w.attention, cos_sin, cache, step, spec, eps, max_query_len)
        x, normed = add_layer_norm(x, delta, w.mlp_norm, eps)
        delta = plain_mlp(normed, w.mlp, activation)
    assert delta is not None
    return x + delta


def head(weights: Weights, rows: Tensor, config: Starcoder2Config) -> Tensor:
    """Logits ``[R, V]`` of rows ``[R, D]`` of what ``forward`` gave."""
    norm = weights.final_norm
    return weights.head.apply(layer_norm(rows, norm.weight, norm.bias, config.rms_norm_eps))


def sizes(config: Any) -> dict[str, Any]:
    """The norms' epsilon has a name of its own."""
    return {"rms_norm_eps": config.norm_epsilon}


FAMILY = Family(
    "Starcoder2Config",
    Starcoder2Config,
    take,
    layers,
    forward,
    head,
    old_fields=("head_dim", "norm_epsilon"),
    sizes=sizes,
)
