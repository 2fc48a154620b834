"""Linear layer of few rows on a GPU, with what surrounds it in a model in the same launch: schema, registration.

A decode's products only read weights, so norm, activation and residual around them cost their launches alone, about as
much as the product of a small layer. ``triton_fused_linear.py`` has the kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops.library import LIBRARY
from compiled_llm.ops.rowwise.reference import ACTIVATIONS, gated_activation_reference, rms_norm_reference

MAX_ROWS = 32
"""Most rows that the op is meant for, though it takes any: weights are read once for each 16 of them."""

MAX_GATED_ROWS = 256
"""The same with an activation and no norm: a row's bits are others then than up to ``MAX_ROWS``."""

LIBRARY.define(
    "fused_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, float eps, str activation, Tensor? residual)"
    " -> Tensor"
)


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """``y = rms_norm(x) @ weight.T + bias``, then ``activation(y's first half) * second half``, then ``+ residual``.

    Each of the three around the product is left out where it is not given. All is rounded where the ops on their own
    round. Up to ``MAX_ROWS`` rows, a row's bits depend on nothing but the row.

    Args:
        x: ``[T, K]``; bfloat16 or float16; rows may be strided, the last stride is 1.
        weight: ``[N, K]`` contiguous, bias: ``[N]`` or None; dtype of ``x``.
        norm, eps: those of ``rms_norm``, ``[K]``.
        activation: one of ``gated_activation``, or "" for none.
        residual: as the result.

    Returns:
        ``[T, N]``, with an activation ``[T, N / 2]``; contiguous, dtype of ``x``.
    """
    assert activation in ("", *ACTIVATIONS)
    return torch.ops.compiled_llm.fused_linear(x, weight, bias, norm, eps, activation, residual)


def fused_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, activation: str,
    residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """The op in plain torch: its numbers, not the order of its sums."""
    if norm is not None:
        x = rms_norm_reference(x, norm, eps)
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    if activation:
        y = gated_activation_reference(y, activation)
    return y if residual is None else residual + y


@torch.library.register_fake("compiled_llm::fused_linear", lib=LIBRARY)
def _fake(x: Tensor, weight: Tensor, bias, norm, eps: float, activation: str, residual) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // (2 if activation else 1))


def _cuda(*args) -> Tensor:
    from compiled_llm.ops.linear import triton_fused_linear  # the first call on a GPU loads Triton, not the import

    return triton_fused_linear.fused_linear(*args)


LIBRARY.impl("fused_linear", fused_linear_reference, "CompositeExplicitAutograd")
LIBRARY.impl("fused_linear", _cuda, "CUDA")
