"""LFM2: short convolutions in most layers, attention in the others (Liquid AI, 2025, arXiv:2511.23404)."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from compiled_llm.models import llama
from compiled_llm.models.config import FULL, ModelConfig, check_layer_types
from compiled_llm.models.config_values import check_size
from compiled_llm.models.family import Family, MixedLayers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, AttentionWeights, attention
from compiled_llm.models.layers.mlp import MlpWeights, mlp
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.layers.short_convolution import ShortConvolutionWeights, gated_convolution
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.models.llama import LayerWeights, TakeMlp, Weights
from compiled_llm.models.sharding import by_outputs, of_elements
from compiled_llm.models.weights import Source
from compiled_llm.ops.recurrent.short_convolution import MAX_WIDTH

CONVOLUTION = "conv"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2Config(ModelConfig):
    conv_bias: bool
    conv_L_cache: int  # tokens that a convolution sees
    layer_types: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types(self, CONVOLUTION, FULL)
        if not 2 <= self.conv_L_cache <= MAX_WIDTH:
            raise ValueError(f"config.json: conv_L_cache must be from 2 to {MAX_WIDTH}, given {self.conv_L_cache}")


def take_mlp(config: Lfm2Config, source: Source, name: str) -> MlpWeights:
    """The MLP of the layer whose tensors' names begin with ``name``."""
    d, inner = config.hidden_size, config.intermediate_size
    return source.gated_mlp(f"{name}.feed_forward", d, inner, names=("w1", "w3", "w2"))


def take_layer(config: Any, source: Source, name: str, take_mlp: TakeMlp = take_mlp) -> LayerWeights:
    """The layer whose tensors' names begin with ``name``. A family with experts passes its own ``take_mlp``."""
    d = config.hidden_size
    is_convolution = config.layer_types[int(name.rsplit(".", 1)[1])] == CONVOLUTION
    return LayerWeights(
        input_norm=source.norm(f"{name}.operator_norm", d),
        attention=(take_convolution if is_convolution else take_attention)(config, source, name),
        mlp_norm=source.norm(f"{name}.ffn_norm", d),
        mlp=take_mlp(config, source, name),
    )


def take_convolution(config: Lfm2Config, source: Source, name: str) -> ShortConvolutionWeights:
    """That of the layer whose tensors' names begin with ``name``."""
    d, width, bias = config.hidden_size, config.conv_L_cache, config.conv_bias
    own = of_elements(d, "hidden_size")
    return ShortConvolutionWeights(
        qkv=source.linear(StoredLinear(f"{name}.conv.in_proj", 3 * d, d, bias, cut=by_outputs(own, own, own))),
        o=source.linear(StoredLinear(f"{name}.conv.out_proj", d, d, bias, cut=own.inputs)),
        weight=source.tensor(f"{name}.conv.conv.weight", (d, 1, width), cut=own.outputs).flatten(1),
        bias=source.tensor(f"{name}.conv.conv.bias", (d,), cut=own.outputs) if bias else None,
    )


def take_attention(config: Lfm2Config, source: Source, name: str) -> AttentionWeights:
    """The same of a layer with attention."""
    name = f"{name}.self_attn"
    q_norm, k_norm = (source.norm(f"{name}.{x}_layernorm", config.head_dim) for x in "qk")
    return source.attention(name, config, o_name="out_proj")._replace(q_norm=q_norm, k_norm=k_norm)


def take(config: Any, source: Source, take_layer: Callable[[Any, Source, str], LayerWeights] = take_layer) -> Weights:
    """The weights. The norm before the head has the name of one of the embedding."""

    def take_norm(source: Source, _: str, size: int) -> Tensor:
        return source.norm("model.embedding_norm", size)

    return llama.take(config, source, take_layer, take_norm)


def layers(config: Lfm2Config) -> MixedLayers:
    """Each layer's attention or state."""
    attention = AttentionSpec(config.num_heads, config.num_kv_heads, config.head_dim, scale=config.head_dim**-0.5)
    state = StateSpec((config.conv_L_cache - 1, config.hidden_size // config.num_ranks))
    return tuple(state if kind == CONVOLUTION else attention for kind in config.layer_types)


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: Lfm2Config, layers: MixedLayers) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys, values and states go to ``kv_cache``."""
    x = Residual(weights.embedding.rows(step.input_ids), config.rms_norm_eps)
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        normed = x.normed(w.input_norm)
        if isinstance(spec, StateSpec):
            x += gated_convolution(normed, w.attention, spec, cache, step)
        else:
            x += attention(normed, w.attention, cos_sin, spec, cache, step)
        x += mlp(x.normed(w.mlp_norm), w.mlp)
    return x.tensor()


def sizes(config: Any) -> dict[str, Any]:
    """The size of the MLPs, which the file may give before it is cut to two thirds and rounded up."""
    size = config.intermediate_size
    check_size("intermediate_size", size, "intermediate_size (or block_ff_dim)")
    check_size("intermediate_size", config.block_multiple_of, "block_multiple_of")
    if not 0 < config.block_ffn_dim_multiplier <= 2**16:
        raise ValueError(
            "config.json: block_ffn_dim_multiplier must be a positive number, given "
            f"{config.block_ffn_dim_multiplier!r:.100}"
        )
    if config.block_auto_adjust_ff_dim:
        size = int(2 * size / 3)
        multiple = config.block_multiple_of
        size = -(-int(config.block_ffn_dim_multiplier * size) // multiple) * multiple
    return {"intermediate_size": size, "rms_norm_eps": config.norm_eps}


FAMILY = Family(
    "Lfm2Config",
    Lfm2Config,
    take,
    layers,
    forward,
    llama.head,
    old_fields=(
        "norm_eps",
        "head_dim",
        "block_auto_adjust_ff_dim",
        "block_ff_dim",
        "block_ffn_dim_multiplier",
        "block_multiple_of",
        "full_attn_idxs",
        "tie_embedding",
    ),
    sizes=sizes,
)
