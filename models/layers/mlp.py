"""The MLPs, gated and plain."""

from typing import NamedTuple

from compiled_llm.models.layers.residual import BlockOutput, Normed
from compiled_llm.models.linears.protocol import Linear


class MlpWeights(NamedTuple):
    gate_up: Linear  # [2 * intermediate, D]
    down: Linear  # [D, intermediate]


class PlainMlpWeights(NamedTuple):
    up: Linear  # [intermediate, D]
    down: Linear  # [D, intermediate]


def mlp(x: Normed, w: MlpWeights | PlainMlpWeights, activation: str = "silu") -> BlockOutput:
    """``down(activation(gate(x)) * up(x))``, SwiGLU by default; ``down(activation(up(x)))`` where there is no gate.

    ``activation`` is that of ``ops.gated_activation`` or ``ops.activation``.
    """
    first, gated = first_linear(w)
    return BlockOutput(x.linear(first, activation, gated), w.down)


def first_linear(w: MlpWeights | PlainMlpWeights) -> tuple[Linear, bool]:
    """The layer that reads an MLP's input, and whether it gives gate and up side by side."""
    return (w.gate_up, True) if isinstance(w, MlpWeights) else (w.up, False)


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
