"""Linear layers on a GPU whose sums have one order for every number of rows (ops/linear/exact_linear.py)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.experts import DenseExperts
from compiled_llm.models.linears.heads import DenseHeads
from compiled_llm.models.linears.parts import take_split
from compiled_llm.models.linears.protocol import StoredLinear, Take
from compiled_llm.ops import exact_linear


class Exact(NamedTuple):
    """A ``Dense`` layer, multiplied by our own kernel."""

    dense: Dense

    @property
    def out_features(self) -> int:
        return self.dense.out_features

    @property
    def in_features(self) -> int:
        return self.dense.in_features

    @property
    def nbytes(self) -> int:
        return self.dense.nbytes

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return ()

    def apply(self, x: Tensor) -> Tensor:
        return exact_linear(x, self.dense.weight, self.dense.bias, counters=self.dense.counters)

    def rows(self, ids: Tensor) -> Tensor:
        return self.dense.rows(ids)

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cuda" and dtype in (torch.float32, torch.bfloat16, torch.float16)

    @staticmethod
    def is_exact() -> bool:
        return True

    @classmethod
    def take(cls, take: Take, parts: Sequence[StoredLinear]) -> "Exact":
        return cls(Dense.take(take, parts))

    @staticmethod
    def take_table(take: Take, part: StoredLinear) -> Dense:
        return Dense.take(take, [part])

    @staticmethod
    def take_experts(take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int) -> DenseExperts:
        return DenseExperts.take(take, experts, top_k)

    @staticmethod
    def take_heads(
        take: Take, parts: Sequence[StoredLinear], num_heads: int, first: int
    ) -> tuple[DenseHeads, DenseHeads]:
        to_inputs, to_outputs = take_split(take, parts, num_heads, first)
        return DenseHeads(to_inputs), DenseHeads(to_outputs)

    @staticmethod
    def bytes_while_taking(nbytes: int) -> int:
        return Dense.bytes_while_taking(nbytes)
