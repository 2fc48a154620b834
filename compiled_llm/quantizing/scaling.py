"""Scales of a layer's inputs that make its weights easier to round: SmoothQuant and AWQ.

Both divide input k of some linear layers by ``s_k`` and multiply their weights' column k by it, which changes nothing
but for rounding. The division is folded into what makes the input (``folding.py``).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_STEPS = 20


def smoothing_scales(largest_inputs: Tensor, largest_weights: Tensor, alpha: float) -> Tensor:
    """SmoothQuant's ``s_k = max|x_k|^alpha / max|w_k|^(1 - alpha)`` (Xiao et al., 2023, arXiv:2211.10438, eq. 4).

    Args:
        largest_inputs: ``[K]``, the largest absolute value of each input over a text.
        largest_weights: ``[K]``, that of each column over all layers that share the input.
        alpha: how much of the difficulty moves from the inputs to the weights, 0 to 1.

    Returns:
        ``[K]``, positive. 1 where an input or a column is zero throughout.
    """
    scales = largest_inputs.double() ** alpha / largest_weights.double().clamp(min=1e-10) ** (1 - alpha)
    useful = (largest_inputs > 0) & (largest_weights > 0) & scales.isfinite()
    return torch.where(useful, scales, torch.ones_like(scales)).clamp(1e-5, 1e5).float()


def awq_scales(mean_inputs: Tensor, power: float) -> Tensor:
    """AWQ's ``s_k = mean|x_k|^power`` (Lin et al., 2023, arXiv:2306.00978, eq. 4), divided by its geometric middle.

    Args:
        mean_inputs: ``[K]``, the mean absolute value of each input over a text.
        power: 0 (no scaling) to 1.
    """
    scales = mean_inputs.double().clamp(min=1e-8) ** power
    return (scales / (scales.max() * scales.min()).sqrt()).clamp(1e-5, 1e5).float()


def search(candidates: Sequence[Tensor], loss: Callable[[Tensor], float]) -> tuple[int, Tensor]:
    """The candidate ``[K]`` with the least ``loss``, and its place; the first of equal ones."""
    losses = [loss(scales) for scales in candidates]
    best = min(range(len(losses)), key=losses.__getitem__)
    return best, candidates[best]


def awq_candidates(mean_inputs: Tensor) -> list[Tensor]:
    """AWQ's grid of powers, 0 to 1; the first scales nothing."""
    return [torch.ones_like(mean_inputs), *(awq_scales(mean_inputs, step / _STEPS) for step in range(1, _STEPS + 1))]


def smoothing_candidates(largest_inputs: Tensor, largest_weights: Tensor, alpha: float | None) -> list[Tensor]:
    """SmoothQuant's scales of ``alpha``; where it is None, of a grid, whose first scales nothing."""
    if alpha is not None:
        return [smoothing_scales(largest_inputs, largest_weights, alpha)]
    grid = [smoothing_scales(largest_inputs, largest_weights, step / _STEPS) for step in range(4, _STEPS)]
    return [torch.ones_like(largest_inputs), *grid]
