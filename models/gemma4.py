"""Gemma 4 (Google DeepMind, 2026): its language model, dense or with experts. The reference is transformers' gemma4.

Layers without a window have larger heads than those with one, may have fewer keys and values, and may take keys as
values. The last layers may read the cache of an earlier one. Each layer may have an embedding of tokens of its own.
"""

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor

from compiled_llm.models.config import FULL, SLIDING, WindowedConfig, check_positive
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.gemma2 import rounded
from compiled_llm.models.inputs import KVCache, LayerCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, AttentionWeights, attend, attended
from compiled_llm.models.layers.mlp import MlpWeights, mlp
from compiled_llm.models.layers.moe import Gate, MoeWeights, Router, check_router, experts
from compiled_llm.models.layers.residual import BlockOutput, Normed, Residual
from compiled_llm.models.layers.rope import rope_cos_sin
from compiled_llm.models.linears.protocol import Linear, StoredLinear
from compiled_llm.models.rope_config import Rope, check_without_scaling, read_ropes_by_layer_type
from compiled_llm.models.sharding import REPLICATED, Section, of_heads, of_kv_heads
from compiled_llm.models.weights import Source
from compiled_llm.ops import rms_norm, scaled_sum, soft_cap, sum_of_norms
from compiled_llm.ops.attention.heads import turned_heads

_UNUSED = "keys and values of layers that share those of others"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(WindowedConfig):
    """``head_dim`` and ``num_kv_heads`` are those of layers with a window. What has a default, some sizes have."""

    attention_bias: bool
    attention_k_eq_v: bool
    final_logit_softcapping: float | None
    num_kv_shared_layers: int
    global_head_dim: int
    num_global_kv_heads: int
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {"global_head_dim": self.global_head_dim, "num_global_key_value_heads": self.num_global_kv_heads}
        if self.enable_moe_block:
            for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
                if getattr(self, name) is None:
                    raise ValueError(f"config.json: {name} must be from 1 where enable_moe_block is true, given None")
            check_router(self, "num_experts", "top_k_experts")
            sizes["moe_intermediate_size"] = self.moe_intermediate_size or 0
        for name, value in sizes.items():
            if not 0 < value <= 2**16:
                raise ValueError(f"config.json: {name} must be from 1 to {2**16}, given {value!r:.100}")
        if self.global_head_dim % 2 or self.num_heads % self.num_global_kv_heads:
            raise ValueError(
                "config.json: global_head_dim must be even, and num_attention_heads a multiple of "
                f"num_global_key_value_heads, given {self.global_head_dim}, {self.num_heads} and "
                f"{self.num_global_kv_heads}"
            )
        self._check_shared_layers()
        self._check_per_layer_inputs()
        if self.final_logit_softcapping is not None:
            check_positive(self, "final_logit_softcapping")

    def _check_shared_layers(self) -> None:
        own = self.layer_types[: self.num_layers - self.num_kv_shared_layers]
        if not 0 <= self.num_kv_shared_layers < self.num_layers or {*own} != {*self.layer_types}:
            raise ValueError(
                "config.json: num_kv_shared_layers must leave a layer of each of layer_types with keys and values of "
                f"its own, given {self.num_kv_shared_layers} of {self.num_layers} layers"
            )

    def _check_per_layer_inputs(self) -> None:
        size, vocab_size = self.hidden_size_per_layer_input, self.vocab_size_per_layer_input
        if not 0 <= size <= 2**24 or (size and not self.vocab_size <= vocab_size <= 2**24):
            raise ValueError(
                "config.json: hidden_size_per_layer_input must be from 0 to 2**24, and unless it is 0 "
                f"vocab_size_per_layer_input from vocab_size={self.vocab_size} to 2**24, given {size} and {vocab_size}"
            )

    def cache_shared_by(self, layer: int) -> int | None:
        """The earlier layer whose keys and values layer number ``layer`` reads: the last of its type. None: its own."""
        first = self.num_layers - self.num_kv_shared_layers
        if layer < first:
            return None
        return max(i for i in range(first) if self.layer_types[i] == self.layer_types[layer])

    @property
    def router(self) -> Router:
        return Router(self.top_k_experts or 0, "softmax_of_chosen", multiplier=self.hidden_size**-0.5)


class MoeBesideMlp(NamedTuple):
    """A mixture of experts over what the MLP gets, too; their sum is the layer's. Norms are ``[D]``."""

    norm: Tensor  # float32, of what the experts get
    experts: MoeWeights  # whose router has a norm of its own, in the model's dtype
    output_norm: Tensor  # float32, of what the experts gave
    mlp_output_norm: Tensor  # float32, of what the MLP gave


class PerLayerWeights(NamedTuple):
    """What adds a layer's own embedding of a token, of P elements."""

    gate: Linear  # [P, D]
    projection: Linear  # [D, P]
    norm: Tensor  # [D] float32


class LayerWeights(NamedTuple):
    input_norm: Tensor  # [D] float32, as all norms where nothing else is said
    attention: AttentionWeights
    attention_norm: Tensor  # [D], of what attention gave
    mlp_norm: Tensor  # [D]
    mlp: MlpWeights
    moe: MoeBesideMlp | None
    output_norm: Tensor  # [D], of what the MLP and experts gave
    per_layer: PerLayerWeights | None
    scalar: Tensor  # [1] float32, of what the layer gives


class PerLayerInputs(NamedTuple):
    """What makes the embeddings of all layers, L * P elements a token, of its id and its first embedding."""

    projection: Linear  # [L * P, D]
    norm: Tensor  # [P] float32
    scale: Tensor  # [1] float32, of the sum of the two


class Weights(NamedTuple):
    embedding: Linear  # [V, D]
    per_layer_embedding: Linear | None  # [V, L * P]
    per_layer_inputs: PerLayerInputs | None
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [D] float32
    head: Linear  # [V, D]
    ropes: tuple[Tensor, ...]  # [max_position_embeddings, H] float32: of layers without a window, and with one


def layers(config: Gemma4Config) -> Layers:
    """Those of ``layer_types``. Scores are not scaled: queries and keys have norms."""
    full = AttentionSpec(config.num_heads, config.num_global_kv_heads, config.global_head_dim, scale=1.0)
    sliding = AttentionSpec(
        config.num_heads, config.num_kv_heads, config.head_dim, scale=1.0, window=config.sliding_window or 0
    )
    return tuple(
        dataclasses.replace(sliding if kind == SLIDING else full, shares_cache_of=config.cache_shared_by(i))
        for i, kind in enumerate(config.layer_types)
    )


def _norm(source: Source, name: str, size: int) -> Tensor:
    return source.norm(name, size, in_float32=True)


def _take_attention(config: Gemma4Config, source: Source, name: str, layer: int) -> AttentionWeights:
    spec, d = layers(config)[layer], config.hidden_size
    q_size, kv_size = (heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads))
    shares = spec.shares_cache_of is not None
    is_full = config.layer_types[layer] == FULL
    own, kv = of_heads(config, q_size), of_kv_heads(config, kv_size)
    if is_full:
        kv = Section(kv_size, config.num_global_kv_heads, "num_global_key_value_heads", repeats=True)
    cuts = {"q": own} if shares else {"q": own, "k": kv, "v": kv}
    if config.attention_k_eq_v and is_full:
        cuts.pop("v", None)
    if shares:  # checkpoints have them all the same
        for unused in (
            "k_proj.weight",
            "k_proj.bias",
            "v_proj.weight",
            "v_proj.bias",
            "k_norm.weight",
            "v_norm.weight",
        ):
            source.leave(f"{name}.{unused}", _UNUSED)
    bias = config.attention_bias
    return AttentionWeights(
        qkv=source.linear(
            *(StoredLinear(f"{name}.{x}_proj", cut.size, d, bias, cut=cut.outputs) for x, cut in cuts.items())
        ),
        o=source.linear(StoredLinear(f"{name}.o_proj", d, q_size, bias, cut=own.inputs)),
        q_norm=_norm(source, f"{name}.q_norm", spec.head_dim),
        k_norm=None if shares else _norm(source, f"{name}.k_norm", spec.head_dim),
        v_norm=None if shares else source.constant(spec.head_dim),
    )


def _take_mlp(config: Gemma4Config, source: Source, name: str, layer: int) -> MlpWeights:
    is_wide = config.use_double_wide_mlp and config.cache_shared_by(layer) is not None
    d, inner = config.hidden_size, config.intermediate_size * (2 if is_wide else 1)
    return source.gated_mlp(name, d, inner)


def _take_moe(config: Gemma4Config, source: Source, name: str) -> MoeBesideMlp | None:
    if not config.enable_moe_block:
        return None
    d, num_experts = config.hidden_size, config.num_experts or 0
    scale = source.tensor(f"{name}.router.per_expert_scale", (num_experts,), mean=1.0, cut=REPLICATED)
    routed = source.mixture(
        f"{name}.router.proj", f"{name}.experts", config, num_experts, config.top_k_experts or 0,
        config.moe_intermediate_size or 0,
    )  # fmt: skip
    router_norm = source.tensor(f"{name}.router.scale", (d,), mean=1.0, cut=REPLICATED)
    experts = routed._replace(expert_scale=scale.float(), router_norm=router_norm)
    return MoeBesideMlp(
        norm=_norm(source, f"{name}.pre_feedforward_layernorm_2", d),
        experts=experts,
        output_norm=_norm(source, f"{name}.post_feedforward_layernorm_2", d),
        mlp_output_norm=_norm(source, f"{name}.post_feedforward_layernorm_1", d),
    )


def _take_layer(config: Gemma4Config, source: Source, name: str, layer: int) -> LayerWeights:
    d, p = config.hidden_size, config.hidden_size_per_layer_input
    per_layer = None
    if p:
        per_layer = PerLayerWeights(
            gate=source.linear(StoredLinear(f"{name}.per_layer_input_gate", p, d, cut=REPLICATED)),
            projection=source.linear(StoredLinear(f"{name}.per_layer_projection", d, p, cut=REPLICATED)),
            norm=_norm(source, f"{name}.post_per_layer_input_norm", d),
        )
    return LayerWeights(
        input_norm=_norm(source, f"{name}.input_layernorm", d),
        attention=_take_attention(config, source, f"{name}.self_attn", layer),
        attention_norm=_norm(source, f"{name}.post_attention_layernorm", d),
        mlp_norm=_norm(source, f"{name}.pre_feedforward_layernorm", d),
        mlp=_take_mlp(config, source, f"{name}.mlp", layer),
        moe=_take_moe(config, source, name),
        output_norm=_norm(source, f"{name}.post_feedforward_layernorm", d),
        per_layer=per_layer,
        scalar=source.tensor(f"{name}.layer_scalar", (1,), mean=1.0, cut=REPLICATED).float(),
    )


def take(config: Gemma4Config, source: Source) -> Weights:
    """The weights."""
    d, p, length = config.hidden_size, config.hidden_size_per_layer_input, config.max_position_embeddings
    embedding, head = source.embedding_and_head(
        "model.embed_tokens", "lm_head", config.vocab_size, d, tied=config.tie_word_embeddings
    )
    table = inputs = None
    if p:
        size = config.num_layers * p
        part = StoredLinear("model.embed_tokens_per_layer", config.vocab_size_per_layer_input, size)
        table = source.table(part)
        inputs = PerLayerInputs(
            projection=source.linear(StoredLinear("model.per_layer_model_projection", size, d, cut=REPLICATED)),
            norm=_norm(source, "model.per_layer_projection_norm", p),
            scale=source.constant(1, 2.0**-0.5),
        )
    ropes = zip(config.ropes, (config.global_head_dim, config.head_dim), strict=True)
    return Weights(
        embedding=embedding,
        per_layer_embedding=table,
        per_layer_inputs=inputs,
        layers=tuple(_take_layer(config, source, f"model.layers.{i}", i) for i in range(config.num_layers)),
        final_norm=_norm(source, "model.norm", d),
        head=head,
        ropes=tuple(source.rope(rope, head_dim, length) for rope, head_dim in ropes),
    )


KeysValues = tuple[Tensor, Tensor] | None


def _attention(
    x: Normed,
    w: AttentionWeights,
    cos_sin: Tensor,
    spec: AttentionSpec,
    cache: LayerCache,
    step: StepInput,
    shared: KeysValues,
) -> tuple[BlockOutput, KeysValues]:
    """As ``attention``; and keys and values: ``shared``, or the layer's own.

    A CPU's op writes before it reads, so it is given them again. On a GPU nobody needs them who reads the cache: None.
    """
    qkv = x.linear(w.qkv)
    if qkv.is_cuda:
        return BlockOutput(attended(qkv, w, cos_sin, spec, cache, step, x.eps), w.o), None
    norms = w.q_norm, w.k_norm, w.v_norm
    q, k, v = turned_heads(qkv, cos_sin, *norms, None, spec.num_heads, spec.num_kv_heads, x.eps)
    shared = (k, v) if k is not None and v is not None else shared
    assert shared is not None
    return BlockOutput(attend(q, *shared, spec, cache, step), w.o), shared


def _with_experts(x: Residual, out: BlockOutput, moe: MoeBesideMlp, step: StepInput, router: Router) -> Tensor:
    """What the MLP gave, ``out``, and what the experts make of ``x``, normed and added up, ``[T, D]``."""
    beside = out.tensor()
    mixed = experts(x.normed(moe.norm), moe.experts, router, step, Gate("gelu_tanh")).tensor()
    return sum_of_norms(beside, moe.mlp_output_norm, mixed, moe.output_norm, x.eps)


def _per_layer_inputs(weights: Weights, x: Tensor, step: StepInput, config: Gemma4Config) -> Tensor | None:
    """All layers' embeddings of the tokens ``[T, L * P]``, whose first embedding is ``x`` ``[T, D]``."""
    w, table, p = weights.per_layer_inputs, weights.per_layer_embedding, config.hidden_size_per_layer_input
    if w is None or table is None:
        return None
    projected = w.projection.apply(x) * config.hidden_size**-0.5
    normed = rms_norm(projected.view(-1, p), w.norm, config.rms_norm_eps).view(projected.shape)
    return scaled_sum(normed, table.rows(step.input_ids) * rounded(p**0.5, x.dtype), w.scale)


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: Gemma4Config, layers: Layers) -> Tensor:
    """What ``head`` takes, ``[T, D]``; the step's keys and values go to ``kv_cache``."""
    embeddings, p = weights.embedding.rows(step.input_ids), config.hidden_size_per_layer_input
    embeddings = embeddings * rounded(config.hidden_size**0.5, embeddings.dtype)
    inputs = _per_layer_inputs(weights, embeddings, step, config)
    angles = [rope_cos_sin(step.positions, table) for table in weights.ropes]
    keys_values: list[KeysValues] = []
    x = Residual(embeddings, config.rms_norm_eps)
    for i, (w, spec, cache) in enumerate(zip(weights.layers, layers, kv_cache, strict=True)):
        cos_sin, shares = angles[-1 if spec.window else 0], spec.shares_cache_of
        shared = None if shares is None else keys_values[shares]
        out, own = _attention(x.normed(w.input_norm), w.attention, cos_sin, spec, cache, step, shared)
        keys_values.append(own)
        x += out.normed(w.attention_norm)
        out = mlp(x.normed(w.mlp_norm), w.mlp, "gelu_tanh")
        if w.moe is None:
            x += out.normed(w.output_norm)
        else:
            x.add(_with_experts(x, out, w.moe, step, config.router), w.output_norm)
        if w.per_layer is not None and inputs is not None:
            gate, factor = w.per_layer.gate, inputs[:, i * p : (i + 1) * p]
            gated = x.normed(None).linear(gate, "gelu_tanh", gated=False, factor=factor)
            x += BlockOutput(gated, w.per_layer.projection).normed(w.per_layer.norm)
        x.multiply(w.scalar)
    return x.tensor()


def head(weights: Weights, rows: Tensor, config: Gemma4Config) -> Tensor:
    """Logits ``[R, V]`` of rows ``[R, D]`` of what ``forward`` gave."""
    logits = weights.head.apply(rms_norm(rows, weights.final_norm, config.rms_norm_eps))
    cap = config.final_logit_softcapping
    return logits if cap is None else soft_cap(logits, cap)


def read_ropes(config: Any) -> tuple[Rope, ...]:
    """That of layers without a window, and that of layers with one. Where parameters are given they are complete."""
    return read_ropes_by_layer_type(config.rope_parameters, (FULL, SLIDING), config.max_position_embeddings)


def sizes(config: Any) -> dict[str, Any]:
    """Heads of the two kinds of layers, which transformers keeps layer by layer."""
    varying = (config.per_layer_attributes or set()) - {"head_dim", "num_key_value_heads"}
    if varying:
        raise ValueError(f"per_layer_config must give head_dim and num_key_value_heads alone, given {sorted(varying)}")
    kinds = set(config.layer_types)
    full, sliding = (config.per_layer_config[kind if kind in kinds else min(kinds)] for kind in (FULL, SLIDING))
    return {
        "head_dim": sliding.head_dim,
        "num_key_value_heads": sliding.num_key_value_heads,
        "global_head_dim": full.head_dim,
        "num_global_kv_heads": full.num_key_value_heads,
    }


FAMILY = Family(
    "Gemma4TextConfig",
    Gemma4Config,
    take,
    layers,
    forward,
    head,
    requires={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (None, "vision"),  # which says nothing of text
    },
    read_ropes=read_ropes,
    check=check_without_scaling,
    old_fields=("global_head_dim", "num_global_key_value_heads", "per_layer_config"),
    sizes=sizes,
)
