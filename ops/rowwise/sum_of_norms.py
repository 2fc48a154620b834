"""Sums of two rows of which each may be normed, and the norm of the sum: schema and registration. On a GPU one launch.

A CPU has its op for each, which the compiled step calls itself.
"""

import torch
from torch import Tensor

from compiled_llm.ops.library import define_op, on_gpu
from compiled_llm.ops.rowwise.reference import rms_norm_reference
from compiled_llm.ops.rowwise.rowwise import add_rms_norm, rms_norm, scaled_sum


def sum_of_norms(
    x: Tensor, x_norm: Tensor | None, y: Tensor, y_norm: Tensor | None, eps: float, scale: Tensor | None = None
) -> Tensor:
    """``rms_norm(x, x_norm, eps) + rms_norm(y, y_norm, eps)``, the sum rounded before ``scale`` multiplies it.

    Args:
        x, y: ``[T, D]``, of one dtype.
        x_norm, y_norm: ``[D]``; None: no norm.
        scale: ``[1]`` float32, or None.

    Returns:
        ``[T, D]``.
    """
    if x.is_cuda:
        return torch.ops.compiled_llm.sum_of_norms(x, x_norm, y, y_norm, scale, None, eps)[0]
    x = x if x_norm is None else rms_norm(x, x_norm, eps)
    y = y if y_norm is None else rms_norm(y, y_norm, eps)
    return x + y if scale is None else scaled_sum(x, y, scale)


def norm_of_sum(
    x: Tensor, delta: Tensor, delta_norm: Tensor | None, norm: Tensor, eps: float, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``sum_of_norms(x, None, delta, delta_norm, eps, scale)``, and its ``rms_norm`` by ``norm``: two ``[T, D]``."""
    if x.is_cuda:
        return torch.ops.compiled_llm.sum_of_norms(x, None, delta, delta_norm, scale, norm, eps)
    if scale is not None:
        total = sum_of_norms(x, None, delta, delta_norm, eps, scale)
        return total, rms_norm(total, norm, eps)
    return add_rms_norm(x, delta if delta_norm is None else rms_norm(delta, delta_norm, eps), norm, eps)


def sum_of_norms_reference(
    x: Tensor, x_norm: Tensor | None, y: Tensor, y_norm: Tensor | None, scale: Tensor | None, norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op in plain torch. Without a ``norm`` the second result is empty."""
    x = x if x_norm is None else rms_norm_reference(x, x_norm, eps)
    total = x + (y if y_norm is None else rms_norm_reference(y, y_norm, eps))
    total = total if scale is None else (total * scale).to(x.dtype)
    return total, x.new_empty(0) if norm is None else rms_norm_reference(total, norm, eps)


def _fake(x: Tensor, x_norm, y, y_norm, scale, norm, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0 if norm is None else x.shape)


define_op(
    "sum_of_norms(Tensor x, Tensor? x_norm, Tensor y, Tensor? y_norm, Tensor? scale, Tensor? norm, float eps)"
    " -> (Tensor, Tensor)",
    reference=sum_of_norms_reference,
    fake=_fake,
    gpu=on_gpu("rowwise.triton_sum_of_norms:sum_of_norms"),
)
