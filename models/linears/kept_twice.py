"""Linear layers whose bfloat16 weights are kept packed and compressed, for CPUs with tile registers."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.linears.compressed import can_be_compressed
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.experts import PackedExperts
from compiled_llm.models.linears.heads import PackedHeads
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.parts import take_bias, weight_shapes
from compiled_llm.models.linears.protocol import StoredLinear, Take
from compiled_llm.ops import empty_packed, native, pack_rows, unpack_rows
from compiled_llm.ops.linear.compressed_linear import CompressedWeight, Compressor, either_linear


class KeptTwice(NamedTuple):
    """A linear layer with the bits of ``Packed``: up to 16 rows read the compressed weights, more the packed ones.

    Those of experts and of single heads are packed alone.
    """

    packed: Tensor  # what pack_rows makes of [out_features, in_features]
    weight: CompressedWeight  # the same
    bias: Tensor | None  # [out_features]
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int:
        """Of what few rows read."""
        weights = self.out_features * self.in_features * 3 // 2
        return weights + (0 if self.bias is None else self.bias.nbytes)

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return "compressed_linear_cpu", "linear_cpu"

    def apply(self, x: Tensor) -> Tensor:
        return either_linear(x, self.packed, self.weight, self.bias, self.out_features)

    def rows(self, ids: Tensor) -> Tensor:
        return unpack_rows(self.packed, ids)[:, : self.in_features]

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype) -> bool:
        if device.type != "cpu" or dtype != torch.bfloat16 or native.best_isa() != "amx":
            return False
        return native.is_available("compressed_linear_cpu") and native.is_available("linear_cpu")

    @staticmethod
    def is_exact() -> bool:
        return True

    @classmethod
    def take(cls, take: Take, parts: Sequence[StoredLinear]) -> "KeptTwice | Packed":
        out_features, in_features = sum(part.out_features for part in parts), parts[0].in_features
        if not can_be_compressed(take, in_features):
            return Packed.take(take, parts)
        packed = empty_packed(out_features, in_features, take.dtype, take.device)
        compressor = Compressor(out_features, in_features, take.device)

        def put(start: int, rows: Tensor) -> None:
            pack_rows(packed, start, rows)
            compressor.put(start, rows)

        take.rows(weight_shapes(parts), put)
        return cls(packed, compressor.finish(), take_bias(take, parts), out_features, in_features)

    @staticmethod
    def take_table(take: Take, part: StoredLinear) -> Dense:
        return Packed.take_table(take, part)

    @staticmethod
    def take_experts(take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int) -> PackedExperts:
        return Packed.take_experts(take, experts, top_k)

    @staticmethod
    def take_heads(
        take: Take, parts: Sequence[StoredLinear], num_heads: int, first: int
    ) -> tuple[PackedHeads, PackedHeads]:
        return Packed.take_heads(take, parts, num_heads, first)

    @staticmethod
    def bytes_while_taking(nbytes: int) -> int:
        return 0
