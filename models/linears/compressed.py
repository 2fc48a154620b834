"""Linear layers whose bfloat16 weights are losslessly compressed, for CPUs (ops/linear/compressed_linear.py)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.experts import PackedExperts, shapes_of_all, sizes_of, take_biases
from compiled_llm.models.linears.heads import PackedHeads
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.parts import take_bias, weight_shapes
from compiled_llm.models.linears.protocol import StoredLinear, Take
from compiled_llm.ops import native
from compiled_llm.ops.linear.compressed_linear import (
    MOST_INPUTS,
    CompressedWeight,
    Compressor,
    compressed_linear,
    compressed_rows,
    grouped_compressed_linear,
)


class Compressed(NamedTuple):
    """A linear layer with the bits of ``Packed``. Those of single heads are packed."""

    weight: CompressedWeight  # [out_features, in_features]
    bias: Tensor | None  # [out_features]
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int:
        weights = self.out_features * self.in_features * 3 // 2
        return weights + (0 if self.bias is None else self.bias.nbytes)

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return ("compressed_linear_cpu",)

    def apply(self, x: Tensor) -> Tensor:
        return compressed_linear(x, *self.weight, self.bias, self.out_features)

    def rows(self, ids: Tensor) -> Tensor:
        return compressed_rows(self.weight, ids, self.out_features, self.in_features)

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype) -> bool:
        if device.type != "cpu" or dtype != torch.bfloat16:
            return False
        return native.best_isa() in ("amx", "avx512_bf16") and native.is_available("compressed_linear_cpu")

    @staticmethod
    def is_exact() -> bool:
        return True

    @classmethod
    def take(cls, take: Take, parts: Sequence[StoredLinear]) -> "Compressed | Packed":
        out_features, in_features = sum(part.out_features for part in parts), parts[0].in_features
        if not can_be_compressed(take, in_features):
            return Packed.take(take, parts)
        compressor = Compressor(out_features, in_features, take.device)
        take.rows(weight_shapes(parts), compressor.put)
        return cls(compressor.finish(), take_bias(take, parts), out_features, in_features)

    @staticmethod
    def take_table(take: Take, part: StoredLinear) -> Dense:
        return Packed.take_table(take, part)

    @staticmethod
    def take_experts(
        take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int
    ) -> "CompressedExperts | PackedExperts":
        return CompressedExperts.take(take, experts, top_k)

    @staticmethod
    def take_heads(
        take: Take, parts: Sequence[StoredLinear], num_heads: int, first: int
    ) -> tuple[PackedHeads, PackedHeads]:
        return Packed.take_heads(take, parts, num_heads, first)

    @staticmethod
    def bytes_while_taking(nbytes: int) -> int:
        return 0


class CompressedExperts(NamedTuple):
    """The layers of a mixture's experts, as ``PackedExperts``."""

    weight: CompressedWeight  # of num_experts matrices [out_features, in_features]
    bias: Tensor | None  # [num_experts, out_features]
    out_features: int
    in_features: int
    top_k: int

    @property
    def num_experts(self) -> int:
        return self.weight.words.shape[0]

    @property
    def nbytes(self) -> int:
        weights = self.num_experts * self.out_features * self.in_features * 3 // 2
        return weights + (0 if self.bias is None else self.bias.nbytes)

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return ("compressed_linear_cpu",)

    def apply_to(self, x: Tensor, rows: Tensor | None, starts: Tensor) -> Tensor:
        return grouped_compressed_linear(x, self.weight, self.bias, rows, starts, self.out_features)

    @classmethod
    def take(
        cls, take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int
    ) -> "CompressedExperts | PackedExperts":
        """As ``LinearKind.take_experts``."""
        out_features, in_features = sizes_of(experts[0])
        if not can_be_compressed(take, in_features):
            return PackedExperts.take(take, experts, top_k)
        compressor = Compressor(out_features, in_features, take.device, len(experts))

        def put(start: int, rows: Tensor) -> None:
            expert, row = divmod(start, out_features)
            compressor.put(row, rows, expert)

        take.rows(shapes_of_all(experts), put)
        return cls(compressor.finish(), take_biases(take, experts), out_features, in_features, top_k)


def can_be_compressed(take: Take, in_features: int) -> bool:
    """Whether a layer can be compressed: routers, for one, are in float32 whatever the model's dtype."""
    return take.dtype == torch.bfloat16 and in_features <= MOST_INPUTS
