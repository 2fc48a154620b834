"""Linear layer whose outputs add up their inputs in one order for every number of rows, for GPUs: schema, registration.

``y = x @ W.T + bias``, with what surrounds it in a model. A library chooses among many kernels by the number of rows,
and cuts the sum over the inputs into other pieces for one row than for a thousand. ``triton_linear.py`` says why this
one does not.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops.library import LIBRARY
from compiled_llm.ops.rowwise.reference import gated_activation_reference, rms_norm_reference

LIBRARY.define(
    "exact_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, float eps, str activation, Tensor? residual)"
    " -> Tensor"
)


def exact_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, accumulated in float32 (never in TF32) and rounded once.

    Then ``activation(first half) * second half``, then ``+ residual``, of ``rms_norm(x)``, each where it is given: on a
    GPU with the bits of the single ops.

    Args:
        x: ``[T, K]``; bfloat16 or float16, without surroundings also float32; rows may be strided, the last stride
            is 1.
        weight: ``[N, K]`` contiguous, bias: ``[N]`` or None; dtype of ``x``.
        norm, eps: of ``rms_norm``, ``[K]``.
        activation: one of ``gated_activation``, or "" for none.
        residual: as the result.

    Returns:
        ``[T, N]``, with an activation ``[T, N / 2]``; contiguous, dtype of ``x``.
    """
    return torch.ops.compiled_llm.exact_linear(x, weight, bias, norm, eps, activation, residual)


def exact_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, activation: str,
    residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """The op in plain torch: its numbers, not its order."""
    if norm is not None:
        x = rms_norm_reference(x, norm, eps)
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    if activation:
        y = gated_activation_reference(y, activation)
    return y if residual is None else residual + y


@torch.library.register_fake("compiled_llm::exact_linear", lib=LIBRARY)
def _fake(x: Tensor, weight: Tensor, bias, norm, eps: float, activation: str, residual) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // (2 if activation else 1))


def _cuda(*args) -> Tensor:
    from compiled_llm.ops.linear import triton_linear  # the first call on a GPU loads Triton, not the import

    return triton_linear.exact_linear(*args)


LIBRARY.impl("exact_linear", exact_linear_reference, "CompositeExplicitAutograd")
LIBRARY.impl("exact_linear", _cuda, "CUDA")
