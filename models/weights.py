"""The kinds of linear layer, and ``linear(x, w)``, which applies any of them.

A new kind (quantised, LoRA, sharded) is a new class and a line in ``linear``; no model changes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops import pack_weight, packed_linear, unpack_rows


class Linear(NamedTuple):
    """``x @ weight.T + bias`` with ``weight`` ``[out_features, in_features]`` as in checkpoints."""

    weight: Tensor
    bias: Tensor | None = None


class PackedLinear(NamedTuple):
    """The same with the weight in the order the CPU kernel reads (bfloat16; see ops/linear/packed_linear.py)."""

    packed: Tensor
    bias: Tensor | None
    out_features: int


Convert = Callable[[Linear], Linear | PackedLinear]


def linear(x: Tensor, w: Linear | PackedLinear) -> Tensor:
    """Apply a linear layer to ``x`` ``[T, in_features]``, giving ``[T, out_features]`` in the dtype of ``x``."""
    if isinstance(w, PackedLinear):
        return packed_linear(x, w.packed, w.bias, w.out_features)
    return F.linear(x, w.weight, w.bias)


def embed(ids: Tensor, table: Tensor | PackedLinear) -> Tensor:
    """Rows ``ids`` ``[T]`` of an embedding ``[V, D]``, giving ``[T, D]``.

    A model that ties its head to its embedding has one tensor for both, in the order of the head's kernel.
    """
    if isinstance(table, PackedLinear):
        return unpack_rows(table.packed, ids)
    return F.embedding(ids, table)


def concat(*parts: Linear) -> Linear:
    """One linear layer that computes several over the same input: one pass over ``x``, one kernel."""
    biases = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts)), "either all of the fused linears have a bias or none"
    return Linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)


def map_linears(weights: Any, convert: Convert) -> Any:
    """The same weights with every ``Linear`` replaced by ``convert(it)``."""
    if isinstance(weights, Linear):
        return convert(weights)
    if isinstance(weights, tuple):
        mapped = (map_linears(item, convert) for item in weights)
        return type(weights)(*mapped) if hasattr(weights, "_fields") else tuple(mapped)
    return weights


def keep(w: Linear) -> Linear:
    """A linear layer as the checkpoint has it."""
    return w


def pack(w: Linear) -> PackedLinear:
    """Pack a bfloat16 linear layer for the CPU kernel."""
    return PackedLinear(pack_weight(w.weight), w.bias, w.weight.shape[0])


def tensors(weights: Any) -> list[Tensor]:
    """All tensors of a weights tuple, each storage once (tied weights are one tensor)."""
    if isinstance(weights, Tensor):
        return [weights]
    found = [t for item in weights for t in tensors(item)] if isinstance(weights, tuple) else []
    return list({(t.data_ptr(), t.shape): t for t in found}.values())
