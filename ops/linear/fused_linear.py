"""Linear layer of few rows on a GPU, with what surrounds it in a model in the same launch: schema, registration.

A decode's products only read weights, so norm, activation and residual around them cost their launches alone, about as
much as the product of a small layer. ``triton_fused_linear.py`` has the kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops.library import LIBRARY
from compiled_llm.ops.rowwise.reference import (
    ACTIVATIONS,
    activation_reference,
    gated_activation_reference,
    layer_norm_reference,
    rms_norm_reference,
)

LIBRARY.define(
    "fused_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, Tensor? norm_bias, float eps, str activation,"
    " bool gated, float multiplier, Tensor? beside, Tensor? residual) -> Tensor"
)
LIBRARY.define(
    "add_fused_linear(Tensor x, Tensor delta, Tensor? delta_norm, Tensor? scale, Tensor weight, Tensor? bias,"
    " Tensor? norm, Tensor? norm_bias, float eps, str activation, bool gated, Tensor? factor) -> (Tensor, Tensor)"
)


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
    gated: bool = True,
    multiplier: float = 1.0,
    beside: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``y = norm(x) @ weight.T + bias``, its activation, ``* multiplier``, ``+ beside``, ``+ residual``, in this order.

    What is not given is left out. All is rounded where the ops on their own round. Up to 32 rows, in the default tiles,
    a row's bits depend on nothing but the row. Any number will do, but weights are read once for each tile of them.

    Args:
        x: ``[T, K]``; bfloat16 or float16; rows may be strided, the last stride is 1.
        weight: ``[N, K]`` contiguous, bias: ``[N]`` or None; dtype of ``x``.
        norm, norm_bias, eps: of ``layer_norm`` if there is a ``norm_bias``, else of ``rms_norm``; ``[K]``.
        activation: one of ``gated_activation``, or "" for none.
        gated: the activation is that of the first half of the outputs, and multiplies the second.
        beside, residual: as the result.

    Returns:
        ``[T, N]``, with a gated activation ``[T, N / 2]``; contiguous, dtype of ``x``.
    """
    assert activation in ("", *ACTIVATIONS)
    return torch.ops.compiled_llm.fused_linear(
        x, weight, bias, norm, norm_bias, eps, activation, gated, multiplier, beside, residual
    )


def add_fused_linear(
    x: Tensor,
    delta: Tensor,
    delta_norm: Tensor | None,
    scale: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
    gated: bool = True,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(x + delta) * scale``, of which the sum is rounded first, and ``fused_linear`` of it.

    Args:
        delta: as ``x``.
        delta_norm: ``[K]``; with it ``rms_norm`` of ``delta`` is added.
        scale: ``[1]`` float32, or None.
        factor: ``[T, N]`` in the dtype of ``x``, whose rows may be strided: multiplies what the activation gave; or
            None.

    The others are those of ``fused_linear``.

    Returns:
        ``[T, K]`` and ``[T, N]``, or ``[T, N / 2]``.
    """
    assert activation in ("", *ACTIVATIONS)
    return torch.ops.compiled_llm.add_fused_linear(
        x, delta, delta_norm, scale, weight, bias, norm, norm_bias, eps, activation, gated, factor
    )


def fused_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, norm_bias: Tensor | None, eps: float,
    activation: str, gated: bool, multiplier: float, beside: Tensor | None, residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """The op in plain torch: its numbers, not the order of its sums."""
    if norm is not None:
        x = rms_norm_reference(x, norm, eps) if norm_bias is None else layer_norm_reference(x, norm, norm_bias, eps)
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    if activation:
        y = gated_activation_reference(y, activation) if gated else activation_reference(y, activation)
    y = y * multiplier
    if beside is not None:
        y = y + beside
    return y if residual is None else residual + y


def add_fused_linear_reference(
    x: Tensor, delta: Tensor, delta_norm: Tensor | None, scale: Tensor | None, weight: Tensor, bias: Tensor | None,
    norm: Tensor | None, norm_bias: Tensor | None, eps: float, activation: str, gated: bool, factor: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op in plain torch."""
    total = x + (delta if delta_norm is None else rms_norm_reference(delta, delta_norm, eps))
    total = total if scale is None else (total * scale).to(x.dtype)
    y = fused_linear_reference(total, weight, bias, norm, norm_bias, eps, activation, gated, 1.0, None, None)
    return total, y if factor is None else y * factor


def _outputs(x: Tensor, weight: Tensor, activation: str, gated: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // (2 if activation and gated else 1))


@torch.library.register_fake("compiled_llm::fused_linear", lib=LIBRARY)
def _fake(x: Tensor, weight: Tensor, bias, norm, norm_bias, eps: float, activation: str, gated: bool, *args) -> Tensor:
    return _outputs(x, weight, activation, gated)


@torch.library.register_fake("compiled_llm::add_fused_linear", lib=LIBRARY)
def _fake_add(
    x: Tensor,
    delta,
    delta_norm,
    scale,
    weight: Tensor,
    bias,
    norm,
    norm_bias,
    eps,
    activation: str,
    gated: bool,
    factor,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _outputs(x, weight, activation, gated)


def _cuda(*args) -> Tensor:
    from compiled_llm.ops.linear import triton_fused_linear  # the first call on a GPU loads Triton, not the import

    return triton_fused_linear.fused_linear(*args)


def _add_cuda(*args) -> tuple[Tensor, Tensor]:
    from compiled_llm.ops.linear import triton_fused_linear

    return triton_fused_linear.add_fused_linear(*args)


LIBRARY.impl("fused_linear", fused_linear_reference, "CompositeExplicitAutograd")
LIBRARY.impl("fused_linear", _cuda, "CUDA")
LIBRARY.impl("add_fused_linear", add_fused_linear_reference, "CompositeExplicitAutograd")
LIBRARY.impl("add_fused_linear", _add_cuda, "CUDA")
