"""What surrounds the linear layers of experts in a model: the choice of experts before, a gate or the sum behind.

On a GPU these are one launch with the product where they can be, for few rows at least; elsewhere each is an op of its
own, and what the experts give is left to the norm that follows. Both round at the same places.
"""

import dataclasses
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from compiled_llm import ops
from compiled_llm.models.layers.residual import LayerNorm, Normed
from compiled_llm.models.linears.adapted import Adapted, AdaptedExperts, experts_of
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.experts import DenseExperts
from compiled_llm.models.linears.fused import activated_linear
from compiled_llm.models.linears.protocol import GroupedLinear, Linear
from compiled_llm.models.linears.quantized import QuantizedExperts
from compiled_llm.models.linears.sharded import SummedExperts
from compiled_llm.ops import (
    Following,
    clamped_swiglu,
    gated_activation,
    gated_quantized_experts,
    grouped_gated_linear,
    grouped_linear_sum,
    rms_norm,
    routed_linear,
    routed_rows,
    summed_quantized_experts,
    weighted_sum,
    weighted_sum_added,
)
from compiled_llm.ops.linear.product_choices import MAX_ROWS as FEW_ROWS
from compiled_llm.ops.moe.routing import MAX_EXPERTS, MAX_GROUPED_EXPERTS, MAX_ROWS

NUM_COUNTERS = 2**17
_MAX_UNROLLED = 16  # experts of a token that a program adds up at once


class UsedExperts(NamedTuple):
    """How many experts some token used, added up over layers and steps: each reads its weights once for all tokens."""

    total: Tensor  # [1] int64, the same tensor in all layers of a model
    counters: (
        Tensor  # [NUM_COUNTERS] int32, likewise: by which a GPU's last program knows itself; zero between launches
    )


@dataclasses.dataclass(frozen=True)
class Router:
    """How a token's experts are chosen and weighted; ``ops.route`` says what the fields mean.

    ``in_float32``: the logits are computed in float32, by a router of that dtype. ``multiplier``: of what a router with
    a norm of its own gets.
    """

    top_k: int
    scoring: str
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    in_float32: bool = False
    multiplier: float = 1.0


class Gate(NamedTuple):
    """What makes ``[R, 2 * intermediate]`` to ``[R, intermediate]``: an activation of ``ops.grouped_gated_linear``.

    One that is not gated is an ``ops.activation`` of ``[R, intermediate]``.
    """

    activation: str = "silu"
    alpha: float = 0.0
    limit: float = 0.0
    is_gated: bool = True


class Routed(NamedTuple):
    """What ``ops.routed_rows`` gives."""

    weights: Tensor  # [T, k] float32
    places: Tensor  # [T, k] int32
    tokens: Tensor  # [R] int32
    starts: Tensor  # [E + 1] int32


class RouterWeights(NamedTuple):
    linear: Linear  # [E, D]
    choice_bias: Tensor | None  # [E] float32
    expert_scale: Tensor | None  # [E] float32, of each expert's weights
    norm: Tensor | None = None  # [D], of what the router gets, where that is not what the experts get


def routes_at_once(x: Tensor, w: RouterWeights, router: Router) -> bool:
    """Whether norm, router and choice of ``x`` are one op."""
    few = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.shape[0] <= MAX_ROWS
    most = MAX_EXPERTS if router.groups == router.top_groups else MAX_GROUPED_EXPERTS
    return few and isinstance(w.linear, Dense) and w.linear.out_features <= most


def routed(x: Normed, w: RouterWeights, num_tokens: Tensor, used: UsedExperts, router: Router) -> tuple[Tensor, Routed]:
    """What experts get, ``x`` as a tensor ``[T, D]``, and the experts that the router takes by it.

    ``num_tokens`` is that of ``ops.expert_rows``.
    """
    of, norm, eps = x.residual, x.norm, x.eps
    rule = router.top_k, router.scoring, router.scale, router.groups, router.top_groups
    is_plain_sum = of.delta_norm is None and of.scale is None
    if is_plain_sum and not isinstance(norm, LayerNorm) and routes_at_once(of.x, w, router):
        assert isinstance(w.linear, Dense)
        delta, lora = of.delta_and_change()
        total, normed, *found = routed_linear(
            of.x, delta, norm, eps, w.linear.weight, w.linear.bias, w.choice_bias, w.expert_scale, num_tokens,
            used.total, used.counters, *rule, w.norm, router.multiplier, lora,
        )  # fmt: skip
        if delta is not None:
            of.settle(total)
        return (of.x if norm is None else normed), Routed(*found)
    normed = x.tensor()
    seen = normed if w.norm is None else rms_norm(of.x, w.norm, eps) * router.multiplier
    seen = seen.float() if router.in_float32 else seen
    logits = activated_linear(seen, w.linear) if isinstance(w.linear, Adapted) else w.linear.apply(seen)
    return normed, Routed(*routed_rows(logits, w.choice_bias, w.expert_scale, num_tokens, used.total, *rule))


def gated_experts(x: Tensor, experts: GroupedLinear, chosen: Routed, gate: Gate) -> Tensor:
    """``gate`` of what the chosen ``experts`` make of ``x`` ``[T, D]``: a row for each token and expert."""
    tokens = chosen.tokens, chosen.tokens
    if x.is_cuda and isinstance(experts, AdaptedExperts):
        plain = experts.plain
        if gate.is_gated and isinstance(plain, DenseExperts) and x.dtype != torch.float32:
            of_gate = gate.activation, gate.alpha, gate.limit
            return grouped_gated_linear(
                x, plain.weight, plain.bias, chosen.tokens, chosen.starts, *of_gate, experts.surroundings
            )
        following = Following(gate.activation, gate.is_gated, gate.alpha, gate.limit)
        return experts.followed(x, *tokens, chosen.starts, following)
    if not gate.is_gated:
        return ops.activation(experts_of(experts, x, *tokens, chosen.starts), gate.activation)
    if x.is_cuda and isinstance(experts, DenseExperts):
        weight, bias, (activation, alpha, limit, _) = experts.weight, experts.bias, gate
        return grouped_gated_linear(x, weight, bias, chosen.tokens, chosen.starts, activation, alpha, limit)
    if _is_surrounded(experts, x, x.shape[0]):
        activation, alpha, limit, _ = gate
        return gated_quantized_experts(x, experts.arguments(chosen.tokens, chosen.starts), activation, alpha, limit)
    gate_up = experts_of(experts, x, *tokens, chosen.starts)
    if gate.activation == "clamped_swiglu":
        return clamped_swiglu(gate_up, gate.alpha, gate.limit)
    return gated_activation(gate_up, gate.activation)


def _is_surrounded(experts: GroupedLinear, x: Tensor, tokens: int) -> TypeGuard[QuantizedExperts]:
    """Whether products with quantised weights take in what follows."""
    few = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and tokens <= FEW_ROWS
    return few and isinstance(experts, QuantizedExperts)


def _sums_at_once(experts: GroupedLinear, hidden: Tensor, chosen: Routed) -> TypeGuard[DenseExperts]:
    """Whether product and sum are one op."""
    tokens, top_k = chosen.places.shape
    few = hidden.is_cuda and hidden.dtype != torch.float32 and tokens <= MAX_ROWS and top_k <= _MAX_UNROLLED
    return few and tokens * experts.out_features <= 16 * NUM_COUNTERS and isinstance(experts, DenseExperts)


def summed_experts(
    hidden: Tensor, experts: GroupedLinear, chosen: Routed, used: UsedExperts, beside: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``residual + (beside + the weighted sum of what a token's experts make of hidden)``, ``[T, D]``; on a GPU.

    Elsewhere nothing is given but the experts.
    """
    if isinstance(experts, SummedExperts):
        mixed = experts.sum_of(hidden, lambda own, part: summed_experts(own, part, chosen, used))
        mixed = mixed if beside is None else mixed + beside
        return mixed if residual is None else residual + mixed
    plain: GroupedLinear = experts
    lora: tuple[Tensor, ...] = ()
    if hidden.is_cuda and isinstance(experts, AdaptedExperts) and hidden.dtype != torch.float32:
        plain, lora = experts.plain, experts.surroundings
    if _sums_at_once(plain, hidden, chosen):
        return grouped_linear_sum(
            hidden, plain.weight, plain.bias, chosen.tokens, chosen.starts, chosen.places, chosen.weights,
            beside, residual, used.counters, lora,
        )  # fmt: skip
    (tokens, top_k), of = chosen.places.shape, experts.out_features
    if top_k <= _MAX_UNROLLED and tokens * of <= 16 * NUM_COUNTERS and _is_surrounded(experts, hidden, tokens):
        return summed_quantized_experts(
            hidden, experts.arguments(chosen.tokens, chosen.starts), chosen.places, chosen.weights, beside, residual,
            used.counters,
        )  # fmt: skip
    if hidden.is_cuda and isinstance(experts, AdaptedExperts):
        following = Following(residual=residual, places=chosen.places, weights=chosen.weights, beside=beside)
        return experts.followed(hidden, None, chosen.tokens, chosen.starts, following)
    y = experts_of(experts, hidden, None, chosen.tokens, chosen.starts)
    if beside is None and residual is None:
        return weighted_sum(y, chosen.places, chosen.weights)
    return weighted_sum_added(y, chosen.places, chosen.weights, beside, residual)
