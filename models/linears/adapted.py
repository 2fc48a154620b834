"""Layers that adapters change, each row by the adapter of its request (``ops/linear/lora.py``).

One op serves them all. Of a mixture's experts, S adapters are S * E slots: a row's slot is that of its adapter and its
expert; so of the heads of latent attention. Of an embedding, the op gets what a token has in its adapter's A, ``A[:,
id]``, and an identity in the place of A.
"""

import dataclasses
import operator
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.linears.heads import AdaptedHeads, HeadLinear
from compiled_llm.models.linears.protocol import AroundKind, GroupedLinear, Linear, LinearKind, StoredLinear, Take
from compiled_llm.models.linears.quantizing import ROUTERS, names
from compiled_llm.models.linears.sharded import CutTake, Piece
from compiled_llm.models.linears.whole import WholeMatrices, WholePlace
from compiled_llm.ops import TILE, Following, LoraRows, LoraWeights, add_lora, lora_followed, slots_of_rows
from compiled_llm.ops.linear.lora import tiles_of
from compiled_llm.ops.pinned import on_device


class RowChanges(NamedTuple):
    """What the adapters in the slots change of an embedding ``[V, D]``."""

    a: Tensor  # [S, V, R]
    expand: LoraWeights  # of R inputs


class Adapted(NamedTuple):
    """A layer of any kind, and what the adapters in the slots change."""

    plain: Linear
    changes: LoraWeights | None  # None: of an embedding that is not the head as well
    of_rows: RowChanges | None = None  # of an embedding
    slots: Tensor | None = None  # [T] int32, of the step's tokens: ``with_slots`` puts them here
    flags: Tensor | None = None  # of ``Surroundings.lora``, on a GPU
    head: WholeMatrices | None = None  # those that adapters bring whole
    table: WholeMatrices | None = None  # the same of an embedding

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
        return (*self.plain.cpu_ops, "lora_cpu", *(("linear_cpu",) if self.head is not None else ()))

    @property
    def surroundings(self) -> tuple[Tensor, ...]:
        """As ``Surroundings.lora``."""
        if self.changes is None:
            return ()
        assert self.slots is not None, "see with_slots"
        assert self.flags is not None, "a GPU"
        return self.slots, *self.changes, self.flags

    def apply(self, x: Tensor) -> Tensor:
        return self.change(self.plain.apply(x), x)

    def change(self, y: Tensor, x: Tensor) -> Tensor:
        """``y``, what the layer itself gives for ``x``, changed in place."""
        if self.changes is not None:
            _add(y, x, self.slots, self.changes, self.flags)
        if self.head is not None:
            assert self.slots is not None, "see with_slots"
            self.head.change(y, x, self.slots)
        return y

    def changes_and(self, x: Tensor) -> bool:
        """Whether ``followed`` is one launch: on a GPU."""
        return x.is_cuda and self.changes is not None and self.head is None

    def followed(self, y: Tensor, x: Tensor, following: Following) -> tuple[Tensor, Tensor]:
        """As ``lora_followed``, of what the layer itself gives for ``x``."""
        assert self.slots is not None, "see with_slots"
        assert self.flags is not None, "a GPU"
        assert self.changes is not None, "see changes_and"
        return lora_followed(y, x, LoraRows(self.slots), self.changes, self.flags, following)

    def rows(self, ids: Tensor) -> Tensor:
        y = self.plain.rows(ids)
        if self.of_rows is not None:
            assert self.slots is not None, "see with_slots"
            places = (self.slots.clamp(min=1) - 1).long() * self.out_features + ids
            _add(y, self.of_rows.a.flatten(0, 1)[places], self.slots, self.of_rows.expand, self.flags)
        if self.table is not None:
            assert self.slots is not None, "see with_slots"
            y = self.table.rows(y, ids, self.slots)
        return y


def _add(y: Tensor, x: Tensor, slots: Tensor | None, changes: LoraWeights, flags: Tensor | None) -> None:
    assert slots is not None, "see with_slots"
    if flags is None:
        add_lora(y, x, slots, changes)
    else:
        lora_followed(y, x, LoraRows(slots), changes, flags)


class AdaptedExperts(NamedTuple):
    """The layers of a mixture's experts, and what the adapters in the slots change of each."""

    plain: GroupedLinear
    changes: LoraWeights  # of S * E slots, those of an adapter side by side
    slots: Tensor | None = None
    flags: Tensor | None = None  # as of ``Adapted``

    @property
    def num_experts(self) -> int:
        return self.plain.num_experts

    @property
    def top_k(self) -> int:
        return self.plain.top_k

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

    @property
    def surroundings(self) -> tuple[Tensor, ...]:
        """As that of ``Adapted``."""
        assert self.slots is not None, "see with_slots"
        assert self.flags is not None, "a GPU"
        return self.slots, *self.changes, self.flags

    def apply_to(self, x: Tensor, rows: Tensor | None, starts: Tensor) -> Tensor:
        raise AssertionError("see experts_of")

    def apply_to_tokens(self, x: Tensor, rows: Tensor | None, tokens: Tensor, starts: Tensor) -> Tensor:
        """As ``experts_of``."""
        if self.flags is not None:
            y = self.plain.apply_to(x, rows, starts)
            self._launch(y, x, rows, tokens, starts, Following())
            return y
        assert self.slots is not None, "see with_slots"
        y, own = self.plain.apply_to(x, rows, starts), slots_of_rows(self.slots, tokens, starts, self.num_experts)
        add_lora(y, x if rows is None else x[tokens.clamp(0, len(x) - 1)], own, self.changes)
        return y

    def followed(
        self, x: Tensor, rows: Tensor | None, tokens: Tensor, starts: Tensor, following: Following
    ) -> Tensor:  # fmt: skip
        """``experts_of`` and what follows them: two launches of a GPU."""
        return self._launch(self.plain.apply_to(x, rows, starts), x, rows, tokens, starts, following)

    def _launch(
        self, y: Tensor, x: Tensor, rows: Tensor | None, tokens: Tensor, starts: Tensor, following: Following
    ) -> Tensor:
        assert self.slots is not None, "see with_slots"
        assert self.flags is not None, "a GPU"
        where = LoraRows(self.slots, tokens, starts, self.num_experts, rows is not None)
        return lora_followed(y, x, where, self.changes, self.flags, following)[0]


def experts_of(layer: GroupedLinear, x: Tensor, rows: Tensor | None, tokens: Tensor, starts: Tensor) -> Tensor:
    """``layer.apply_to(x, rows, starts)``, with what adapters change of it.

    Args:
        rows: ``tokens``, or None where ``x`` has a row for each of them.
        tokens: ``[R]`` int32, as ``ops.expert_rows`` gives them.
    """
    if isinstance(layer, AdaptedExperts):
        return layer.apply_to_tokens(x, rows, tokens, starts)
    return layer.apply_to(x, rows, starts)


AnyAdapted = Adapted | AdaptedExperts | AdaptedHeads


def with_slots(weights: Any, slots: Tensor) -> Any:
    """A weights tuple whose ``Adapted`` layers know the slot of each token of a step, ``[T]`` int32."""
    if isinstance(weights, AnyAdapted):
        return weights._replace(slots=slots)
    if not isinstance(weights, tuple):
        return weights
    made = [with_slots(item, slots) for item in weights]
    return type(weights)(*made) if hasattr(weights, "_fields") else tuple(made)


def with_slots_of_head(weights: Any, slots: Tensor, rows: Tensor | None = None) -> Any:
    """A model's weights whose head knows the slot of each row that it gets.

    Args:
        slots: int32, of the rows; or of a step's tokens, of which ``rows`` ``[R]`` says those that the head gets.
    """
    if not _adapted(weights.head):
        return weights
    slots = slots if rows is None else slots.index_select(0, rows)
    return weights._replace(head=with_slots(weights.head, slots))


def without_adapters(weights: Any) -> Any:
    """A weights tuple with the layers themselves in the place of ``Adapted`` ones; the same one where it has none."""
    if isinstance(weights, AnyAdapted):
        return weights.plain
    if not isinstance(weights, tuple):
        return weights
    made = tuple(map(without_adapters, weights))
    if all(map(operator.is_, made, weights)):
        return weights
    return type(weights)(*made) if hasattr(weights, "_fields") else made


class Change(NamedTuple):
    """What an adapter changes of a part of a layer, as its slot takes it: on the host, in the layer's dtype.

    Of a mixture's experts the tensors have a dimension more, before the others.
    """

    a: Tensor  # [rank, in_features]; of an embedding [V, rank]
    b: Tensor  # [tiles, rank, 16], what ``tiles_of`` makes of [out_features, rank]
    scale: Tensor  # [] float32, or of each expert

    @property
    def rank(self) -> int:
        return self.b.shape[-2]

    def cut(self, piece: Piece, of_rows: bool) -> "Change":
        """Of what one of several ranks has; ``of_rows``: of an embedding."""
        own = piece.rows.to(self.a.device)
        if of_rows:
            return self._replace(a=self.a[own])
        rows = self.b.transpose(-1, -2).flatten(-3, -2)[..., own, :]  # [..., out_features, rank]
        tiles = tiles_of(rows) if rows.dim() == 2 else torch.stack([*map(tiles_of, rows)])
        return self._replace(a=self.a[..., piece.first : piece.end], b=tiles)


class Place(NamedTuple):
    """Where the changes of one layer of a checkpoint go: a part of an ``Adapted`` layer, or of all experts.

    Attributes:
        part: of the first expert, with "*" for its number.
        number: of the part; first_tile: of its outputs.
        num_experts: 0: it is no layer of experts.
        of_rows: the change of an embedding.
        linear: the layer, if it is a head or an embedding.
        piece: what one of several ranks has of the part; None: all.
        others: the other parts of the rank's sum.
    """

    part: StoredLinear
    number: int
    first_tile: int
    changes: LoraWeights
    linear: Linear | None
    num_experts: int = 0
    of_rows: Tensor | None = None
    piece: Piece | None = None
    others: tuple["Place", ...] = ()

    def rows_of_model(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` of a head or an embedding without adapters, on the host."""
        assert self.linear is not None
        if self.piece is not None or self.changes.a.is_meta:
            raise ValueError(
                "tensor_parallel_size must be 1 for adapters with rows of the model's embedding or head "
                "(trainable_token_indices, copies of tables). Serve them so, or merge them by compiled-llm merge-lora"
            )
        return self.linear.rows(on_device(ids, self.changes.a.device)).to("cpu")

    def put(self, slot: int, change: Change | None) -> None:
        """Let ``slot``, from 1 on, hold ``change``; None: nothing. In the order of the device's stream."""
        for other in self.others:
            other.put(slot, change)
        if change is not None and self.piece is not None:
            change = change.cut(self.piece, self.of_rows is not None)
        changes, device = self.changes, self.changes.a.device
        count = self.num_experts or 1
        slots = slice((slot - 1) * count, slot * count)
        rank = 0 if change is None else change.rank
        changes.ranks[slots, self.number].fill_(rank)
        if change is None:
            return
        changes.scales[slots, self.number].copy_(on_device(change.scale, device))
        a = changes.a[slots, self.number, :rank] if self.of_rows is None else self.of_rows[slot - 1, :, :rank]
        a.copy_(on_device(change.a, device))
        tiles = changes.b[slots, self.first_tile : self.first_tile + change.b.shape[-3], :rank]
        tiles.copy_(on_device(change.b, device))


class HeadsPlace(NamedTuple):
    """Where the changes of a layer go of which the model has each head's rows as two layers, see ``take_heads``.

    As ``B_k`` and ``B_v`` are the rows of B for a head's keys and values, the keys' layer, which is transposed, has
    ``B_k^T`` for an A and ``A^T`` for a B; the values' has A and ``B_v``.
    """

    part: StoredLinear
    first: int  # of a head's rows, that go the other way
    to_inputs: Place
    to_outputs: Place
    num_experts: int = 0
    of_rows: Tensor | None = None
    piece: Piece | None = None  # as that of ``Place``

    @property
    def changes(self) -> LoraWeights:
        return self.to_inputs.changes

    def put(self, slot: int, change: Change | None) -> None:
        """As ``Place.put``."""
        keys = values = None
        if change is not None:
            num_rows = self.part.out_features
            if self.piece is not None:
                change, num_rows = change.cut(self.piece, of_rows=False), len(self.piece.rows)
            rows = change.b.transpose(1, 2).flatten(0, 1)[:num_rows]
            by_head = rows.unflatten(0, (self.to_inputs.num_experts, -1))
            keys = Change(by_head[:, : self.first].transpose(1, 2), tiles_of(change.a.t()), change.scale)
            values = Change(change.a, torch.stack([*map(tiles_of, by_head[:, self.first :])]), change.scale)
        self.to_inputs.put(slot, keys)
        self.to_outputs.put(slot, values)


AnyPlace = Place | HeadsPlace
ALL_LINEAR = "all-linear"
# Not among all: for these each adapter needs much memory, or (routers) a GPU takes more launches where they may change.
_NAMED = ("experts", "head", "embedding", "router")
_ROUTERS = (*ROUTERS, "*.router.layer")  # the last: Granite's, which quantization rounds as other layers


@dataclasses.dataclass(frozen=True)
class Adaptable(AroundKind):
    """A ``LinearKind`` that makes layers of another kind ``Adapted``: those that ``targets`` name.

    Attributes:
        num_slots: adapters that a step may have.
        rank: the largest.
        targets: as ``lora_target_modules``: ``ALL_LINEAR``, and patterns as those of ``quantization_skip``.
        places: of the layers that have been taken, by their names in a checkpoint of plain weights; of experts with "*"
            for the number.
        matched: the targets that named one.
        num_whole: of the slots, those from the first on that may have a whole head and embedding.
        whole: heads and embeddings, by their names.
        of_shapes: whether these are also layers that have been taken as shapes alone, to read adapters for others.
    """

    plain: LinearKind
    num_slots: int
    rank: int
    targets: tuple[str, ...] = (ALL_LINEAR,)
    places: dict[str, AnyPlace] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    matched: set[str] = dataclasses.field(default_factory=set, compare=False, repr=False)
    of_shapes: bool = False
    num_whole: int = 0
    whole: dict[str, WholePlace] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def take(self, take: Take, parts: Sequence[StoredLinear]) -> Linear:
        linear, (part, *_) = self.plain.take(take, parts), parts
        if part.role != "head":
            changes = self._changes(take, parts, linear) if self._may_change(parts) else None
            return linear if changes is None else Adapted(linear, changes, flags=flags_on(take.device))
        # A tied embedding has two names: each may be changed without the other, as PEFT does it.
        head = part._replace(name=part.also or part.name, also="")
        changes = self._changes(take, [head], linear) if self._may_change([head]) else None
        of_rows = self._row_changes(take, part, linear) if part.also else None
        own = (
            self._whole(take, head, linear, True),
            self._whole(take, part._replace(also=""), linear, False) if part.also else None,
        )
        if changes is None and of_rows is None and own == (None, None):
            return linear
        return Adapted(linear, changes, of_rows, None, flags_on(take.device), *own)

    def take_table(self, take: Take, part: StoredLinear) -> Linear:
        linear = self.plain.take_table(take, part)
        of_rows, table = self._row_changes(take, part, linear), self._whole(take, part, linear, False)
        if of_rows is None and table is None:
            return linear
        return Adapted(linear, None, of_rows, flags=flags_on(take.device), table=table)

    def take_experts(self, take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int) -> GroupedLinear:
        layer = self.plain.take_experts(take, experts, top_k)
        parts = [part._replace(name=of_any_expert(part.name)) for part in experts[0]]
        if not self._may_change(parts, "experts"):
            return layer
        if isinstance(take, CutTake) and take.is_of_whole_experts:
            raise ValueError(
                "enable_expert_parallel must be false where lora_target_modules has 'experts', given true: ranks have "
                "parts of each expert then"
            )
        changes = self._changes(take, parts, None, len(experts))
        return AdaptedExperts(layer, changes, flags=flags_on(take.device))

    def take_heads(
        self, take: Take, parts: Sequence[StoredLinear], num_heads: int, first: int
    ) -> tuple[HeadLinear, HeadLinear]:
        to_inputs, to_outputs = self.plain.take_heads(take, parts, num_heads, first)
        if len(parts) > 1 or not self._may_change(parts):
            return to_inputs, to_outputs
        changes = [
            LoraWeights.empty(
                [layer.out_features // num_heads], layer.in_features, self.num_slots * num_heads, self.rank,
                take.dtype, take.device,
            )
            for layer in (to_inputs, to_outputs)
        ]  # fmt: skip
        places = [Place(parts[0], 0, 0, own, None, num_heads) for own in changes]
        self._note(take, HeadsPlace(parts[0], first, places[0], places[1]))
        assert not isinstance(to_inputs, AdaptedHeads)
        assert not isinstance(to_outputs, AdaptedHeads)
        return (
            AdaptedHeads(to_inputs, changes[0], flags=flags_on(take.device)),
            AdaptedHeads(to_outputs, changes[1], flags=flags_on(take.device)),
        )

    def check_targets(self) -> None:
        """``ValueError`` for one of ``targets`` that names no layer of the model, whose layers have been taken."""
        for target in self.targets:
            if target != ALL_LINEAR and target not in self.matched:
                raise ValueError(
                    f"lora_target_modules must have {ALL_LINEAR!r}, or names of layers or parts of these between dots, "
                    f"given {target!r:.200}, which names no layer that adapters may change. Leave it out"
                )

    def note_names(self, others: Mapping[str, str]) -> None:
        """``others``: names that transformers' modules have for tensors, as ``Source.other_names``."""
        for other, name in others.items():
            for key, place in self.places.items():
                part = place.part
                if part.stacked == name:
                    self.places[key] = place._replace(part=part._replace(stacked=other))
                elif f"{part.name}.weight" == name and not part.also:
                    self.places[key] = place._replace(part=part._replace(also=other.removesuffix(".weight")))
            for key, whole in self.whole.items():
                if f"{whole.part.name}.weight" == name:
                    self.whole[key] = whole._replace(part=whole.part._replace(also=other.removesuffix(".weight")))

    def _may_change(self, parts: Sequence[StoredLinear], kind: str = "") -> bool:
        is_router = any(fnmatchcase(part.name, pattern) for part in parts for pattern in _ROUTERS)
        kind = "router" if is_router else kind or parts[0].role
        found = {t for t in self.targets if t == kind or any(names(t, part) for part in parts)}
        self.matched.update(found)
        return bool(found) or (kind not in _NAMED and ALL_LINEAR in self.targets)

    def _changes(
        self, take: Take, parts: Sequence[StoredLinear], linear: Linear | None, num_experts: int = 0
    ) -> LoraWeights:
        """Slots for ``parts``, with their places."""
        outputs = [part.out_features for part in parts]
        num_slots = self.num_slots * (num_experts or 1)
        changes = LoraWeights.empty(outputs, parts[0].in_features, num_slots, self.rank, take.dtype, take.device)
        tile = 0
        for number, part in enumerate(parts):
            self._note(take, Place(part, number, tile, changes, linear, num_experts))
            tile += -(-part.out_features // changes.b.shape[-1])
        return changes

    def _row_changes(self, take: Take, part: StoredLinear, linear: Linear) -> RowChanges | None:
        if not self._may_change([part._replace(role="embedding", also="")]):
            return None
        most = -(-self.rank // TILE) * TILE
        a = torch.zeros(self.num_slots, part.out_features, most, dtype=take.dtype, device=take.device)
        expand = LoraWeights.empty([part.in_features], most, self.num_slots, self.rank, take.dtype, take.device)
        expand.a[:, 0] = torch.eye(most, dtype=take.dtype, device=take.device)
        self._note(take, Place(part, 0, 0, expand, linear, of_rows=a))
        return RowChanges(a, expand)

    def _whole(self, take: Take, part: StoredLinear, linear: Linear, is_head: bool) -> WholeMatrices | None:
        """Slots for matrices in the place of a head's or an embedding's; None: without any."""
        made = None
        if self.num_whole:
            made = WholeMatrices.empty(self.num_whole, part, is_head, take.dtype, take.device)
        if take.device.type != "meta" or self.of_shapes:
            is_shared = isinstance(take, CutTake)
            self.whole[part.name] = WholePlace(part, linear, made, take.dtype, take.device, is_shared)
        return made

    def _note(self, take: Take, place: AnyPlace) -> None:
        if take.device.type == "meta" and not self.of_shapes:  # nothing but names and shapes are asked for
            return
        name = place.part.name
        if isinstance(take, CutTake):
            piece = take.pieces[place.number if isinstance(place, Place) else 0]
            whole = piece.part
            part = place.part._replace(out_features=whole.out_features, in_features=whole.in_features)
            place = place._replace(part=part, piece=piece)
            before = self.places.get(name)
            if take.is_part and isinstance(place, Place) and isinstance(before, Place):
                place = place._replace(others=(*before.others, before._replace(others=())))
        self.places[name] = place


def flags_on(device: torch.device) -> Tensor | None:
    """Those of ``Adapted``; None where it needs none."""
    return torch.zeros(2, dtype=torch.int32, device=device) if device.type == "cuda" else None


def of_any_expert(name: str) -> str:
    """``name`` with "*" for the last number between its dots, which is the expert's."""
    return re.sub(r"\.\d+(?=(\.\D[^.]*)*$)", ".*", name, count=1)


def change_bytes(weights: Any) -> int:
    """Bytes of all slots in a weights tuple, each layer once: a tied head is two things in it."""
    layers = {id(layer): layer for layer in _adapted(weights)}.values()
    return sum(tensor.nbytes for layer in layers for tensor in _slots_of(layer))


def _adapted(weights: Any) -> list[Any]:
    if isinstance(weights, AnyAdapted):
        return [weights]
    return [layer for item in weights for layer in _adapted(item)] if isinstance(weights, tuple) else []


def _slots_of(layer: Any) -> list[Tensor]:
    of_rows = layer.of_rows if isinstance(layer, Adapted) else None
    whole = (layer.head, layer.table) if isinstance(layer, Adapted) else ()
    tensors = [tensor for matrices in whole if matrices is not None for tensor in matrices]
    return [*tensors, *(layer.changes or ()), *(() if of_rows is None else (of_rows.a, *of_rows.expand))]
