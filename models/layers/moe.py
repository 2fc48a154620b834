"""A mixture of experts in the place of an MLP (Shazeer et al., 2017, arXiv:1701.06538)."""

from typing import Any, NamedTuple

from torch import Tensor

from compiled_llm.models.config import ModelConfig, check_at_least_one, check_positive
from compiled_llm.models.inputs import StepInput
from compiled_llm.models.layers.mlp import MlpWeights, PlainMlpWeights, first_linear
from compiled_llm.models.layers.residual import Normed, Residual
from compiled_llm.models.linears.adapted import Adapted
from compiled_llm.models.linears.fused import activated_linear
from compiled_llm.models.linears.mixture import (
    Gate,
    Routed,
    Router,
    RouterWeights,
    UsedExperts,
    gated_experts,
    routed,
    summed_experts,
)
from compiled_llm.models.linears.protocol import GroupedLinear, Linear
from compiled_llm.models.linears.quantized import Quantized
from compiled_llm.ops import Following, scaled_sum, sigmoid_gated


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
    check_at_least_one(config, "n_group")
    check_positive(config, "routed_scaling_factor")
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


class Shared(NamedTuple):
    """An MLP that all tokens use beside their experts."""

    mlp: MlpWeights | PlainMlpWeights
    one: Tensor  # [1] float32, or the multiplier of what is added to the residual stream
    gate: Linear | None = None  # [1, D], of a token: what the MLP gives is multiplied by its sigmoid


class MoeWeights(NamedTuple):
    router: Linear  # [E, D]
    gate_up: GroupedLinear  # [E, 2 * intermediate, D]; [E, intermediate, D] where there is no gate
    down: GroupedLinear  # [E, D, intermediate]
    used: UsedExperts
    choice_bias: Tensor | None = None  # [E] float32
    expert_scale: Tensor | None = None  # [E] float32, of each expert's weights
    router_norm: Tensor | None = None  # [D], of what the router gets, where that is not what the experts get
    latent: Latent | None = None  # around all experts, which have its size in the place of D
    shared: Shared | None = None

    @property
    def of_router(self) -> RouterWeights:
        return RouterWeights(self.router, self.choice_bias, self.expert_scale, self.router_norm)


SILU = Gate()


class MixtureOutput:
    """What a token's experts give, before it is added to the residual stream: a ``Summand``."""

    multiplier: float = 1.0

    def __init__(self, normed: Tensor, hidden: Tensor, chosen: Routed, w: MoeWeights, activation: str) -> None:
        self.normed, self.hidden, self.chosen, self.w, self.activation = normed, hidden, chosen, w, activation

    def __mul__(self, multiplier: float) -> "MixtureOutput":
        """Experts beside an MLP that all tokens use have the multiplier as ``Shared.one``, too."""
        assert self.w.shared is not None, "of the sum with what all tokens use"
        self.multiplier = multiplier
        return self

    def tensor(self) -> Tensor:
        """``[T, D]``."""
        w = self.w
        mixed = summed_experts(self.hidden, w.down, self.chosen, w.used)
        if w.latent is not None:
            mixed = w.latent.out_of.apply(mixed)
        if w.shared is None:
            return mixed
        # An op, which rounds the sum: behind the last layer another follows, and the compiler would round that alone.
        inputs, down = self._beside_inputs(w.shared), w.shared.mlp.down
        if w.shared.gate is None and isinstance(down, Adapted) and down.changes_and(inputs):
            y = activated_linear(inputs, down.plain)
            return down.followed(y, inputs, Following(residual=mixed, scale=w.shared.one))[1]
        return scaled_sum(mixed, self._beside(w.shared, inputs), w.shared.one)

    def add_to(self, residual: Residual) -> None:
        x, w = residual.tensor(), self.w
        if x.is_cuda and self.multiplier == 1.0 and w.latent is None:
            beside = None if w.shared is None else self._beside(w.shared, self._beside_inputs(w.shared))
            residual.settle(summed_experts(self.hidden, w.down, self.chosen, w.used, beside, x))
        else:
            residual.add(self.tensor())

    def _beside_inputs(self, shared: Shared) -> Tensor:
        """What the last layer gets of the MLP that all tokens use."""
        first, gated = first_linear(shared.mlp)
        return activated_linear(self.normed, first, self.activation, gated)

    def _beside(self, shared: Shared, inputs: Tensor) -> Tensor:
        """What that MLP gives, ``[T, D]``."""
        down = shared.mlp.down
        # A quantised product takes in what adapters change. A dense one is a library's here, whose bits are others.
        is_quantized = isinstance(down, Adapted) and isinstance(down.plain, Quantized)
        y = activated_linear(inputs, down) if is_quantized else down.apply(inputs)
        return y if shared.gate is None else sigmoid_gated(y, shared.gate.apply(self.normed))


def experts(x: Normed, w: MoeWeights, router: Router, step: StepInput, gate: Gate = SILU) -> MixtureOutput:
    """The weighted sum of what each token's experts make of ``x``, MLPs with ``gate``, and of the MLP that all use.

    Shapes are static: every token has ``top_k`` rows, and which expert has which of them is data. Padding gets 0.
    """
    normed, chosen = routed(x, w.of_router, step.query_start_loc[-1:], w.used, router)
    taken = normed if w.latent is None else w.latent.into.apply(normed)
    return MixtureOutput(normed, gated_experts(taken, w.gate_up, chosen, gate), chosen, w, gate.activation)
