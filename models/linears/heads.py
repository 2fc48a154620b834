"""Linear layers of single heads: of one shape, each for its own head's rows.

As experts (``experts.py``) whose rows are known beforehand: each token has a row for every head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.ops import (
    TILE,
    LoraRows,
    LoraWeights,
    add_lora,
    empty_packed,
    grouped_linear,
    grouped_packed_linear,
    head_linear,
    lora_followed,
    pack_rows,
    unpack_rows,
)


class HeadRows(NamedTuple):
    """Where heads have their rows: the rows of ``[T, N, K]``, one below the other, in the order of the heads."""

    rows: Tensor  # [N * T] int32
    starts: Tensor  # [N + 1] int32

    @classmethod
    def of(cls, x: Tensor, num_heads: int) -> "HeadRows":
        """For the tokens of ``x`` ``[T, ...]``."""
        count = x.shape[0]
        rows = torch.arange(count * num_heads, dtype=torch.int32, device=x.device).view(count, num_heads)
        starts = torch.arange(num_heads + 1, dtype=torch.int32, device=x.device) * count
        return cls(rows.t().flatten(), starts)


class DenseHeads(NamedTuple):
    """Weights as a checkpoint has them. ``in_features`` are those of a head, ``out_features`` of all together."""

    weight: Tensor  # [N, outputs of a head, in_features]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0] * self.weight.shape[1]

    @property
    def in_features(self) -> int:
        return self.weight.shape[2]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return ()

    def apply(self, x: Tensor, where: HeadRows | None = None) -> Tensor:
        """``[T, N, in_features]`` -> ``[T, N, outputs of a head]``; ``where``: ``HeadRows.of`` of ``x``, for a CPU."""
        if x.is_cuda:
            return head_linear(x, self.weight)
        rows, starts = where or HeadRows.of(x, x.shape[1])
        return _by_token(grouped_linear(x.flatten(0, 1), self.weight, None, rows, starts), x)

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight.flatten(0, 1)[ids]


class PackedHeads(NamedTuple):
    """Weights in the order that the CPU kernel reads, see ``ops/linear/packed_linear.py``."""

    packed: Tensor  # [N, ...]: of each what pack_weight makes of [outputs of a head, in_features]
    head_features: int
    in_features: int

    @property
    def out_features(self) -> int:
        return self.packed.shape[0] * self.head_features

    @property
    def nbytes(self) -> int:
        return self.out_features * self.in_features * self.packed.itemsize

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return ("linear_cpu",)

    def apply(self, x: Tensor, where: HeadRows | None = None) -> Tensor:
        """As ``DenseHeads.apply``."""
        rows, starts = where or HeadRows.of(x, x.shape[1])
        y = grouped_packed_linear(x.flatten(0, 1), self.packed, None, rows, starts, self.head_features)
        return _by_token(y, x)

    def rows(self, ids: Tensor) -> Tensor:
        tiled = self.packed.shape[1] * TILE
        places = ids // self.head_features * tiled + ids % self.head_features
        return unpack_rows(self.packed.flatten(0, 1), places)[:, : self.in_features]

    @classmethod
    def of(cls, weight: Tensor) -> "PackedHeads":
        """Those of ``DenseHeads``."""
        num_heads, outputs, in_features = weight.shape
        tiled = -(-outputs // TILE) * TILE
        packed = empty_packed(num_heads * tiled, in_features, weight.dtype, weight.device).unflatten(0, (num_heads, -1))
        if not weight.is_meta:
            for head, rows in enumerate(weight):
                pack_rows(packed[head], 0, rows)
        return cls(packed, outputs, in_features)


class AdaptedHeads(NamedTuple):
    """Heads of any kind, and what adapters change of each: ``Adapted`` of ``adapted.py``, for heads."""

    plain: DenseHeads | PackedHeads
    changes: LoraWeights  # of S * N slots, those of an adapter side by side
    slots: Tensor | None = None  # [T] int32
    flags: Tensor | None = None  # as of ``Adapted``

    @property
    def out_features(self) -> int:
        return self.plain.out_features

    @property
    def in_features(self) -> int:
        return self.plain.in_features

    @property
    def nbytes(self) -> int:
        return self.plain.nbytes

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return (*self.plain.cpu_ops, "lora_cpu")

    def apply(self, x: Tensor, where: HeadRows | None = None) -> Tensor:
        """As ``DenseHeads.apply``."""
        assert self.slots is not None, "see with_slots"
        if self.flags is not None and x.dtype != torch.float32 and isinstance(self.plain, DenseHeads):
            return head_linear(x, self.plain.weight, (self.slots, *self.changes, self.flags))
        y, num_heads = self.plain.apply(x, where), x.shape[1]
        if self.flags is not None:
            lora_followed(y, x, LoraRows(self.slots, groups=num_heads), self.changes, self.flags)
            return y
        heads = torch.arange(num_heads, dtype=torch.int32, device=x.device)
        slots = ((self.slots[:, None] - 1) * num_heads + heads + 1) * (self.slots > 0)[:, None]
        y = y.transpose(0, 1).flatten(0, 1)
        add_lora(y, x.transpose(0, 1).flatten(0, 1), slots.t().flatten(), self.changes)
        return _by_token(y, x)

    def rows(self, ids: Tensor) -> Tensor:
        raise AssertionError("no rows are read where adapters may change heads")


HeadLinear = DenseHeads | PackedHeads | AdaptedHeads


def _by_token(y: Tensor, x: Tensor) -> Tensor:
    """Rows in the order of the heads ``[N * T, outputs]`` -> ``[T, N, outputs]``."""
    return y.view(x.shape[1], x.shape[0], -1).transpose(0, 1)
