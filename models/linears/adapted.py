"""Linear layers that adapters change, each row by the adapter of its request (``ops/linear/lora.py``)."""

import dataclasses
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.linears.fused import activated_linear
from compiled_llm.models.linears.heads import HeadLinear
from compiled_llm.models.linears.protocol import GroupedLinear, Linear, LinearKind, StoredLinear, Take
from compiled_llm.models.linears.quantizing import ROUTERS
from compiled_llm.ops import LoraWeights, add_lora
from compiled_llm.ops.pinned import on_device


class Adapted(NamedTuple):
    """A layer of any kind, and what the adapters in the slots change."""

    plain: Linear
    changes: LoraWeights
    slots: Tensor | None = None  # [T] int32, of the step's tokens: ``with_slots`` puts them here

    @property
    def out_features(self) -> int:
        return self.plain.out_features

    @property
    def in_features(self) -> int:
        return self.plain.in_features

    @property
    def nbytes(self) -> int:
        return self.plain.nbytes  # a step reads the adapters of its requests alone

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return (*self.plain.cpu_ops, "lora_cpu")

    def apply(self, x: Tensor) -> Tensor:
        assert self.slots is not None, "see with_slots"
        y = activated_linear(x, self.plain)
        add_lora(y, x, self.slots, self.changes)
        return y

    def rows(self, ids: Tensor) -> Tensor:
        raise AssertionError("an embedding has no adapters")


def with_slots(weights: Any, slots: Tensor) -> Any:
    """A weights tuple whose ``Adapted`` layers know the slot of each token of a step, ``[T]`` int32."""
    if isinstance(weights, Adapted):
        return weights._replace(slots=slots)
    if not isinstance(weights, tuple):
        return weights
    made = [with_slots(item, slots) for item in weights]
    return type(weights)(*made) if hasattr(weights, "_fields") else tuple(made)


def without_adapters(weights: Any) -> Any:
    """A weights tuple with the layers themselves in the place of ``Adapted`` ones."""
    if isinstance(weights, Adapted):
        return weights.plain
    if not isinstance(weights, tuple):
        return weights
    made = map(without_adapters, weights)
    return type(weights)(*made) if hasattr(weights, "_fields") else tuple(made)


class Change(NamedTuple):
    """What an adapter changes of a part of a layer, as its slot takes it: on the host, in the layer's dtype."""

    a: Tensor  # [rank, in_features]
    b: Tensor  # [tiles, rank, 16], what ``tiles_of`` makes of [out_features, rank]
    scale: float


class Place(NamedTuple):
    """Where the changes of one layer of a checkpoint go: a part of an ``Adapted`` layer.

    Attributes:
        number: of the part; first_tile: of its outputs.
    """

    part: StoredLinear
    number: int
    first_tile: int
    changes: LoraWeights

    def put(self, slot: int, change: Change | None) -> None:
        """Let ``slot``, from 1 on, hold ``change``; None: nothing. In the order of the device's stream."""
        changes, slot = self.changes, slot - 1
        rank = 0 if change is None else len(change.a)
        changes.ranks[slot, self.number].fill_(rank)
        if change is None:
            return
        changes.scales[slot, self.number].fill_(change.scale)
        changes.a[slot, self.number, :rank].copy_(on_device(change.a, changes.a.device))
        tiles = changes.b[slot, self.first_tile : self.first_tile + len(change.b), :rank]
        tiles.copy_(on_device(change.b, changes.b.device))


@dataclasses.dataclass(frozen=True)
class Adaptable:
    """A ``LinearKind`` that makes layers of another kind ``Adapted``: all but heads, embeddings, routers and experts.

    Attributes:
        num_slots: adapters that a step may have.
        rank: the largest.
        places: of the layers that have been taken, by their names in a checkpoint of plain weights.
    """

    plain: LinearKind
    num_slots: int
    rank: int
    places: dict[str, Place] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        return self.plain.serves(device, dtype)

    def is_exact(self) -> bool:
        return self.plain.is_exact()

    def bytes_while_taking(self, nbytes: int) -> int:
        return self.plain.bytes_while_taking(nbytes)

    def take(self, take: Take, parts: Sequence[StoredLinear]) -> Linear:
        linear = self.plain.take(take, parts)
        if not all(map(_may_change, parts)):
            return linear
        outputs = [part.out_features for part in parts]
        sizes = outputs, parts[0].in_features, self.num_slots, self.rank
        changes = LoraWeights.empty(*sizes, take.dtype, take.device)
        tile = 0
        for number, part in enumerate(parts):
            if take.device.type != "meta":  # else nothing but names and shapes are asked for
                self.places[part.name] = Place(part, number, tile, changes)
            tile += -(-part.out_features // changes.b.shape[-1])
        return Adapted(linear, changes)

    def take_table(self, take: Take, part: StoredLinear) -> Linear:
        return self.plain.take_table(take, part)

    def take_experts(self, take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int) -> GroupedLinear:
        return self.plain.take_experts(take, experts, top_k)

    def take_heads(
        self, take: Take, parts: Sequence[StoredLinear], num_heads: int, first: int
    ) -> tuple[HeadLinear, HeadLinear]:
        return self.plain.take_heads(take, parts, num_heads, first)


def _may_change(part: StoredLinear) -> bool:
    return part.role == "layer" and not any(fnmatchcase(part.name, pattern) for pattern in ROUTERS)


def change_bytes(weights: Any) -> int:
    """Bytes of all slots in a weights tuple."""
    if isinstance(weights, Adapted):
        return sum(tensor.nbytes for tensor in weights.changes)
    return sum(map(change_bytes, weights)) if isinstance(weights, tuple) else 0
