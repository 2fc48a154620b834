"""The linear layers of a mixture of experts: one for each expert, of one shape, each for rows of its own."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from compiled_llm.models.linears.protocol import OfExpert
from compiled_llm.ops import grouped_linear, grouped_packed_linear, native, pack_weight


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

    def apply_to(self, x: Tensor, rows: Tensor | None, starts: Tensor) -> Tensor:
        return grouped_linear(x, self.weight, self.bias, rows, starts)

    @classmethod
    def take(cls, of_expert: OfExpert, num_experts: int, top_k: int) -> "DenseExperts":
        """As ``LinearKind.take_experts``."""
        weight, bias = _gathered(
            of_expert, num_experts, lambda weight: weight, lambda shape, like: like.new_empty(shape)
        )
        return cls(weight, bias, top_k)


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

    def apply_to(self, x: Tensor, rows: Tensor | None, starts: Tensor) -> Tensor:
        return grouped_packed_linear(x, self.packed, self.bias, rows, starts, self.out_features)

    @classmethod
    def take(cls, of_expert: OfExpert, num_experts: int, top_k: int) -> "PackedExperts":
        """As ``LinearKind.take_experts``."""
        sizes = []

        def pack(weight: Tensor) -> Tensor:
            sizes.append(weight.shape)
            return pack_weight(weight)

        packed, bias = _gathered(of_expert, num_experts, pack, lambda shape, like: native.huge_zeros(shape, like.dtype))
        out_features, in_features = sizes[0]
        return cls(packed, bias, out_features, in_features, top_k)


def _gathered(
    of_expert: OfExpert,
    num_experts: int,
    kept: Callable[[Tensor], Tensor],
    room: Callable[[tuple[int, ...], Tensor], Tensor],
) -> tuple[Tensor, Tensor | None]:
    """What ``kept`` makes of each expert's weight, side by side in ``room``, and the biases. One expert at a time."""
    weights = biases = None
    for expert in range(num_experts):
        weight, bias = of_expert(expert)
        weight = kept(weight)
        if weights is None:
            shape = (num_experts, *weight.shape)
            weights = weight.new_empty(shape) if weight.is_meta else room(shape, weight)
            if bias is not None:
                biases = bias.new_empty(num_experts, *bias.shape)
        if weight.is_meta:
            continue
        weights[expert].copy_(weight)
        if biases is not None:
            assert bias is not None, "either all of the experts have a bias or none"
            biases[expert].copy_(bias)
    assert weights is not None, "there are experts"
    return weights, biases
