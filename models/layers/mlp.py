"""The MLPs, gated and plain."""

from typing import NamedTuple

from torch import Tensor

from compiled_llm.models.linears.fused import added_linear, gated_linear, normed_linear
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.ops import activation


class MlpWeights(NamedTuple):
    gate_up: Linear  # [2 * intermediate, D]
    down: Linear  # [D, intermediate]


def gated_mlp(x: Tensor, w: MlpWeights, activation: str = "silu") -> Tensor:
    """``down(activation(gate(x)) * up(x))`` on ``x`` ``[T, D]``; SwiGLU by default. See ``ops.gated_activation``."""
    return w.down.apply(gated_linear(x, w.gate_up, activation))


def gated_block(
    x: Tensor, delta: Tensor | None, norm: Tensor, eps: float, w: MlpWeights
) -> tuple[Tensor, Tensor | None]:
    """``x + delta`` plus SwiGLU of its norm; takes what ``normed_linear`` takes, gives what ``added_linear`` gives."""
    x, hidden = normed_linear(x, delta, norm, eps, w.gate_up, "silu")
    return added_linear(x, w.down, hidden)


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


class PlainMlpWeights(NamedTuple):
    up: Linear  # [intermediate, D]
    down: Linear  # [D, intermediate]


def plain_mlp(x: Tensor, w: PlainMlpWeights, name: str) -> Tensor:
    """``down(activation(up(x)))`` on ``x`` ``[T, D]``; ``name`` is that of an ``ops.activation``."""
    return w.down.apply(activation(w.up.apply(x), name))
