"""Experts on quantised weights with the gate or the sum behind them, for few rows on a GPU: schemas, registration.

As ``grouped_gated_linear`` and ``grouped_linear_sum`` for plain weights. On a GPU each is one launch of the kernels of
``triton_quantized_grouped.py`` (int8 activations of tiles of more than ``triton_quantized_a8.FEW_ROWS`` rows: two),
with the bits of the single ops.
"""

from typing import Any

import torch
from torch import Tensor

from compiled_llm.ops.library import define_op, on_gpu
from compiled_llm.ops.linear.quantized_linear import grouped_quantized_linear
from compiled_llm.ops.linear.quantized_linear_a8 import grouped_quantized_linear_a8
from compiled_llm.ops.moe.routing import weighted_sum_added_reference
from compiled_llm.ops.rowwise.reference import GATES, clamped_swiglu_reference, gated_activation_reference


def gated_quantized_experts(
    x: Tensor, experts: tuple[Any, ...], activation: str, alpha: float = 0.0, limit: float = 0.0
) -> Tensor:
    """``grouped_quantized_linear``, or that of int8 activations, and a gate of what it gives.

    Args:
        x: ``[T, K]`` bfloat16 or float16.
        experts: codes, scales, zeros, bias, tokens (``rows`` of that op), starts, element, group_size, out_features and
            how activations are kept, as ``models/linears/quantized.py`` calls it.
        activation, alpha, limit: those of ``grouped_gated_linear``.

    Returns:
        ``[R, N / 2]``. Rows that belong to no expert are not written.
    """
    assert activation in GATES
    return torch.ops.compiled_llm.gated_quantized_experts(x, *experts, activation, alpha, limit)


def summed_quantized_experts(
    x: Tensor, experts: tuple[Any, ...], places: Tensor, weights: Tensor, beside: Tensor | None,
    residual: Tensor | None, counters: Tensor,
) -> Tensor:  # fmt: skip
    """``grouped_quantized_linear``, or that of int8 activations, and ``weighted_sum_added`` of what it gives.

    Args:
        x: ``[R, K]`` bfloat16 or float16: each row is its own.
        experts: those of ``gated_quantized_experts``.
        places, weights, beside, residual, counters: those of ``grouped_linear_sum``, as tokens and starts are.

    Returns:
        ``[T, N]``.
    """
    return torch.ops.compiled_llm.summed_quantized_experts(x, *experts, places, weights, beside, residual, counters)


def _product(x: Tensor, weight: tuple, rows: Tensor | None, starts: Tensor, *form_and_kind: Any) -> Tensor:
    element, group_size, out_features, activations = form_and_kind
    codes, scales, zeros, bias = weight
    own, form = (codes, scales, zeros, bias), (element, group_size, out_features)
    if activations == "model":
        return grouped_quantized_linear(x, *own, rows, starts, *form)
    return grouped_quantized_linear_a8(x, *own, None, rows, starts, activations == "int8_groups", *form)


def gated_quantized_experts_reference(x: Tensor, *args) -> Tensor:
    """The op by the single ops."""
    *weight, tokens, starts, element, group_size, out_features, activations, activation, alpha, limit = args
    y = _product(x, tuple(weight), tokens, starts, element, group_size, out_features, activations)
    if activation == "clamped_swiglu":
        return clamped_swiglu_reference(y, alpha, limit)
    return gated_activation_reference(y, activation)


def summed_quantized_experts_reference(x: Tensor, *args) -> Tensor:
    """The op by the single ops."""
    weight, (_, starts, *form), (places, weights, beside, residual, _) = args[:4], args[4:10], args[10:]
    return weighted_sum_added_reference(_product(x, weight, None, starts, *form), places, weights, beside, residual)


_EXPERTS = (
    "Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, Tensor tokens, Tensor starts, str element,"
    " int group_size, int out_features, str activations"
)
define_op(
    f"gated_quantized_experts({_EXPERTS}, str activation, float alpha, float limit) -> Tensor",
    reference=gated_quantized_experts_reference,
    fake=lambda x, *args: x.new_empty(args[4].shape[0], args[8] // 2),  # of tokens, and out_features
    gpu=on_gpu("moe.triton_quantized_grouped:gated_quantized_experts"),
)
define_op(
    f"summed_quantized_experts({_EXPERTS}, Tensor places, Tensor weights, Tensor? beside, Tensor? residual,"
    " Tensor(a!) counters) -> Tensor",
    reference=summed_quantized_experts_reference,
    fake=lambda x, *args: x.new_empty(args[10].shape[0], args[8]),  # of places, and out_features
    gpu=on_gpu("moe.triton_quantized_grouped:summed_quantized_experts"),
)
