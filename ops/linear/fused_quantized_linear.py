"""Linear layers on quantised weights with what surrounds them in a model, for few rows on a GPU: schemas, registration.

As ``fused_linear`` for plain weights: the norm before, and what follows behind. On a GPU each is one launch of the
kernels of ``quantized_linear`` and ``quantized_linear_a8`` (int8 activations of more than
``triton_quantized_a8.FEW_ROWS`` rows: two), with the bits of the single ops.
"""

from typing import Any

import torch
from torch import Tensor

from compiled_llm.ops.library import define_op, on_gpu
from compiled_llm.ops.linear.quantized_linear import FORM, WEIGHT, quantized_linear
from compiled_llm.ops.linear.quantized_linear_a8 import quantized_linear_a8
from compiled_llm.ops.linear.surroundings import SCHEMA, Surroundings, surrounded


def fused_quantized_linear(x: Tensor, *weight: Any, around: Surroundings) -> Tensor:
    """``quantized_linear`` of ``x`` ``[T, K]``, bfloat16 or float16, and its other arguments, with ``around`` it.

    Returns:
        ``[T, N]``, with a gated activation ``[T, N / 2]``; contiguous, dtype of ``x``.
    """
    return torch.ops.compiled_llm.fused_quantized_linear(x, *weight, *around)


def fused_quantized_linear_a8(x: Tensor, *weight: Any, around: Surroundings) -> Tensor:
    """``quantized_linear_a8`` with ``around`` it. Its ``x_scale`` is that of activations after the norm."""
    return torch.ops.compiled_llm.fused_quantized_linear_a8(x, *weight, *around)


def fused_quantized_linear_reference(x: Tensor, *args) -> Tensor:
    """The op by the single ops."""
    return surrounded(quantized_linear, x, *args)


def fused_quantized_linear_a8_reference(x: Tensor, *args) -> Tensor:
    """The op by the single ops."""
    return surrounded(quantized_linear_a8, x, *args)


def _fake(x: Tensor, *args) -> Tensor:
    count = len(Surroundings._fields)
    return x.new_empty(x.shape[0], Surroundings(*args[-count:]).outputs(args[-count - 1]))


define_op(
    f"fused_quantized_linear({WEIGHT}, {FORM}, {SCHEMA}) -> Tensor",
    reference=fused_quantized_linear_reference,
    fake=_fake,
    gpu=on_gpu("linear.triton_quantized:quantized_linear"),
)
define_op(
    f"fused_quantized_linear_a8({WEIGHT}, Tensor? x_scale, {FORM}, {SCHEMA}) -> Tensor",
    reference=fused_quantized_linear_a8_reference,
    fake=_fake,
    gpu=on_gpu("linear.triton_quantized_a8:quantized_linear_a8"),
)
