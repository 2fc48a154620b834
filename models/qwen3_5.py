"""Qwen3.5, dense: Gated DeltaNet in most layers, attention with an output gate in the others.

The layers are Qwen3-Next's (Qwen team, 2025), whose projections of DeltaNet lie in two tensors and here in four.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models import llama
from compiled_llm.models.config import FULL, MtpConfig, check_layer_types, num_mtp_layers
from compiled_llm.models.family import Family, MixedLayers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec
from compiled_llm.models.layers.delta_net import DeltaNetWeights, delta_net
from compiled_llm.models.layers.gated_attention import gated_attention, take_gated_attention
from compiled_llm.models.layers.mlp import mlp
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.linears.protocol import Linear, StoredLinear
from compiled_llm.models.llama import LayerWeights, LlamaConfig, TakeMlp, Weights
from compiled_llm.models.rope_config import Rope, read_partial_rope
from compiled_llm.models.sharding import Cut, Section
from compiled_llm.models.weights import Source
from compiled_llm.ops.recurrent.short_convolution import MAX_WIDTH

LINEAR = "linear_attention"
MTP_FIELD = "mtp_num_hidden_layers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen35Config(LlamaConfig, MtpConfig):
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    layer_types: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types(self, LINEAR, FULL)
        width = self.linear_conv_kernel_dim
        if not 2 <= width <= MAX_WIDTH:
            raise ValueError(f"config.json: linear_conv_kernel_dim must be from 2 to {MAX_WIDTH}, given {width}")
        for field in ("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"):
            if not 0 < getattr(self, field) <= 2**16:
                raise ValueError(f"config.json: {field} must be from 1 to {2**16}, given {getattr(self, field)!r:.100}")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                "config.json: linear_num_value_heads must be a multiple of linear_num_key_heads, given "
                f"{self.linear_num_value_heads} and {self.linear_num_key_heads}"
            )

    @property
    def key_size(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_size(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def convolved_size(self) -> int:
        return 2 * self.key_size + self.value_size

    def of_value_heads(self, size: int) -> Section:
        """``size`` elements of value heads, for ranks to share."""
        return Section(size, self.linear_num_value_heads, "linear_num_value_heads")

    @property
    def convolved_sections(self) -> tuple[Section, ...]:
        """Those of queries, keys and values."""
        keys = Section(self.key_size, self.linear_num_key_heads, "linear_num_key_heads", repeats=True)
        return keys, keys, self.of_value_heads(self.value_size)


TakeProjections = Callable[[Any, Source, str], Linear]


def take_projections(config: Qwen35Config, source: Source, name: str) -> Linear:
    """``DeltaNetWeights.qkv`` of the layer whose tensors' names begin with ``name``."""
    heads, d = config.linear_num_value_heads, config.hidden_size
    sizes = {"qkv": config.convolved_size, "z": config.value_size, "b": heads, "a": heads}
    orders = {x: by_key_head(config, 2 * config.key_size if x == "qkv" else 0) for x in sizes}
    cuts = {x: config.of_value_heads(size).outputs for x, size in sizes.items() if x != "qkv"}
    cuts["qkv"] = Cut(config.convolved_sections)
    return source.linear(
        *(
            StoredLinear(f"{name}.in_proj_{x}", size, d, arrange=orders[x], is_of_file=True, cut=cuts[x])
            for x, size in sizes.items()
        )
    )


def by_key_head(config: Qwen35Config, before: int = 0) -> Callable[[Tensor], Tensor] | None:
    """What puts the rows of value heads behind one another that have the same key head. None: they lie so.

    GGUF files of Qwen3.5 have the first value head of each key head, then the second of each. ``before``: rows of
    something else, which are in front.
    """
    key_heads = config.linear_num_key_heads
    if not config.gguf_layout.startswith("qwen35") or config.linear_num_value_heads == key_heads:
        return None

    def arranged(rows: Tensor) -> Tensor:
        values = rows[before:].unflatten(0, (-1, key_heads, (len(rows) - before) // config.linear_num_value_heads))
        return torch.cat([rows[:before], values.transpose(0, 1).flatten(0, 2)])

    return arranged


def take_delta_net(
    config: Qwen35Config, source: Source, name: str, take_projections: TakeProjections
) -> DeltaNetWeights:
    """The weights of Gated DeltaNet whose tensors' names begin with ``name``."""
    heads, channels, width = config.linear_num_value_heads, config.convolved_size, config.linear_conv_kernel_dim
    in_order, of_values = by_key_head(config), config.of_value_heads(config.value_size)
    of_heads = config.of_value_heads(heads).outputs
    o = StoredLinear(f"{name}.out_proj", config.hidden_size, of_values.size, arrange_inputs=in_order, is_of_file=True)
    return DeltaNetWeights(
        qkv=take_projections(config, source, name),
        o=source.linear(o._replace(cut=of_values.inputs)),
        convolution=source.tensor(
            f"{name}.conv1d.weight", (channels, 1, width), arrange=by_key_head(config, 2 * config.key_size),
            cut=Cut(config.convolved_sections),
        ).flatten(1),
        norm=source.norm(f"{name}.norm", config.linear_value_head_dim),
        **{
            x: source.tensor(f"{name}.{x}", (heads,), dtype=torch.float32, arrange=in_order, cut=of_heads)
            for x in ("A_log", "dt_bias")
        },
    )  # fmt: skip


def take_layer(
    config: Any,
    source: Source,
    name: str,
    take_mlp: TakeMlp = llama.take_mlp,
    take_projections: TakeProjections = take_projections,
) -> LayerWeights:
    """The layer whose tensors' names begin with ``name``. A family with other tensors passes what takes them."""
    attention: Any
    if config.layer_types[int(name.rsplit(".", 1)[1])] == LINEAR:
        attention = take_delta_net(config, source, f"{name}.linear_attn", take_projections)
    else:
        attention = take_gated_attention(config, source, f"{name}.self_attn", bias=config.attention_bias)
    return LayerWeights(
        input_norm=source.norm_plus_one(f"{name}.input_layernorm", config.hidden_size),
        attention=attention,
        mlp_norm=source.norm_plus_one(f"{name}.post_attention_layernorm", config.hidden_size),
        mlp=take_mlp(config, source, name),
    )


def take(config: Any, source: Source, take_layer: Callable[[Any, Source, str], LayerWeights] = take_layer) -> Weights:
    """The weights. A family with other layers passes its own ``take_layer``."""
    return llama.take(config, source, take_layer, Source.norm_plus_one)


def layers(config: Qwen35Config) -> MixedLayers:
    """Each layer's attention or state."""
    attention = AttentionSpec(config.num_heads, config.num_kv_heads, config.head_dim, scale=config.head_dim**-0.5)
    heads, dk, dv = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    runs = config.key_size, config.key_size, config.value_size
    state = StateSpec((config.linear_conv_kernel_dim - 1, config.convolved_size), (heads, dk, dv), runs=runs)
    return tuple(state if kind == LINEAR else attention for kind in config.layer_types)


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: Any, layers: MixedLayers) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys, values and states go to ``kv_cache``."""
    x = Residual(weights.embedding.rows(step.input_ids), config.rms_norm_eps)
    return through_layers(x, weights, step, kv_cache, config, layers).tensor()


def through_layers(x: Residual, weights: Any, step: StepInput, kv_cache: KVCache, config: Any, layers: Any) -> Residual:
    """What all layers make of ``x``; of ``weights``, ``layers`` and ``ropes`` are read."""
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        normed = x.normed(w.input_norm)
        if isinstance(spec, StateSpec):
            x += delta_net(normed, w.attention, spec, cache, step)
        else:
            x += gated_attention(normed, w.attention, cos_sin, spec, cache, step)
        x += mlp(x.normed(w.mlp_norm), w.mlp)
    return x


def read_ropes(config: Any) -> tuple[Rope, ...]:
    """One for all layers, which turns a part of each head.

    Positions of text are the same in all three dimensions that those of pictures have, so how these share a head's
    frequencies (``mrope_section``) is of no account.
    """
    section = config.rope_parameters.get("mrope_section", [1, 1, 1])
    if not isinstance(section, list) or [type(x) for x in section] != [int] * 3:
        raise ValueError(f"config.json: mrope_section must be a list of three integers, given {section!r:.100}")
    own = {k: v for k, v in config.rope_parameters.items() if k not in ("mrope_section", "mrope_interleaved")}
    return (read_partial_rope(own, config.max_position_embeddings),)


FAMILY = Family(
    "Qwen3_5TextConfig",
    Qwen35Config,
    take,
    layers,
    forward,
    llama.head,
    requires=llama.FAMILY.requires,
    read_ropes=read_ropes,
    old_fields=("full_attention_interval", "partial_rotary_factor", MTP_FIELD),
    sizes=lambda config: num_mtp_layers(config, MTP_FIELD),
)
