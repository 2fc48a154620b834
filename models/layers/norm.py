"""Norms of a residual stream."""

from typing import NamedTuple

from torch import Tensor

from compiled_llm import ops


class LayerNorm(NamedTuple):
    """The weights of a layer norm, in the model's dtype."""

    weight: Tensor  # [D]
    bias: Tensor  # [D]


Norm = Tensor | LayerNorm  # a Tensor [D] is the weight of an RMS norm


def normed(x: Tensor, norm: Norm, eps: float) -> Tensor:
    """The norm of ``x`` ``[T, D]``. See ``ops.rms_norm`` and ``ops.layer_norm``."""
    if isinstance(norm, LayerNorm):
        return ops.layer_norm(x, norm.weight, norm.bias, eps)
    return ops.rms_norm(x, norm, eps)


def added(
    x: Tensor, delta: Tensor | None, eps: float, delta_norm: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """``x + delta``, ``[T, D]``; None adds nothing, and with ``delta_norm`` it is the RMS norm of ``delta``.

    ``scale``: ``[1]`` float32, of the sum; see ``ops.scaled_sum``.
    """
    if delta is None:
        assert scale is None, "of a sum"
        return x
    return ops.sum_of_norms(x, None, delta, delta_norm, eps, scale)


def add_norm(
    x: Tensor,
    delta: Tensor | None,
    norm: Norm | None,
    eps: float,
    delta_norm: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``added`` and its norm, two ``[T, D]``; without a ``norm`` twice the same. ``scale``: as that of ``added``."""
    if delta is None or norm is None:
        x = added(x, delta, eps, delta_norm, scale)
        return x, x if norm is None else normed(x, norm, eps)
    if isinstance(norm, LayerNorm):
        assert delta_norm is None, "no family has it beside layer norms"
        assert scale is None, "likewise"
        return ops.add_layer_norm(x, delta, norm.weight, norm.bias, eps)
    if delta_norm is None and scale is None:
        return ops.add_rms_norm(x, delta, norm, eps)
    return ops.norm_of_sum(x, delta, delta_norm, norm, eps, scale)
