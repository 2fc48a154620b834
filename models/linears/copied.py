"""A layer whose weight is another layer's, kept in another way."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.linears.protocol import Linear, LinearKind, Put, PutQuantized, StoredLinear
from compiled_llm.models.quantized.scheme import Scheme
from compiled_llm.ops.linear.quantized_weight import WeightFormat

_ROWS = 1024  # that are read at a time


def copied(layer: Linear, kind: LinearKind, role: str, dtype: torch.dtype, device: torch.device) -> Linear:
    """The weight of ``layer`` as a layer of ``kind`` with such a ``role`` keeps it. It must have no bias."""
    assert getattr(layer, "bias", None) is None
    part = StoredLinear(role, layer.out_features, layer.in_features, role=role)
    return kind.take(_RowsOf(layer, dtype, device), [part])


class _RowsOf(NamedTuple):
    """A ``Take`` that has the rows of a layer."""

    layer: Linear
    dtype: torch.dtype
    device: torch.device

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        raise AssertionError("a layer that is copied has no bias")

    def rows(self, shapes: Mapping[str, tuple[int, ...]], put: Put) -> None:
        (count,) = (rows for rows, _ in shapes.values())
        for first in range(0, count, _ROWS):
            ids = torch.arange(first, min(first + _ROWS, count), device=self.device)
            put(first, self.layer.rows(ids))

    def kept(self, part: StoredLinear, scheme: Scheme) -> WeightFormat:
        raise AssertionError("no checkpoint is read")

    def quantized(self, part: StoredLinear, scheme: Scheme, put: PutQuantized) -> tuple[Tensor | None, Tensor | None]:
        raise AssertionError("no checkpoint is read")
