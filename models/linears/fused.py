"""Linear layers and what surrounds them in a model: a sum and a norm before, an activation or a sum behind.

On a GPU a product of few rows takes in what adapters change, the activation, the multiplier and the residual behind it
(``ops/linear/exact_linear.py``; unless a file that was measured on this GPU says otherwise, ``product_choices.py``). Of
quantised weights it takes in an RMS norm before it too (``quantized_linear.py``). Elsewhere each is an op of its
own, and a sum is left to the norm that follows, with which it is one op. Both round at the same places.
"""

from typing import TypeGuard

import torch
from torch import Tensor

from compiled_llm import ops
from compiled_llm.models.linears.adapted import Adapted
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.exact import Exact
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.models.linears.quantized import Quantized
from compiled_llm.ops import (
    Following,
    exact_linear,
    fused_quantized_linear,
    fused_quantized_linear_a8,
    gated_activation,
)
from compiled_llm.ops.linear.product_choices import MAX_ROWS, is_fused
from compiled_llm.ops.linear.surroundings import Surroundings


def _is_halved_on_gpu(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def takes_norm(linear: Linear, x: Tensor) -> TypeGuard[Quantized | Adapted]:
    """Whether the product with ``x`` takes in an RMS norm before it."""
    if isinstance(linear, Adapted):
        return linear.head is None and takes_norm(linear.plain, x)
    in_order = isinstance(linear, Quantized) and linear.order is None
    return in_order and _is_halved_on_gpu(x) and x.shape[0] <= MAX_ROWS


def takes_what_follows(linear: Linear, x: Tensor, around: str) -> TypeGuard[Dense | Exact | Quantized | Adapted]:
    """Whether the product with ``x`` takes in what follows it; ``around`` says what, as in ``Product``."""
    if isinstance(linear, Adapted):
        return linear.head is None and x.shape[0] <= MAX_ROWS and takes_what_follows(linear.plain, x, around)
    if not _is_halved_on_gpu(x):
        return False
    if isinstance(linear, Dense):
        return is_fused(linear.out_features, linear.in_features, around, x.shape[0], x.get_device())
    return takes_norm(linear, x) or (isinstance(linear, Exact) and x.shape[0] <= MAX_ROWS)


def surrounded(x: Tensor, linear: Linear, around: Surroundings) -> Tensor:
    """``linear`` of ``x``, which ``takes_norm`` or ``takes_what_follows``, with what is ``around`` it: one op."""
    if isinstance(linear, Adapted):
        return surrounded(x, linear.plain, around._replace(lora=linear.surroundings))
    if isinstance(linear, (Dense, Exact)):
        dense = linear.dense if isinstance(linear, Exact) else linear
        return exact_linear(x, dense.weight, dense.bias, around, dense.counters)
    assert isinstance(linear, Quantized)
    form = linear.scheme.form
    constants = form.element, form.group_size, linear.out_features
    if linear.scheme.int8_activations:
        given = linear.input_scale, linear.scheme.by_groups
        return fused_quantized_linear_a8(x, *linear.weight, linear.bias, *given, *constants, around=around)
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
    if (activation or isinstance(linear, (Dense, Adapted))) and takes_what_follows(linear, x, around):
        return surrounded(x, linear, Surroundings(activation=activation, gated=gated))
    if isinstance(linear, Adapted):
        y = activated_linear(x, linear.plain)
        if activation and linear.changes_and(x):
            return linear.followed(y, x, Following(activation, gated))[0]
        y = linear.change(y, x)
    else:
        y = linear.apply(x)
    if not activation:
        return y
    return gated_activation(y, activation) if gated else ops.activation(y, activation)
