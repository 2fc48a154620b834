"""Linear layers whose weights are as a checkpoint has them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.models.linears.protocol import Part, Take


class Dense(NamedTuple):
    """``x @ weight.T + bias``, in the model's dtype."""

    weight: Tensor  # [out_features, in_features]
    bias: Tensor | None = None  # [out_features]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def apply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype) -> bool:
        return True

    @staticmethod
    def is_exact() -> bool:
        return False  # torch chooses among products by the number of rows

    @classmethod
    def take(cls, take: Take, parts: Sequence[Part]) -> "Dense":
        shape = sum(part.out_features for part in parts), parts[0].in_features
        weight = torch.empty(shape, dtype=take.dtype, device=take.device)

        def put(start: int, rows: Tensor) -> None:
            weight[start : start + len(rows)] = rows

        take.rows(weight_shapes(parts), put)
        return cls(weight, take_bias(take, parts))

    @staticmethod
    def bytes_while_taking(nbytes: int) -> int:
        return 0


def weight_shapes(parts: Sequence[Part]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the parts' weights in a checkpoint."""
    return {f"{part.name}.weight": (part.out_features, part.in_features) for part in parts}


def take_bias(take: Take, parts: Sequence[Part]) -> Tensor | None:
    """The biases of all ``parts`` one after the other, ``[out_features]``; None where they have none."""
    assert len({part.bias for part in parts}) == 1, "either all of the layers have a bias or none"
    if not parts[0].bias:
        return None
    bias = torch.empty(sum(part.out_features for part in parts), dtype=take.dtype, device=take.device)
    taken = [take(f"{part.name}.bias", (part.out_features,)) for part in parts]
    return bias if bias.is_meta else torch.cat(taken, out=bias)
