"""Linear layers and what surrounds them in a model: a norm before, an activation or a sum behind.

On a GPU these are one launch where the rows are few and the weights plain (ops/linear/fused_linear.py), and an
activation is the product's up to a few hundred rows. Elsewhere each is an op of its own, and a sum is left to the norm
that follows, with which it is one op. Both round at the same places.
"""

from typing import TypeGuard

import torch
from torch import Tensor

from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.ops import add_rms_norm, fused_linear, gated_activation, rms_norm
from compiled_llm.ops.linear.fused_linear import MAX_GATED_ROWS, MAX_ROWS


def _is_fused(linear: Linear, x: Tensor, most: int = MAX_ROWS) -> TypeGuard[Dense]:
    """Whether the product with ``x`` takes in what surrounds it; ``most``: rows for which it does."""
    few = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.shape[0] <= most
    return few and isinstance(linear, Dense)


def gated_linear(x: Tensor, linear: Linear, activation: str) -> Tensor:
    """``ops.gated_activation`` of ``linear`` on ``x`` ``[T, D]``; of ``linear`` itself where ``activation`` is ""."""
    if activation and _is_fused(linear, x, MAX_GATED_ROWS):
        return fused_linear(x, linear.weight, linear.bias, activation=activation)
    y = linear.apply(x)
    return gated_activation(y, activation) if activation else y


def normed_linear(
    x: Tensor, delta: Tensor | None, norm: Tensor, eps: float, linear: Linear, activation: str = ""
) -> tuple[Tensor, Tensor]:
    """``x + delta`` and ``gated_linear`` of its RMS norm; a ``delta`` of None adds nothing. All are ``[T, D]``."""
    if delta is not None:
        x, normed = add_rms_norm(x, delta, norm, eps)
    elif _is_fused(linear, x):
        return x, fused_linear(x, linear.weight, linear.bias, norm=norm, eps=eps, activation=activation)
    else:
        normed = rms_norm(x, norm, eps)
    return x, gated_linear(normed, linear, activation)


def added_linear(x: Tensor, linear: Linear, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """``x + linear(y)`` and None; or, where it is left to the next norm, ``x`` and what has to be added to it."""
    if _is_fused(linear, y):
        return fused_linear(y, linear.weight, linear.bias, residual=x), None
    return x, linear.apply(y)
