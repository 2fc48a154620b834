"""A mixture of experts in the place of an MLP (Shazeer et al., 2017, arXiv:1701.06538)."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import StepInput
from compiled_llm.models.linears.protocol import Experts, Linear
from compiled_llm.ops import gated_activation, routed_rows, weighted_sum


def check_router(config: ModelConfig, num_experts: str, top_k: str = "num_experts_per_tok") -> None:
    """``ValueError`` unless a token can use as many experts as the field ``top_k`` says, of ``num_experts``."""
    experts, chosen = getattr(config, num_experts), getattr(config, top_k)
    if experts is None or not 0 < experts <= 2**16:
        raise ValueError(f"config.json: {num_experts} must be from 1 to {2**16}, given {experts!r:.100}")
    if chosen is None or not 0 < chosen <= experts:
        raise ValueError(
            f"config.json: {top_k} must be from 1 to {num_experts}={experts}, of which a token uses so many, given "
            f"{chosen!r:.100}"
        )


class UsedExperts(NamedTuple):
    """How many experts some token used, added up over layers and steps: each reads its weights once for all tokens."""

    total: Tensor  # [1] int64, the same tensor in all layers of a model


class MoeWeights(NamedTuple):
    router: Linear  # [E, D]
    gate_up: Experts  # [E, 2 * intermediate, D]
    down: Experts  # [E, D, intermediate]
    used: UsedExperts
    choice_bias: Tensor | None = None  # [E] float32
    expert_scale: Tensor | None = None  # [E] float32, of each expert's weights


@dataclasses.dataclass(frozen=True)
class Router:
    """How a token's experts are chosen and weighted; ``ops.route`` says what the fields mean.

    ``in_float32``: the logits are computed in float32, by a router of that dtype.
    """

    top_k: int
    scoring: str
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    in_float32: bool = False


def silu_gate(gate_up: Tensor) -> Tensor:
    """SwiGLU, ``[R, 2 * intermediate]`` -> ``[R, intermediate]``."""
    return gated_activation(gate_up, "silu")


def mixture_of_experts(
    x: Tensor,
    w: MoeWeights,
    step: StepInput,
    router: Router,
    gate: Callable[[Tensor], Tensor] = silu_gate,
    seen: Tensor | None = None,
) -> Tensor:
    """The weighted sum of what each token's experts, gated MLPs, give: ``[T, D]`` -> ``[T, D]``; 0 for padding.

    Shapes are static: every token has ``top_k`` rows, and which expert has which of them is data. The router goes by
    ``seen`` ``[T, D]``, if that is given, and not by ``x``.
    """
    seen = x if seen is None else seen
    logits = w.router.apply(seen.float() if router.in_float32 else seen)
    weights, places, tokens, starts = routed_rows(
        logits,
        w.choice_bias,
        w.expert_scale,
        step.query_start_loc[-1:],
        w.used.total,
        router.top_k,
        router.scoring,
        router.scale,
        router.groups,
        router.top_groups,
    )
    hidden = gate(w.gate_up.apply_to(x, tokens, starts))
    return weighted_sum(w.down.apply_to(hidden, None, starts), places, weights)
