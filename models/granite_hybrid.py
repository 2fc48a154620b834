"""Granite 4: Mamba-2 in most layers, attention in the others, an MLP or experts beside one; Granite's multipliers."""

import dataclasses
import functools
import math
from typing import Any

from torch import Tensor

from compiled_llm.models import granite, llama
from compiled_llm.models.config import FULL, check_at_least_one, check_layer_types
from compiled_llm.models.family import Family, MixedLayers
from compiled_llm.models.granite import GraniteConfig
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, attention
from compiled_llm.models.layers.mamba import MambaSizes, mamba, take_mamba
from compiled_llm.models.layers.mlp import MlpWeights, mlp
from compiled_llm.models.layers.moe import MoeWeights, Router, Shared, check_router, experts
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.models.llama import LayerWeights, Weights
from compiled_llm.models.sharding import REPLICATED, by_outputs, of_elements
from compiled_llm.models.weights import Source

LINEAR = "linear_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteHybridConfig(GraniteConfig):
    layer_types: tuple[str, ...]
    position_embedding_type: str | None
    num_local_experts: int
    num_experts_per_tok: int
    shared_intermediate_size: int
    mamba_n_heads: int
    mamba_n_groups: int
    mamba_d_state: int
    mamba_d_head: int
    mamba_d_conv: int
    mamba_conv_bias: bool
    mamba_proj_bias: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types(self, LINEAR, FULL, said="'mamba' or 'attention'")
        if self.position_embedding_type not in (None, "nope", "rope"):
            raise ValueError(
                "config.json: position_embedding_type must be 'rope', 'nope' or null, given "
                f"{self.position_embedding_type!r:.100}"
            )
        if self.num_local_experts:
            check_router(self, "num_local_experts")
        check_at_least_one(self, "shared_intermediate_size")
        self.mamba.check(("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"))

    @property
    def mamba(self) -> MambaSizes:
        return MambaSizes(
            self.mamba_n_heads, self.mamba_d_head, self.mamba_n_groups, self.mamba_d_state, self.mamba_d_conv
        )


def take_mlp(config: GraniteHybridConfig, source: Source, name: str) -> MlpWeights | MoeWeights:
    """The MLP that all tokens use, of the layer whose tensors' names begin with ``name``, and its experts."""
    if config.gguf_layout:
        return _take_separate_mlp(config, source, f"{name}.mlp", f"{name}.block_sparse_moe.router.layer")
    d, inner = config.hidden_size, config.shared_intermediate_size
    own = of_elements(inner, "shared_intermediate_size")
    gate_up = StoredLinear(f"{name}.shared_mlp.input_linear", 2 * inner, d, cut=by_outputs(own, own))
    down = StoredLinear(f"{name}.shared_mlp.output_linear", d, inner, cut=own.inputs)
    shared = MlpWeights(source.linear(gate_up), source.linear(down))
    if not config.num_local_experts:
        return shared
    inner, name = config.intermediate_size, f"{name}.block_sparse_moe"
    own = of_elements(inner)
    stacked = functools.partial(
        source.stacked_experts, num_experts=config.num_local_experts, top_k=config.num_experts_per_tok,
        transposed=False, bias=False,
    )  # fmt: skip
    others = {
        "input_linear": "experts.gate_up_proj",
        "output_linear": "experts.down_proj",
        "router.layer": "router.weight",
    }
    for stored, other in others.items():
        source.may_be_called(f"{name}.{stored}.weight", f"{name}.{other}")
    return MoeWeights(
        router=source.linear(StoredLinear(f"{name}.router.layer", config.num_local_experts, d, cut=REPLICATED)),
        gate_up=stacked(f"{name}.input_linear.weight", out_features=2 * inner, in_features=d, cut=by_outputs(own, own)),
        down=stacked(f"{name}.output_linear.weight", out_features=d, in_features=inner, cut=own.inputs),
        used=source.used_experts(),
        shared=Shared(shared, source.constant(1, config.residual_multiplier)),
    )


def _take_separate_mlp(config: GraniteHybridConfig, source: Source, name: str, router: str) -> MlpWeights | MoeWeights:
    """As ``take_mlp``, of GGUF files, which have gate and up in a tensor each."""
    d, inner, shared = config.hidden_size, config.shared_intermediate_size, name
    if config.num_local_experts:
        shared = f"{name}.shared_expert"
    mlp = source.gated_mlp(shared, d, inner)
    if not config.num_local_experts:
        return mlp
    count, top_k = config.num_local_experts, config.num_experts_per_tok
    routed = source.mixture(router, f"{name}.experts", config, count, top_k, config.intermediate_size)
    return routed._replace(shared=Shared(mlp, source.constant(1, config.residual_multiplier)))


def take_layer(config: GraniteHybridConfig, source: Source, name: str) -> LayerWeights:
    """The layer whose tensors' names begin with ``name``."""
    attention: Any
    if config.layer_types[int(name.rsplit(".", 1)[1])] == LINEAR:
        bias, convolution_bias = config.mamba_proj_bias, config.mamba_conv_bias
        attention = take_mamba(
            config.mamba, source, f"{name}.mamba", config.hidden_size, bias=bias, convolution_bias=convolution_bias
        )
    else:
        attention = source.attention(f"{name}.self_attn", config, bias=config.attention_bias)
    return LayerWeights(
        input_norm=source.norm(f"{name}.input_layernorm", config.hidden_size),
        attention=attention,
        mlp_norm=source.norm(f"{name}.post_attention_layernorm", config.hidden_size),
        mlp=take_mlp(config, source, name),
    )


def take(config: GraniteHybridConfig, source: Source) -> Weights:
    """The weights."""
    return llama.take(config, source, take_layer)


def layers(config: GraniteHybridConfig) -> MixedLayers:
    """Each layer's attention or state."""
    attention = AttentionSpec(
        config.num_heads, config.num_kv_heads, config.head_dim, scale=config.attention_multiplier,
        rotary=config.position_embedding_type == "rope",
    )  # fmt: skip
    state = config.mamba.spec()
    return tuple(state if kind == LINEAR else attention for kind in config.layer_types)


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: Any, layers: MixedLayers) -> Tensor:
    """What ``head`` takes, ``[T, D]``, normalised; keys, values and states go to ``kv_cache``."""
    embeddings, multiplier = weights.embedding.rows(step.input_ids), config.residual_multiplier
    x = Residual(embeddings * config.embedding_multiplier, config.rms_norm_eps)
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    router = Router(config.num_experts_per_tok, "softmax_of_chosen")
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        normed = x.normed(w.input_norm)
        if isinstance(spec, StateSpec):
            x += mamba(normed, w.attention, spec, cache, step) * multiplier
        else:
            x += attention(normed, w.attention, cos_sin, spec, cache, step) * multiplier
        normed = x.normed(w.mlp_norm)
        out = experts(normed, w.mlp, router, step) if isinstance(w.mlp, MoeWeights) else mlp(normed, w.mlp)
        x += out * multiplier
    return x.normed(weights.final_norm).tensor()


_NO_LIMITS = ([0.0, math.inf], (0.0, math.inf))  # of time steps


def sizes(config: Any) -> dict[str, Any]:
    """The size of experts, which a model without any need not have."""
    return {"intermediate_size": config.intermediate_size or config.shared_intermediate_size}


def check(config: dict[str, Any]) -> None:
    """``ValueError`` for sizes of Mamba that transformers' class reckons with."""
    for name in ("mamba_n_heads", "mamba_expand"):
        if config[name] is None or not 0 < config[name] <= 2**24:
            raise ValueError(f"config.json: {name} must be an integer of at least 1, given {config[name]!r:.100}")
    inner, heads, size = config["mamba_expand"] * config["hidden_size"], config["mamba_n_heads"], config["mamba_d_head"]
    if inner % heads or size not in ("auto", inner // heads):
        raise ValueError(
            f"config.json: mamba_n_heads * mamba_d_head must be mamba_expand * hidden_size={inner}, given {heads} and "
            f"{size!r:.100}"
        )


FAMILY = Family(
    "GraniteMoeHybridConfig",
    GraniteHybridConfig,
    take,
    layers,
    forward,
    granite.head,
    requires={**llama.FAMILY.requires, "time_step_limit": _NO_LIMITS},
    old_fields=("head_dim", "mamba_expand", "layers_block_type"),
    sizes=sizes,
    check=check,
    ends_normed=True,
)
