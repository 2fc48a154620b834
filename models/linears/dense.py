"""Linear layers whose weights are as a checkpoint has them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.models.linears.experts import DenseExperts
from compiled_llm.models.linears.heads import DenseHeads
from compiled_llm.models.linears.parts import take_bias, take_split, weight_shapes
from compiled_llm.models.linears.protocol import StoredLinear, Take
from compiled_llm.ops.linear.product_choices import num_counters


def counters_on(device: torch.device, out_features: int, in_features: int) -> Tensor | None:
    """Those of ``exact_linear`` for a layer; None where it needs none."""
    count = num_counters(out_features, in_features)
    return torch.zeros(count, dtype=torch.int32, device=device) if count and device.type == "cuda" else None


class Dense(NamedTuple):
    """``x @ weight.T + bias``, in the model's dtype."""

    weight: Tensor  # [out_features, in_features]
    bias: Tensor | None = None  # [out_features]
    counters: Tensor | None = None  # of ``exact_linear``, on a GPU

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return ()

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
    def take(cls, take: Take, parts: Sequence[StoredLinear]) -> "Dense":
        shape = sum(part.out_features for part in parts), parts[0].in_features
        weight = torch.empty(shape, dtype=take.dtype, device=take.device)

        def put(start: int, rows: Tensor) -> None:
            weight[start : start + len(rows)] = rows

        take.rows(weight_shapes(parts), put)
        return cls(weight, take_bias(take, parts), counters_on(take.device, *shape))

    @classmethod
    def take_table(cls, take: Take, part: StoredLinear) -> "Dense":
        return cls.take(take, [part])

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
        return 0
