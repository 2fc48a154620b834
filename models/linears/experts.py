"""The linear layers of a mixture of experts: one for each expert, of one shape, each for rows of its own."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.linears.parts import take_bias, weight_shapes
from compiled_llm.models.linears.protocol import StoredLinear, Take
from compiled_llm.ops import TILE, empty_packed, grouped_linear, grouped_packed_linear, pack_rows


class DenseExperts(NamedTuple):
    """Weights as a checkpoint has them."""

    weight: Tensor  # [num_experts, out_features, in_features]
    bias: Tensor | None  # [num_experts, out_features]
    top_k: int

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]

    @property
    def out_features(self) -> int:
        return self.weight.shape[1]

    @property
    def in_features(self) -> int:
        return self.weight.shape[2]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return ()

    def apply_to(self, x: Tensor, rows: Tensor | None, starts: Tensor) -> Tensor:
        return grouped_linear(x, self.weight, self.bias, rows, starts)

    @classmethod
    def take(cls, take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int) -> "DenseExperts":
        """As ``LinearKind.take_experts``."""
        out_features, in_features = sizes_of(experts[0])
        weight = torch.empty(len(experts), out_features, in_features, dtype=take.dtype, device=take.device)
        rows_of_all = weight.view(-1, in_features)

        def put(start: int, rows: Tensor) -> None:
            rows_of_all[start : start + len(rows)] = rows

        take.rows(shapes_of_all(experts), put)
        return cls(weight, take_biases(take, experts), top_k)


class PackedExperts(NamedTuple):
    """Weights in the order that the CPU kernel reads, see ``ops/linear/packed_linear.py``."""

    packed: Tensor  # [num_experts, ...]: of each what pack_weight makes of [out_features, in_features]
    bias: Tensor | None  # [num_experts, out_features]
    out_features: int
    in_features: int
    top_k: int

    @property
    def num_experts(self) -> int:
        return self.packed.shape[0]

    @property
    def nbytes(self) -> int:
        weights = self.num_experts * self.out_features * self.in_features * self.packed.itemsize
        return weights + (0 if self.bias is None else self.bias.nbytes)

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return ("linear_cpu",)

    def apply_to(self, x: Tensor, rows: Tensor | None, starts: Tensor) -> Tensor:
        return grouped_packed_linear(x, self.packed, self.bias, rows, starts, self.out_features)

    @classmethod
    def take(cls, take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int) -> "PackedExperts":
        """As ``LinearKind.take_experts``."""
        out_features, in_features = sizes_of(experts[0])
        tiled = -(-out_features // TILE) * TILE
        packed = empty_packed(len(experts) * tiled, in_features, take.dtype, take.device).unflatten(
            0, (len(experts), -1)
        )

        def put(start: int, rows: Tensor) -> None:
            expert, row = divmod(start, out_features)
            pack_rows(packed[expert], row, rows)

        take.rows(shapes_of_all(experts), put)
        return cls(packed, take_biases(take, experts), out_features, in_features, top_k)


def take_biases(take: Take, experts: Sequence[Sequence[StoredLinear]]) -> Tensor | None:
    """``[num_experts, out_features]``; None where they have none."""
    biases = [bias for parts in experts if (bias := take_bias(take, parts)) is not None]
    assert len(biases) in (0, len(experts)), "either all of the experts have a bias or none"
    if not biases:
        return None
    stacked = torch.empty(len(experts), len(biases[0]), dtype=take.dtype, device=take.device)
    return stacked if stacked.is_meta else torch.stack(biases, out=stacked)


def shapes_of_all(experts: Sequence[Sequence[StoredLinear]]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the weights of all experts."""
    return {name: shape for parts in experts for name, shape in weight_shapes(parts).items()}


def sizes_of(parts: Sequence[StoredLinear]) -> tuple[int, int]:
    """Outputs and inputs of one expert."""
    return sum(part.out_features for part in parts), parts[0].in_features
