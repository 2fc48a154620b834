"""Linear layers whose weights lie in the order that the CPU kernel reads (ops/linear/packed_linear.py)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.experts import PackedExperts
from compiled_llm.models.linears.heads import PackedHeads
from compiled_llm.models.linears.parts import take_bias, take_split, weight_shapes
from compiled_llm.models.linears.protocol import StoredLinear, Take
from compiled_llm.ops import empty_packed, native, pack_rows, packed_linear, unpack_rows


class Packed(NamedTuple):
    """A linear layer as ``Dense``, packed."""

    packed: Tensor  # what pack_rows makes of [out_features, in_features]
    bias: Tensor | None  # [out_features]
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int:
        weights = self.out_features * self.in_features * self.packed.itemsize
        return weights + (0 if self.bias is None else self.bias.nbytes)

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return ("linear_cpu",)

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
    def take(cls, take: Take, parts: Sequence[StoredLinear]) -> "Packed":
        out_features, in_features = sum(part.out_features for part in parts), parts[0].in_features
        packed = empty_packed(out_features, in_features, take.dtype, take.device)
        take.rows(weight_shapes(parts), lambda start, rows: pack_rows(packed, start, rows))
        return cls(packed, take_bias(take, parts), out_features, in_features)

    @staticmethod
    def take_table(take: Take, part: StoredLinear) -> Dense:
        return Dense.take(take, [part])

    @staticmethod
    def take_experts(take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int) -> PackedExperts:
        return PackedExperts.take(take, experts, top_k)

    @staticmethod
    def take_heads(
        take: Take, parts: Sequence[StoredLinear], num_heads: int, first: int
    ) -> tuple[PackedHeads, PackedHeads]:
        to_inputs, to_outputs = take_split(take, parts, num_heads, first)
        return PackedHeads.of(to_inputs), PackedHeads.of(to_outputs)

    @staticmethod
    def bytes_while_taking(nbytes: int) -> int:
        return 0
