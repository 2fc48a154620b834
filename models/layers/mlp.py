"""The MLPs, gated and plain."""

from typing import NamedTuple

from torch import Tensor

from compiled_llm.models.layers.norm import Norm
from compiled_llm.models.linears.fused import activated_linear, added_linear, normed_linear
from compiled_llm.models.linears.protocol import Linear


class MlpWeights(NamedTuple):
    gate_up: Linear  # [2 * intermediate, D]
    down: Linear  # [D, intermediate]


class PlainMlpWeights(NamedTuple):
    up: Linear  # [intermediate, D]
    down: Linear  # [D, intermediate]


def gated_mlp(x: Tensor, w: MlpWeights, activation: str = "silu") -> Tensor:
    """``down(activation(gate(x)) * up(x))`` on ``x`` ``[T, D]``; SwiGLU by default. See ``ops.gated_activation``."""
    return w.down.apply(activated_linear(x, w.gate_up, activation))


def plain_mlp(x: Tensor, w: PlainMlpWeights, activation: str) -> Tensor:
    """``down(activation(up(x)))`` on ``x`` ``[T, D]``. See ``ops.activation``."""
    return w.down.apply(activated_linear(x, w.up, activation, gated=False))


def mlp_block(
    x: Tensor,
    delta: Tensor | None,
    norm: Norm | None,
    eps: float,
    w: MlpWeights | PlainMlpWeights,
    activation: str,
    *,
    delta_norm: Tensor | None = None,
    output_norm: Tensor | None = None,
    multiplier: float = 1.0,
    beside: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A residual stream plus the MLP of its norm; ``activation`` is that of ``ops.activation``.

    The first arguments and ``delta_norm`` are those of ``normed_linear``; the others, where ``output_norm`` is the
    ``delta_norm``, and the result are those of ``added_linear``.
    """
    gated = isinstance(w, MlpWeights)
    first = w.gate_up if isinstance(w, MlpWeights) else w.up
    x, hidden = normed_linear(x, delta, norm, eps, first, activation, gated, delta_norm)
    return added_linear(x, w.down, hidden, output_norm, multiplier, beside)


# hidden_act -> name of the ops.activation that computes it; the last three are one function.
_PLAIN_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def plain_activation(hidden_act: str) -> str:
    """The ``ops.activation`` of a ``config.json``'s ``hidden_act``. ``ValueError`` for one that is not supported."""
    if hidden_act not in _PLAIN_ACTIVATIONS:
        raise ValueError(
            f"config.json: hidden_act must be {' or '.join(_PLAIN_ACTIVATIONS)}, given {hidden_act!r:.100}"
        )
    return _PLAIN_ACTIVATIONS[hidden_act]
