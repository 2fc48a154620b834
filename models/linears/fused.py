"""Linear layers and what surrounds them in a model: a sum and a norm before, an activation or a sum behind.

On a GPU these are one launch where the rows are few and the weights plain (ops/linear/fused_linear.py), and a gated
activation is the product's up to a few hundred rows. Elsewhere each is an op of its own, and a sum is left to the norm
that follows, with which it is one op. Both round at the same places.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor

from compiled_llm import ops
from compiled_llm.models.layers.norm import LayerNorm, Norm, add_norm
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.ops import add_fused_linear, fused_linear, gated_activation
from compiled_llm.ops.linear.fused_linear import MAX_GATED_ROWS, MAX_ROWS


def _is_fused(linear: Linear, x: Tensor, most: int = MAX_ROWS) -> TypeGuard[Dense]:
    """Whether the product with ``x`` takes in what surrounds it; ``most``: rows for which it does."""
    few = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.shape[0] <= most
    return few and isinstance(linear, Dense)


def activated_linear(x: Tensor, linear: Linear, activation: str = "", gated: bool = True) -> Tensor:
    """``ops.gated_activation`` of ``linear`` on ``x`` ``[T, D]``; if not ``gated``, ``ops.activation``; "" for none."""
    if _is_fused(linear, x, MAX_GATED_ROWS if activation and gated else MAX_ROWS):
        return fused_linear(x, linear.weight, linear.bias, activation=activation, gated=gated)
    y = linear.apply(x)
    if not activation:
        return y
    return gated_activation(y, activation) if gated else ops.activation(y, activation)


def normed_linear(
    x: Tensor,
    delta: Tensor | None,
    norm: Norm | None,
    eps: float,
    linear: Linear,
    activation: str = "",
    gated: bool = True,
    delta_norm: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``added(x, delta, eps, delta_norm)``, and ``activated_linear`` of its norm, or of itself without a ``norm``.

    ``x`` and ``delta`` are ``[T, D]``.
    """
    if not _is_fused(linear, x):
        x, y = add_norm(x, delta, norm, eps, delta_norm)
        return x, activated_linear(y, linear, activation, gated)
    weight, bias = norm if isinstance(norm, LayerNorm) else (norm, None)
    around: dict[str, Any] = {"norm": weight, "norm_bias": bias, "eps": eps, "activation": activation, "gated": gated}
    if delta is None:
        return x, fused_linear(x, linear.weight, linear.bias, **around)
    return add_fused_linear(x, delta, delta_norm, linear.weight, linear.bias, **around)


def added_linear(
    x: Tensor,
    linear: Linear,
    y: Tensor,
    delta_norm: Tensor | None = None,
    multiplier: float = 1.0,
    beside: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``x + (linear(y) * multiplier + beside)`` and None; or, where it is left to the next norm, ``x`` and the rest.

    With ``delta_norm`` it is always left, as ``normed_linear`` takes norms of what is added.
    """
    if delta_norm is None and _is_fused(linear, y):
        return fused_linear(y, linear.weight, linear.bias, multiplier=multiplier, beside=beside, residual=x), None
    delta = activated_linear(y, linear)
    if multiplier != 1.0:
        delta = delta * multiplier
    return x, delta if beside is None else delta + beside
