"""A mixture of experts in the place of an MLP (Shazeer et al., 2017, arXiv:1701.06538)."""

from typing import NamedTuple

from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import StepInput
from compiled_llm.models.layers.mlp import MlpWeights, gated_mlp
from compiled_llm.models.linears.mixture import (
    Gate,
    Router,
    RouterWeights,
    UsedExperts,
    gated_experts,
    routed,
    summed_experts,
)
from compiled_llm.models.linears.protocol import Experts, Linear
from compiled_llm.ops import scaled_sum, sigmoid_gated


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


class MoeWeights(NamedTuple):
    router: Linear  # [E, D]
    gate_up: Experts  # [E, 2 * intermediate, D]
    down: Experts  # [E, D, intermediate]
    used: UsedExperts
    choice_bias: Tensor | None = None  # [E] float32
    expert_scale: Tensor | None = None  # [E] float32, of each expert's weights
    router_norm: Tensor | None = None  # [D], of what the router gets, where that is not what the experts get

    @property
    def of_router(self) -> RouterWeights:
        return RouterWeights(self.router, self.choice_bias, self.expert_scale, self.router_norm)


class Shared(NamedTuple):
    """An MLP that all tokens use beside their experts."""

    mlp: MlpWeights
    one: Tensor  # [1] float32, or the multiplier of what is added to the residual stream
    gate: Linear | None = None  # [1, D], of a token: what the MLP gives is multiplied by its sigmoid


SILU = Gate()


def mixture_of_experts(
    x: Tensor,
    norm: Tensor,
    eps: float,
    w: MoeWeights,
    step: StepInput,
    router: Router,
    gate: Gate = SILU,
) -> Tensor:
    """The weighted sum of what each token's experts, gated MLPs, make of the norm of ``x`` ``[T, D]``; 0 for padding.

    Shapes are static: every token has ``top_k`` rows, and which expert has which of them is data.
    """
    _, normed, chosen = routed(x, None, norm, eps, w.of_router, step.query_start_loc[-1:], w.used, router)
    return summed_experts(gated_experts(normed, w.gate_up, chosen, gate), w.down, chosen, w.used)


def shared_mlp(x: Tensor, shared: Shared) -> Tensor:
    """What ``shared`` gives of ``x``, two ``[T, D]``."""
    y = gated_mlp(x, shared.mlp)
    return y if shared.gate is None else sigmoid_gated(y, shared.gate.apply(x))


def experts_block(
    x: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    w: MoeWeights,
    step: StepInput,
    router: Router,
    gate: Gate = SILU,
    shared: Shared | None = None,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """A residual stream plus the mixture of its norm.

    It takes what ``normed_linear`` takes and gives what ``added_linear`` gives. What ``shared`` gives is added to the
    mixture first, and then all of it is multiplied by ``multiplier``, which is ``shared.one`` if it is not 1.
    """
    x, normed, chosen = routed(x, delta, norm, eps, w.of_router, step.query_start_loc[-1:], w.used, router)
    hidden = gated_experts(normed, w.gate_up, chosen, gate)
    if x.is_cuda and multiplier == 1.0:
        beside = None if shared is None else shared_mlp(normed, shared)
        return summed_experts(hidden, w.down, chosen, w.used, beside, x), None
    mixed = summed_experts(hidden, w.down, chosen, w.used)
    if shared is None:
        return x, mixed
    # An op, which rounds the sum: behind the last layer another follows, and the compiler would round that one alone.
    return x, scaled_sum(mixed, shared_mlp(normed, shared), shared.one)
