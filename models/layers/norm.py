"""Norms of a residual stream."""

from typing import NamedTuple

from torch import Tensor

from compiled_llm import ops


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x + delta`` and its norm, two ``[T, D]``; a ``delta`` of None adds nothing. See ``ops.rms_norm``."""
    return (x, ops.rms_norm(x, weight, eps)) if delta is None else ops.add_rms_norm(x, delta, weight, eps)


class LayerNorm(NamedTuple):
    """The weights of a layer norm, in the model's dtype."""

    weight: Tensor  # [D]
    bias: Tensor  # [D]


def add_layer_norm(x: Tensor, delta: Tensor | None, w: LayerNorm, eps: float) -> tuple[Tensor, Tensor]:
    """``x + delta`` and its norm, two ``[T, D]``; a ``delta`` of None adds nothing. See ``ops.layer_norm``."""
    if delta is None:
        return x, ops.layer_norm(x, w.weight, w.bias, eps)
    return ops.add_layer_norm(x, delta, w.weight, w.bias, eps)
