"""What the linear layers of a block are given over a text."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

_ROWS = 512  # kept of each input, on which errors with quantised inputs are measured


class InputStatistics:
    """Over all tokens of a text, of one input ``x [K]`` that one or more linear layers share.

    Attributes:
        hessian: ``[K, K]`` float32, sum of ``x x^T``.
        largest, mean: ``[K]``, of absolute values.
        rows: ``[R, K]``, tokens at even distances.
    """

    def __init__(self, in_features: int, num_tokens: int) -> None:
        self.hessian = torch.zeros(in_features, in_features)
        self.largest = torch.zeros(in_features)
        self._sum = torch.zeros(in_features, dtype=torch.float64)
        self._rows: list[Tensor] = []
        self._every = -(-num_tokens // _ROWS)
        self._count = 0

    def add(self, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1])
        self.hessian.addmm_(rows.T, rows)
        self.largest = torch.maximum(self.largest, rows.abs().amax(0))
        self._sum += rows.abs().sum(0, dtype=torch.float64)
        self._rows.append(rows[-self._count % self._every :: self._every].clone())
        self._count += len(rows)

    @property
    def mean(self) -> Tensor:
        return (self._sum / self._count).float()

    @property
    def rows(self) -> Tensor:
        return torch.cat(self._rows)

    def divide(self, scales: Tensor) -> None:
        """The same after each input was divided by ``scales [K]``."""
        self.hessian /= scales[:, None] * scales
        self.largest /= scales
        self._sum /= scales
        self._rows = [rows / scales for rows in self._rows]


def collect(block: nn.Module, run: Callable[[], None], num_tokens: int) -> dict[str, InputStatistics]:
    """Statistics by the names of the block's linear layers, while ``run`` runs it over a text of so many tokens.

    Layers that are given the same tensor (queries, keys and values) share an object.
    """
    found: dict[str, InputStatistics] = {}
    last: list[Tensor | InputStatistics] = []

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0]
            if last and last[0] is x:
                shared = last[1]
                assert isinstance(shared, InputStatistics)
                found.setdefault(name, shared)
                return
            if name not in found:
                found[name] = InputStatistics(x.shape[-1], num_tokens)
            found[name].add(x)
            last[:] = [x, found[name]]

        return add

    handles = [m.register_forward_pre_hook(hook(n)) for n, m in block.named_modules() if isinstance(m, nn.Linear)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found
