"""What the linear layers of a block are given over a text."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from compiled_llm.quantizing.experts import Experts

_ROWS = 512  # kept of each input, on which errors with quantised inputs are measured


class InputStatistics:
    """What all tokens of a text make of one input ``x [K]``, which one or more linear layers share.

    Attributes:
        count: tokens; for an expert, the tokens that were routed to it.
        hessian: ``[K, K]`` float32, sum of ``x x^T``.
        largest, mean: ``[K]``, of absolute values.
        of_expert: whether it sees the tokens alone that are routed to it.
        rows: ``[R, K]``, tokens at even distances.
    """

    def __init__(self, in_features: int, num_tokens: int, of_expert: bool = False) -> None:
        self.of_expert = of_expert
        self.hessian = torch.zeros(in_features, in_features)
        self.largest = torch.zeros(in_features)
        self._sum = torch.zeros(in_features, dtype=torch.float64)
        self._rows: list[Tensor] = []
        self._every = -(-num_tokens // _ROWS)
        self.count = 0

    def add(self, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1])
        self.hessian.addmm_(rows.T, rows)
        self.largest = torch.maximum(self.largest, rows.abs().amax(0))
        self._sum += rows.abs().sum(0, dtype=torch.float64)
        self._rows.append(rows[-self.count % self._every :: self._every].clone())
        self.count += len(rows)

    @property
    def mean(self) -> Tensor:
        return mean_of([self])

    @property
    def rows(self) -> Tensor:
        return torch.cat(self._rows)

    def divide(self, scales: Tensor) -> None:
        """Make them the statistics of each input divided by ``scales [K]``."""
        self.hessian /= scales[:, None] * scales
        self.largest /= scales
        self._sum /= scales
        self._rows = [rows / scales for rows in self._rows]


def mean_of(inputs: Sequence[InputStatistics]) -> Tensor:
    """``[K]``, the mean of absolute values over the tokens of all."""
    sums = [one._sum for one in inputs]
    return (torch.stack(sums).sum(0) / sum(one.count for one in inputs)).float()


def collect(block: nn.Module, run: Callable[[], None], num_tokens: int) -> dict[str, InputStatistics]:
    """Statistics by the names of the block's linear layers, while ``run`` runs it over a text of so many tokens.

    Layers that are given the same tensor (queries, keys and values) share an object. Experts that no token was routed
    to have none.
    """
    found: dict[str, InputStatistics] = {}
    last: list[Tensor | InputStatistics] = []
    shares = {f"{name}.": m.share for name, m in block.named_modules() if isinstance(m, Experts)}

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0]
            if last and last[0] is x:
                shared = last[1]
                assert isinstance(shared, InputStatistics)
                found.setdefault(name, shared)
                return
            if name not in found:
                share = next((share for start, share in shares.items() if name.startswith(start)), None)
                tokens = num_tokens if share is None else math.ceil(num_tokens * share)
                found[name] = InputStatistics(x.shape[-1], tokens, share is not None)
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
