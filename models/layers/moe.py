"""A mixture of experts in the place of an MLP (Shazeer et al., 2017, arXiv:1701.06538)."""

import math
from typing import Any, NamedTuple

from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import StepInput
from compiled_llm.models.layers.mlp import MlpWeights, PlainMlpWeights, gated_mlp, plain_mlp
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


def check_grouped_router(config: Any) -> None:
    """``ValueError`` unless ``grouped_router`` can be made of ``config``, whose fields have DeepSeek-V3's names."""
    check_router(config, "n_routed_experts")
    if not 0 < config.n_group <= 2**24:
        raise ValueError(f"config.json: n_group must be at least 1, given {config.n_group!r:.100}")
    if not 0 < config.routed_scaling_factor < math.inf:
        raise ValueError(
            f"config.json: routed_scaling_factor must be a positive number, given {config.routed_scaling_factor!r:.100}"
        )
    size, rest = divmod(config.n_routed_experts, config.n_group)
    if rest or not 0 < config.topk_group <= config.n_group or config.num_experts_per_tok > size * config.topk_group:
        raise ValueError(
            f"config.json: n_group must divide n_routed_experts={config.n_routed_experts}, topk_group of them hold "
            f"num_experts_per_tok={config.num_experts_per_tok} experts, given {config.n_group} and {config.topk_group}"
        )


def grouped_router(config: Any) -> Router:
    """DeepSeek-V3's router (arXiv:2412.19437): sigmoids in float32, a bias for the choice alone, groups of experts."""
    return Router(
        config.num_experts_per_tok,
        "sigmoid",
        config.routed_scaling_factor,
        config.n_group,
        config.topk_group,
        in_float32=True,
    )


class Latent(NamedTuple):
    """Experts of which all get, and give, fewer elements than the residual stream has."""

    into: Linear  # [latent, D]
    out_of: Linear  # [D, latent]


class MoeWeights(NamedTuple):
    router: Linear  # [E, D]
    gate_up: Experts  # [E, 2 * intermediate, D]; [E, intermediate, D] where there is no gate
    down: Experts  # [E, D, intermediate]
    used: UsedExperts
    choice_bias: Tensor | None = None  # [E] float32
    expert_scale: Tensor | None = None  # [E] float32, of each expert's weights
    router_norm: Tensor | None = None  # [D], of what the router gets, where that is not what the experts get
    latent: Latent | None = None  # around all experts, which have its size in the place of D

    @property
    def of_router(self) -> RouterWeights:
        return RouterWeights(self.router, self.choice_bias, self.expert_scale, self.router_norm)


class Shared(NamedTuple):
    """An MLP that all tokens use beside their experts."""

    mlp: MlpWeights | PlainMlpWeights
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


def shared_mlp(x: Tensor, shared: Shared, activation: str = SILU.activation) -> Tensor:
    """What ``shared`` gives of ``x``, two ``[T, D]``."""
    w = shared.mlp
    y = gated_mlp(x, w, activation) if isinstance(w, MlpWeights) else plain_mlp(x, w, activation)
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
    taken = normed if w.latent is None else w.latent.into.apply(normed)
    hidden = gated_experts(taken, w.gate_up, chosen, gate)
    if x.is_cuda and multiplier == 1.0 and w.latent is None:
        beside = None if shared is None else shared_mlp(normed, shared, gate.activation)
        return summed_experts(hidden, w.down, chosen, w.used, beside, x), None
    mixed = summed_experts(hidden, w.down, chosen, w.used)
    if w.latent is not None:
        mixed = w.latent.out_of.apply(mixed)
    if shared is None:
        return x, mixed
    # An op, which rounds the sum: behind the last layer another follows, and the compiler would round that one alone.
    return x, scaled_sum(mixed, shared_mlp(normed, shared, gate.activation), shared.one)
