"""Gated MLP."""

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from compiled_llm.models.linears.protocol import Linear


class MlpWeights(NamedTuple):
    gate_up: Linear  # [2 * intermediate, D]
    down: Linear  # [D, intermediate]


def gated_mlp(x: Tensor, w: MlpWeights, activation: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    """``down(activation(gate(x)) * up(x))`` on ``x`` ``[T, D]``; SwiGLU by default (Shazeer, 2020)."""
    gate, up = w.gate_up.apply(x).chunk(2, dim=-1)
    return w.down.apply(activation(gate) * up)
