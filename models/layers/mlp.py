"""The MLPs, gated and plain."""

from typing import NamedTuple

from torch import Tensor

from compiled_llm.models.linears.protocol import Linear
from compiled_llm.ops import activation, gated_activation


class MlpWeights(NamedTuple):
    gate_up: Linear  # [2 * intermediate, D]
    down: Linear  # [D, intermediate]


def gated_mlp(x: Tensor, w: MlpWeights, activation: str = "silu") -> Tensor:
    """``down(activation(gate(x)) * up(x))`` on ``x`` ``[T, D]``; SwiGLU by default. See ``ops.gated_activation``."""
    return w.down.apply(gated_activation(w.gate_up.apply(x), activation))


class PlainMlpWeights(NamedTuple):
    up: Linear  # [intermediate, D]
    down: Linear  # [D, intermediate]


def plain_mlp(x: Tensor, w: PlainMlpWeights, name: str) -> Tensor:
    """``down(activation(up(x)))`` on ``x`` ``[T, D]``; ``name`` is that of an ``ops.activation``."""
    return w.down.apply(activation(w.up.apply(x), name))
