"""Root mean square norm of a residual stream."""

from torch import Tensor

from compiled_llm import ops


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x + delta`` and its norm, two ``[T, D]``; a ``delta`` of None adds nothing. See ``ops.rms_norm``."""
    return (x, ops.rms_norm(x, weight, eps)) if delta is None else ops.add_rms_norm(x, delta, weight, eps)
