"""Muon in float32, for processors that multiply bfloat16 slowly: `torch.optim.Muon` rounds to it."""

from collections.abc import Iterable

import own_checkout
import torch
from torch import nn

_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the quintic iteration that Keller Jordan published
_STEPS = 5


class Muon(torch.optim.Optimizer):
    """Steps of matrices with orthogonalised momentum (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon)."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                mean = self.state[matrix].setdefault("mean", torch.zeros_like(matrix))
                mean.lerp_(matrix.grad, 1 - group["momentum"])
                direction = _orthogonal(matrix.grad.lerp(mean, group["momentum"]))
                rows, columns = matrix.shape
                matrix.add_(direction, alpha=-group["lr"] * max(1, rows / columns) ** 0.5)


def _orthogonal(x: torch.Tensor) -> torch.Tensor:
    """The matrix with singular values near 1 in the place of those of ``x``."""
    a, b, c = _COEFFICIENTS
    turned = x.T if len(x) > x.shape[1] else x
    turned = turned / (turned.norm() + 1e-7)
    for _ in range(_STEPS):
        square = turned @ turned.T
        turned = a * turned + (b * square + c * square @ square) @ turned
    return turned.T if len(x) > x.shape[1] else turned
