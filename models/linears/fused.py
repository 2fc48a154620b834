"""Linear layers and what surrounds them in a model: a sum and a norm before, an activation or a sum behind.

On a GPU a product of few rows takes in the activation, the multiplier and the residual behind it
(``ops/linear/exact_linear.py``; unless a file that was measured on this GPU says otherwise, ``product_choices.py``). Of
quantised weights it takes in an RMS norm before it too (``fused_quantized_linear.py``). Elsewhere each is an op of its
own, and a sum is left to the norm that follows, with which it is one op. Both round at the same places.
"""

from typing import TypeGuard

import torch
from torch import Tensor

from compiled_llm import ops
from compiled_llm.models.layers.norm import Norm, add_norm
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.exact import Exact
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.models.linears.quantized import Quantized
from compiled_llm.ops import exact_linear, fused_quantized_linear, fused_quantized_linear_a8, gated_activation
from compiled_llm.ops.linear.product_choices import MAX_ROWS, is_fused
from compiled_llm.ops.linear.surroundings import Surroundings


def _is_halved_on_gpu(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def _takes_norm(linear: Linear, x: Tensor) -> TypeGuard[Quantized]:
    """Whether the product with ``x`` takes in an RMS norm before it."""
    in_order = isinstance(linear, Quantized) and linear.order is None
    return in_order and _is_halved_on_gpu(x) and x.shape[0] <= MAX_ROWS


def _takes_what_follows(linear: Linear, x: Tensor, around: str) -> TypeGuard[Dense | Exact | Quantized]:
    """Whether the product with ``x`` takes in what follows it; ``around`` says what, as in ``Product``."""
    if not _is_halved_on_gpu(x):
        return False
    if isinstance(linear, Dense):
        return is_fused(linear.out_features, linear.in_features, around, x.shape[0], x.get_device())
    return _takes_norm(linear, x) or (isinstance(linear, Exact) and x.shape[0] <= MAX_ROWS)


def _surrounded(x: Tensor, linear: Dense | Exact | Quantized, around: Surroundings) -> Tensor:
    """``linear`` of ``x`` with what is ``around`` it: one op."""
    if isinstance(linear, (Dense, Exact)):
        dense = linear.dense if isinstance(linear, Exact) else linear
        return exact_linear(x, dense.weight, dense.bias, around)
    form = linear.scheme.form
    constants = form.element, form.group_size, linear.out_features
    if linear.scheme.activations == "int8":
        scale = linear.input_scale
        return fused_quantized_linear_a8(x, *linear.weight, linear.bias, scale, *constants, around=around)
    return fused_quantized_linear(x, *linear.weight, linear.bias, *constants, around=around)


def activated_linear(
    x: Tensor, linear: Linear, activation: str = "", gated: bool = True, factor: Tensor | None = None
) -> Tensor:
    """``ops.gated_activation`` of ``linear`` on ``x`` ``[T, D]``; if not ``gated``, ``ops.activation``; "" for none.

    With a ``factor`` ``[T, N]`` the activation of all N outputs is multiplied by it.
    """
    if factor is not None and not x.is_cuda:
        return gated_activation(torch.cat([linear.apply(x), factor], dim=1), activation)
    if factor is not None:
        return activated_linear(x, linear, activation, gated=False) * factor
    around = "gate" if activation and gated else "residual"
    if (activation or isinstance(linear, Dense)) and _takes_what_follows(linear, x, around):
        return _surrounded(x, linear, Surroundings(activation=activation, gated=gated))
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
    scale: Tensor | None = None,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``added(x, delta, eps, delta_norm, scale)``, and ``activated_linear`` of its norm; of itself without a ``norm``.

    ``x`` and ``delta`` are ``[T, D]``. A ``factor`` comes with a ``delta``, and with an activation that is not gated.
    """
    assert factor is None or (delta is not None and activation and not gated)
    if delta is None and isinstance(norm, Tensor) and _takes_norm(linear, x):
        return x, _surrounded(x, linear, Surroundings(norm, eps, activation, gated=gated))
    x, y = add_norm(x, delta, norm, eps, delta_norm, scale)
    return x, activated_linear(y, linear, activation, gated, factor)


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
    if delta_norm is None and _takes_what_follows(linear, y, "residual"):
        return _surrounded(y, linear, Surroundings(residual=x, multiplier=multiplier, beside=beside)), None
    delta = activated_linear(y, linear)
    if multiplier != 1.0:
        delta = delta * multiplier
    return x, delta if beside is None else delta + beside
