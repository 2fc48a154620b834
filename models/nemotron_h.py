"""Nemotron-H and Nemotron 3: blocks of Mamba-2, attention, an MLP or experts (NVIDIA, 2025, arXiv:2504.03624).

A block of the checkpoint has one of these, a norm before it and a sum behind. A layer here is a block that mixes tokens
and the MLP or the experts behind it, if these come next. Positions are known by the order alone: nothing is turned.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models import llama
from compiled_llm.models.config import FULL, ModelConfig, check_at_least_one
from compiled_llm.models.family import Family, MixedLayers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, AttentionWeights, attention
from compiled_llm.models.layers.mamba import MambaSizes, MambaWeights, mamba, take_mamba
from compiled_llm.models.layers.mlp import PlainMlpWeights, mlp
from compiled_llm.models.layers.moe import (
    Gate,
    Latent,
    MoeWeights,
    Router,
    Shared,
    check_grouped_router,
    experts,
    grouped_router,
)
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.models.llama import Weights
from compiled_llm.models.rope_config import Rope
from compiled_llm.models.sharding import REPLICATED, of_elements
from compiled_llm.models.weights import Source

MAMBA, MLP, EXPERTS = "linear_attention", "mlp", "moe"
MIXERS = (MAMBA, FULL)
RELU2 = Gate("relu2", is_gated=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NemotronHConfig(ModelConfig):
    layers_block_type: tuple[str, ...]
    mlp_bias: bool
    use_bias: bool  # of Mamba's projections
    use_conv_bias: bool
    mamba_num_heads: int
    mamba_head_dim: int
    n_groups: int
    ssm_state_size: int
    conv_kernel: int
    time_step_limit: tuple[float, float]
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    moe_shared_expert_intermediate_size: int
    moe_latent_size: int | None
    routed_scaling_factor: float
    n_group: int
    topk_group: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tie_word_embeddings:
            raise ValueError("config.json: tie_word_embeddings must be false, as transformers' model is, given true")
        self._check_blocks()
        names = "n_groups (or mamba_n_groups)", "ssm_state_size", "conv_kernel (or mamba_d_conv)"
        self.mamba.check(("mamba_num_heads", "mamba_head_dim", *names))
        limits = self.time_step_limit
        if len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
            raise ValueError(
                "config.json: time_step_limit (or mamba_dt_limit) must be the least and the largest time step, given "
                f"{limits!r:.100}"
            )
        if EXPERTS in self.layers_block_type:
            check_grouped_router(self)
            latent = () if self.moe_latent_size is None else ("moe_latent_size",)
            check_at_least_one(self, "moe_intermediate_size", "moe_shared_expert_intermediate_size", *latent)

    def _check_blocks(self) -> None:
        kinds, allowed = self.layers_block_type, {*MIXERS, MLP, EXPERTS}
        mixes = [kind in MIXERS for kind in kinds]
        if not allowed.issuperset(kinds) or not all(mixes[i] or (i and mixes[i - 1]) for i in range(len(kinds))):
            raise ValueError(
                "config.json: layers_block_type must be 'mamba' or 'attention', each of which may have one 'mlp' or "
                f"'moe' behind it, given {kinds!r:.200}"
            )

    @property
    def blocks(self) -> tuple[tuple[int, int | None], ...]:
        """Of each layer, the number of the block that mixes tokens, and that of the MLP or experts behind it."""
        kinds = (*self.layers_block_type, MAMBA)
        mixers = [i for i, kind in enumerate(self.layers_block_type) if kind in MIXERS]
        return tuple((i, None if kinds[i + 1] in MIXERS else i + 1) for i in mixers)

    @property
    def mamba(self) -> MambaSizes:
        return MambaSizes(
            self.mamba_num_heads, self.mamba_head_dim, self.n_groups, self.ssm_state_size, self.conv_kernel
        )

    @property
    def router(self) -> Router:
        return grouped_router(self)


class LayerWeights(NamedTuple):
    input_norm: Tensor  # [D] float32, of what mixes tokens
    attention: AttentionWeights | MambaWeights
    mlp_norm: Tensor | None = None  # [D] float32
    mlp: PlainMlpWeights | MoeWeights | None = None  # None: the layer has none


def take_attention(config: NemotronHConfig, source: Source, name: str) -> AttentionWeights:
    """The attention whose tensors' names begin with ``name``."""
    return source.attention(name, config)


def take_state(config: NemotronHConfig, source: Source, name: str) -> MambaWeights:
    """The same of Mamba-2."""
    d, bias, convolution_bias = config.hidden_size, config.use_bias, config.use_conv_bias
    return take_mamba(config.mamba, source, name, d, bias=bias, convolution_bias=convolution_bias)


def take_mlp(config: NemotronHConfig, source: Source, name: str, inner: int | None = None) -> PlainMlpWeights:
    """The same of an MLP of ``inner`` elements, by default ``intermediate_size``."""
    d, inner = config.hidden_size, inner or config.intermediate_size
    return source.plain_mlp(f"{name}.up_proj", f"{name}.down_proj", d, inner, config.mlp_bias)


def take_experts(config: NemotronHConfig, source: Source, name: str) -> MoeWeights:
    """The same of experts, and of the MLP that all tokens use."""
    d, inner, top_k = config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok
    size, latent = config.moe_latent_size or d, None
    if config.moe_latent_size is not None:
        latent = Latent(
            source.linear(StoredLinear(f"{name}.fc1_latent_proj", size, d, config.mlp_bias, cut=REPLICATED)),
            source.linear(StoredLinear(f"{name}.fc2_latent_proj", d, size, config.mlp_bias, cut=REPLICATED)),
        )
    count, own = config.n_routed_experts, of_elements(inner, "moe_intermediate_size")
    each = [f"{name}.experts.{e}" for e in range(count)]
    ups = [[StoredLinear(f"{e}.up_proj", inner, size, cut=own.outputs)] for e in each]
    downs = [[StoredLinear(f"{e}.down_proj", size, inner, cut=own.inputs)] for e in each]
    choice_bias = f"{name}.gate.e_score_correction_bias"
    routed = MoeWeights(
        router=source.linear(StoredLinear(f"{name}.gate", count, d, cut=REPLICATED), dtype=torch.float32),
        gate_up=source.experts(ups, top_k, f"{name}.experts.up_proj"),
        down=source.experts(downs, top_k, f"{name}.experts.down_proj"),
        used=source.used_experts(),
        choice_bias=source.tensor(choice_bias, (count,), dtype=torch.float32, cut=REPLICATED),
        latent=latent,
    )
    shared = take_mlp(config, source, f"{name}.shared_experts", config.moe_shared_expert_intermediate_size)
    return routed._replace(shared=Shared(shared, source.constant(1)))


_TAKE = {MAMBA: take_state, FULL: take_attention, MLP: take_mlp, EXPERTS: take_experts}


def take(config: NemotronHConfig, source: Source) -> Weights:
    """The weights."""

    def norm(block: int) -> Tensor:
        return source.norm(f"backbone.layers.{block}.norm", config.hidden_size, in_float32=True)

    def mixer(block: int) -> Any:
        return _TAKE[config.layers_block_type[block]](config, source, f"backbone.layers.{block}.mixer")

    embedding, head = source.embedding_and_head(
        "backbone.embeddings", "lm_head", config.vocab_size, config.hidden_size, tied=False
    )
    return Weights(
        embedding=embedding,
        layers=tuple(
            LayerWeights(norm(first), mixer(first), *(() if mlp is None else (norm(mlp), mixer(mlp))))
            for first, mlp in config.blocks
        ),
        final_norm=source.norm("backbone.norm_f", config.hidden_size, in_float32=True),
        head=head,
        ropes=(),
    )


def layers(config: NemotronHConfig) -> MixedLayers:
    """Each layer's attention or state."""
    attention = AttentionSpec(
        config.num_heads, config.num_kv_heads, config.head_dim, scale=config.head_dim**-0.5, rotary=False
    )
    state = config.mamba.spec(config.time_step_limit)
    kinds = [config.layers_block_type[first] for first, _ in config.blocks]
    return tuple(state if kind == MAMBA else attention for kind in kinds)


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: Any, layers: MixedLayers) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys, values and states go to ``kv_cache``."""
    x = Residual(weights.embedding.rows(step.input_ids), config.rms_norm_eps)
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        normed = x.normed(w.input_norm)
        if isinstance(spec, StateSpec):
            x += mamba(normed, w.attention, spec, cache, step)
        else:
            x += attention(normed, w.attention, None, spec, cache, step)
        normed = x.normed(w.mlp_norm)
        if isinstance(w.mlp, MoeWeights):
            x += experts(normed, w.mlp, config.router, step, RELU2)
        elif w.mlp is not None:
            x += mlp(normed, w.mlp, RELU2.activation)
    return x.tensor()


def no_ropes(config: Any) -> tuple[Rope, ...]:
    """Nothing is turned by its position, whatever the file says of angles."""
    return ()


def sizes(config: Any) -> dict[str, Any]:
    """The norms' epsilon has a name of its own; blocks are counted."""
    if not config.layers_block_type:
        raise ValueError("config.json: layers_block_type must have a block at least, given []")
    return {"rms_norm_eps": config.layer_norm_epsilon}


FAMILY = Family(
    "NemotronHConfig",
    NemotronHConfig,
    take,
    layers,
    forward,
    llama.head,
    requires={
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu", "swish"),
        "norm_topk_prob": (True,),
    },
    read_ropes=no_ropes,
    old_fields=(
        "layer_norm_epsilon",
        "hybrid_override_pattern",
        *("mamba_n_groups", "mamba_d_conv", "mamba_dt_limit", "mamba_conv_bias"),
    ),
    sizes=sizes,
)
