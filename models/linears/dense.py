"""Linear layers whose weights are as a checkpoint has them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.models.linears.experts import DenseExperts
from compiled_llm.models.linears.protocol import OfExpert, Part, Take


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
        taken = []
        for part in parts:
            weight = take(f"{part.name}.weight", (part.out_features, part.in_features))
            taken.append(cls(weight, take(f"{part.name}.bias", (part.out_features,)) if part.bias else None))
        return cls.concat(taken)

    @classmethod
    def concat(cls, parts: Sequence["Dense"]) -> "Dense":
        """One layer that computes several over the same input: one pass over ``x``, one kernel."""
        if len(parts) == 1:
            return parts[0]
        biases = [part.bias for part in parts if part.bias is not None]
        assert len(biases) in (0, len(parts)), "either all of the layers have a bias or none"
        return cls(_joined([part.weight for part in parts]), _joined(biases) if biases else None)

    @staticmethod
    def take_experts(of_expert: OfExpert, num_experts: int, top_k: int) -> DenseExperts:
        return DenseExperts.take(of_expert, num_experts, top_k)

    @staticmethod
    def bytes_while_taking(nbytes: int) -> int:
        return 0


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """``torch.cat``. On the device "meta" that is Python code of torch's, which imports the compiler."""
    if tensors[0].is_meta:
        return tensors[0].new_empty(sum(map(len, tensors)), *tensors[0].shape[1:])
    return torch.cat(list(tensors))
