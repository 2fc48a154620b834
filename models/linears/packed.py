"""Linear layers whose weights lie in the order that the CPU kernel reads (ops/linear/packed_linear.py)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.experts import PackedExperts
from compiled_llm.models.linears.protocol import OfExpert, Part, Take
from compiled_llm.ops import native, pack_weight, packed_linear, unpack_rows


class Packed(NamedTuple):
    """A ``Dense`` layer, packed."""

    packed: Tensor  # what pack_weight makes of [out_features, in_features]
    bias: Tensor | None  # [out_features]
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int:
        weights = self.out_features * self.in_features * self.packed.itemsize
        return weights + (0 if self.bias is None else self.bias.nbytes)

    def apply(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.packed, self.bias, self.out_features)

    def rows(self, ids: Tensor) -> Tensor:
        return unpack_rows(self.packed, ids)[:, : self.in_features]

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cpu" and native.is_available("linear_cpu")

    @staticmethod
    def is_exact() -> bool:
        return True

    @classmethod
    def take(cls, take: Take, parts: Sequence[Part]) -> "Packed":
        dense = Dense.take(take, parts)
        return cls(pack_weight(dense.weight), dense.bias, dense.out_features, dense.in_features)

    @staticmethod
    def take_experts(of_expert: OfExpert, num_experts: int, top_k: int) -> PackedExperts:
        return PackedExperts.take(of_expert, num_experts, top_k)

    @staticmethod
    def bytes_while_taking(nbytes: int) -> int:
        return nbytes  # as it was in the checkpoint
