"""Linear layers on quantised weights with what surrounds them in a model, for few rows on a GPU: schemas, registration.

As ``fused_linear`` for plain weights: the norm before, and the activation or the residual behind. On a GPU each is one
launch of the kernels of ``quantized_linear`` and ``quantized_linear_a8`` (int8 activations of more than
``triton_quantized_a8.FEW_ROWS`` rows: two), with the bits of the single ops.
"""

import torch
from torch import Tensor

from compiled_llm.ops.library import LIBRARY
from compiled_llm.ops.linear.quantized_linear import quantized_linear
from compiled_llm.ops.linear.quantized_linear_a8 import quantized_linear_a8
from compiled_llm.ops.rowwise.reference import gated_activation_reference, rms_norm_reference

_WEIGHT, _FORM = "Tensor codes, Tensor scales, Tensor? zeros", "str element, int group_size, int out_features"
_AROUND = "Tensor? norm, float eps, str activation, Tensor? residual"
LIBRARY.define(f"fused_quantized_linear(Tensor x, {_WEIGHT}, Tensor? bias, {_FORM}, {_AROUND}) -> Tensor")
LIBRARY.define(
    f"fused_quantized_linear_a8(Tensor x, {_WEIGHT}, Tensor? bias, Tensor? x_scale, {_FORM}, {_AROUND}) -> Tensor"
)


def fused_quantized_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    element: str,
    group_size: int,
    out_features: int,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """``quantized_linear`` of ``rms_norm(x)``, then ``activation(first half) * second half``, then ``+ residual``.

    Args:
        x: ``[T, K]`` bfloat16 or float16.
        codes, scales, zeros, bias, element, group_size, out_features: those of ``quantized_linear``.
        norm, eps, activation, residual: those of ``exact_linear``; each may be left out.

    Returns:
        ``[T, N]``, with an activation ``[T, N / 2]``; contiguous, dtype of ``x``.
    """
    return torch.ops.compiled_llm.fused_quantized_linear(
        x, codes, scales, zeros, bias, element, group_size, out_features, norm, eps, activation, residual
    )


def fused_quantized_linear_a8(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    x_scale: Tensor | None,
    element: str,
    group_size: int,
    out_features: int,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """The same of ``quantized_linear_a8``, whose ``x_scale`` is that of activations after the norm."""
    return torch.ops.compiled_llm.fused_quantized_linear_a8(
        x, codes, scales, zeros, bias, x_scale, element, group_size, out_features, norm, eps, activation, residual
    )


def _surrounded(linear, x: Tensor, *args) -> Tensor:
    """By the single ops."""
    *given, norm, eps, activation, residual = args
    y = linear(x if norm is None else rms_norm_reference(x, norm, eps), *given)
    if activation:
        y = gated_activation_reference(y, activation)
    return y if residual is None else residual + y


def fused_quantized_linear_reference(x: Tensor, *args) -> Tensor:
    """The op by the single ops."""
    return _surrounded(quantized_linear, x, *args)


def fused_quantized_linear_a8_reference(x: Tensor, *args) -> Tensor:
    """The op by the single ops."""
    return _surrounded(quantized_linear_a8, x, *args)


@torch.library.register_fake("compiled_llm::fused_quantized_linear", lib=LIBRARY)
def _fake(x: Tensor, *args) -> Tensor:
    out_features, _, _, activation, _ = args[-5:]
    return x.new_empty(x.shape[0], out_features // (2 if activation else 1))


@torch.library.register_fake("compiled_llm::fused_quantized_linear_a8", lib=LIBRARY)
def _fake_a8(x: Tensor, *args) -> Tensor:
    return _fake(x, *args)


def _cuda(*args) -> Tensor:
    from compiled_llm.ops.linear import triton_quantized  # the first call on a GPU loads Triton, not the import

    return triton_quantized.quantized_linear(*args)


def _cuda_a8(*args) -> Tensor:
    from compiled_llm.ops.linear import triton_quantized_a8

    return triton_quantized_a8.quantized_linear_a8(*args)


LIBRARY.impl("fused_quantized_linear", fused_quantized_linear_reference, "CompositeExplicitAutograd")
LIBRARY.impl("fused_quantized_linear_a8", fused_quantized_linear_a8_reference, "CompositeExplicitAutograd")
LIBRARY.impl("fused_quantized_linear", _cuda, "CUDA")
LIBRARY.impl("fused_quantized_linear_a8", _cuda_a8, "CUDA")
