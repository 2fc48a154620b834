"""Attention: what a layer's is like, what it keeps in the KV cache, and the block that computes it."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.config import SLIDING, WindowedConfig
from compiled_llm.models.inputs import KVCache, LayerCache, StepInput
from compiled_llm.models.layers.residual import BlockOutput, Normed
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.models.linears.sharded import NormOverRanks
from compiled_llm.ops import (
    DecodePlan,
    Keys,
    Turn,
    decode_attention,
    decode_plan,
    paged_attention,
    qk_norm,
    rms_norm,
    rotary_attention,
    rotary_decode_attention,
)
from compiled_llm.ops.attention import kv_quant


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention, and so what a token takes in its KV cache.

    Attributes:
        num_heads: query heads, N; a multiple of ``num_kv_heads``, K.
        head_dim: H.
        scale: of the scores.
        window: keys that a query sees, itself included; 0: all before it.
        sink_tokens: of a stream: its first tokens, which a query sees besides its window; the table has no others.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; 0: they stay as they are.
        shares_cache_of: the earlier layer whose keys and values this one reads; None: it has a cache of its own.
        rotary: whether queries and keys are turned by their positions.
        window_table: which of the step's ``windows`` says where the layer's keys are; None: the step's own table does.
            Set by the engine.
        exact: whether a GPU has to use the kernels that give a row the same bits in every step. Set by the engine.
        max_query_len: an upper bound of the tokens of a request in a step. Set by the engine, for each bucket.
        plan: which of the step's ``plans`` a decode has; None: it has none. Set by the engine.
        latent_dim: of multi-head latent attention: C, the elements of a latent, which the cache has in the place of
            values and which keys have besides their ``head_dim`` turned elements; 0: it is none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    sink_tokens: int = 0
    soft_cap: float = 0.0
    shares_cache_of: int | None = None
    rotary: bool = True
    window_table: int | None = None
    exact: bool = False
    max_query_len: int = 0
    plan: int | None = None
    latent_dim: int = 0

    @property
    def value_dim(self) -> int:
        """Elements of what the cache has as values."""
        return self.latent_dim or self.head_dim

    @property
    def flops_per_pair(self) -> int:
        """Floating-point operations for a query and a key that it sees, of all heads: the score, and the sum."""
        return 2 * self.num_heads * (self.head_dim + self.latent_dim + self.value_dim)

    @property
    def masked_window(self) -> int:
        """The op's ``window``: a stream's table has no keys but those that are seen."""
        return 0 if self.sink_tokens else self.window

    def cache_tensors(
        self, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor of the layer's ``LayerCache``, by its field, for keys and values in ``dtype``.

        Empty where it shares another layer's. Allocation and arithmetic of the KV cache go by this alone, so a layer
        that keeps something else than keys and values describes it here.
        """
        if self.shares_cache_of is not None:
            return {}
        rows = (num_blocks, self.num_kv_heads, block_size)
        held: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "k": ((*rows, self.head_dim), dtype),
            "v": ((*rows, self.value_dim), dtype),
        }
        if kv_quant.is_quantised(dtype):
            held |= dict.fromkeys(("k_scale", "v_scale"), (rows, torch.float32))
        return held


Spec = AttentionSpec | StateSpec


def windowed_layers(config: WindowedConfig, full: AttentionSpec) -> tuple[AttentionSpec, ...]:
    """``full`` for each layer that sees all keys, and the same with a window for the others."""
    sliding = dataclasses.replace(full, window=config.sliding_window or 0)
    return tuple(sliding if kind == SLIDING else full for kind in config.layer_types)


def windows_kept_apart(layers: Sequence[AttentionSpec], max_model_len: int) -> tuple[int, ...]:
    """The windows of ``layers`` that are shorter than a request may be: the keys of such layers need less memory."""
    return tuple(sorted({spec.window for spec in layers if 0 < spec.window < max_model_len}))


def with_window_tables(layers: Sequence[Spec], windows: Sequence[int]) -> tuple[Spec, ...]:
    """``layers``, in which those with one of ``windows`` find their keys by the block table of that window."""
    numbers = {window: number for number, window in enumerate(windows)}

    def placed(spec: Spec) -> Spec:
        if isinstance(spec, StateSpec):
            return spec
        return dataclasses.replace(spec, window_table=numbers.get(spec.window))

    return tuple(map(placed, layers))


def for_queries(layers: Sequence[Spec], max_query_len: int, *, exact: bool = False) -> tuple[Spec, ...]:
    """``layers`` for steps in which no request has more than ``max_query_len`` tokens."""
    return tuple(dataclasses.replace(spec, max_query_len=max_query_len, exact=exact) for spec in layers)


def with_plans(layers: Sequence[Spec]) -> tuple[Spec, ...]:
    """``layers``, in which each has the number of its plan. Layers of one window and head size share a plan.

    A ``DecodePlan`` says which program on a GPU attends to which keys of a decode.
    """
    numbers: dict[tuple[Any, ...], int] = {}

    def planned(spec: Spec) -> Spec:
        if isinstance(spec, StateSpec):
            return spec
        alike = spec.window_table, spec.masked_window, spec.head_dim, spec.latent_dim
        return dataclasses.replace(spec, plan=numbers.setdefault(alike, len(numbers)))

    return tuple(map(planned, layers))


def make_plans(planned: Sequence[Spec], step: StepInput, kv_cache: KVCache, q_bytes: int) -> tuple[DecodePlan, ...]:
    """The plans that the layers of ``with_plans`` have numbers of, for a step of no more than one query a request.

    Their tables are those of all requests, where ``step`` has these. ``q_bytes``: of an element of the queries.
    """
    plans = []
    layers = {place: spec for place, spec in enumerate(planned) if isinstance(spec, AttentionSpec)}
    for number in range(max([-1, *(spec.plan for spec in layers.values() if spec.plan is not None)]) + 1):
        places = [place for place, spec in layers.items() if spec.plan == number]
        spec, cache = layers[places[0]], kv_cache[places[0]]
        table = step if spec.window_table is None else step.windows[spec.window_table]
        of_all = isinstance(table, StepInput) or table.seq_lens is None
        rows = step.table_rows if of_all else None
        seq_lens = step.seq_lens if table.seq_lens is None else table.seq_lens
        num_heads = spec.num_heads if spec.latent_dim else max(layers[place].num_kv_heads for place in places)
        made = decode_plan(
            table.slot_mapping, table.block_table, rows, step.query_start_loc, seq_lens, block_size=cache.k.shape[2],
            window=spec.masked_window, num_heads=num_heads, head_dim=spec.latent_dim or spec.head_dim, q_bytes=q_bytes,
            cache_bytes=cache.k.element_size(), latents=bool(spec.latent_dim),
        )  # fmt: skip
        plans.append(made)
    return tuple(plans)


class AttentionWeights(NamedTuple):
    qkv: Linear  # [(N + 2 * K) * H, D]; without values where keys are values, and queries alone where those are shared
    o: Linear  # [D, N * H]
    # For families that normalise queries and keys: [H], of each head; or [N * H] and [K * H], of all heads together.
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    sinks: Tensor | None = None  # [N] float32: for each query head the score of one more key, whose value is zero
    v_norm: Tensor | None = None  # [H] float32, of each head
    # Of queries and of keys, of all heads together, where ranks have some each.
    over_ranks: tuple[NormOverRanks, NormOverRanks] | None = None


def attention(
    x: Normed,
    w: AttentionWeights,
    cos_sin: Tensor | None,
    spec: AttentionSpec,
    cache: LayerCache,
    step: StepInput,
    query_scale: Tensor | None = None,
) -> BlockOutput:
    """Attention of a layer. Also writes this step's keys and values to the cache.

    Args:
        cos_sin: ``[T, H]`` float32, see ``rope_cos_sin``; None where no layer turns its heads.
        query_scale: ``[T, 1]`` in the dtype of ``x``, multiplies the queries.
    """
    return BlockOutput(attended(x.linear(w.qkv), w, cos_sin, spec, cache, step, x.eps, query_scale), w.o)


def attended(
    qkv: Tensor,
    w: AttentionWeights,
    cos_sin: Tensor | None,
    spec: AttentionSpec,
    cache: LayerCache,
    step: StepInput,
    eps: float,
    query_scale: Tensor | None = None,
) -> Tensor:
    """What the layer ``w.o`` takes, ``[T, N * H]``, of what ``w.qkv`` gave; ``qkv`` is that of ``rotary_attention``.

    ``eps`` is that of the norms of queries and keys; the others are the arguments of ``attention``.
    """
    q_norm, k_norm = w.q_norm, w.k_norm
    if w.over_ranks is not None:
        qkv = _normed_over_ranks(qkv, w.over_ranks, spec, eps)
    if q_norm is not None and k_norm is not None and len(q_norm) > spec.head_dim:
        qkv = qk_norm(qkv, q_norm, k_norm, eps)
        q_norm = k_norm = None
    if not spec.rotary:
        assert q_norm is None, "the op that turns heads normalises them, too"
        assert w.v_norm is None, "the op that turns heads normalises values, too"
        heads = qkv.unflatten(-1, (-1, spec.head_dim))
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if query_scale is not None:
            q = q * query_scale[:, None]
        return attend(q, k, v, spec, cache, step, w.sinks)
    assert cos_sin is not None
    assert spec.max_query_len, "for a step: see for_queries"
    turn = Turn(cos_sin, q_norm, k_norm, w.v_norm, query_scale, eps)
    if spec.plan is not None:
        return rotary_decode_attention(qkv, turn, cache, step.plans[spec.plan], spec, w.sinks).flatten(1)
    return rotary_attention(qkv, turn, keys_of(spec, cache, step), spec, w.sinks, step.ancestors).flatten(1)


def _normed_over_ranks(
    qkv: Tensor, norms: tuple[NormOverRanks, NormOverRanks], spec: AttentionSpec, eps: float
) -> Tensor:
    """``qk_norm`` of all ranks' heads together: the rank's own of it."""
    q, k, v = qkv.split([heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)], 1)
    normed = [norm.own(rms_norm(norm.gathered(x), norm.weight, eps)) for x, norm in zip((q, k), norms, strict=True)]
    return torch.cat([*normed, v], 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    cache: LayerCache,
    step: StepInput,
    sinks: Tensor | None = None,
) -> Tensor:
    """What queries ``[T, N, H]`` see of the cache, ``[T, N * H]``, after keys and values ``[T, K, H]`` went there."""
    scale, window, soft_cap = spec.scale, spec.masked_window, spec.soft_cap
    if spec.plan is not None:
        plan = step.plans[spec.plan]
        out = decode_attention(q, k, v, *cache, plan, sinks=sinks, sm_scale=scale, window=window, soft_cap=soft_cap)
    else:
        out = paged_attention(
            q, k, v, *keys_of(spec, cache, step), sinks=sinks, sm_scale=scale, max_query_len=spec.max_query_len,
            window=window, soft_cap=soft_cap, exact=spec.exact, ancestors=step.ancestors,
        )  # fmt: skip
    return out.flatten(1)


def keys_of(spec: AttentionSpec, cache: LayerCache, step: StepInput) -> Keys:
    """Where the layer's keys and values are."""
    table = step if spec.window_table is None else step.windows[spec.window_table]
    seq_lens = step.seq_lens if table.seq_lens is None else table.seq_lens
    return Keys(*cache, table.slot_mapping, table.block_table, step.query_start_loc, seq_lens)
