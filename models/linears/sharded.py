"""Layers of one of several ranks (models/sharding.py), of any kind.

What is cut by its outputs is a smaller layer of its kind. What is cut by its inputs is one, too, and a sum over the
ranks follows (``ops/parallel``). An embedding and a head are cut by tokens: a rank looks up those that it has, the sum
has the rows of all; logits are gathered.
"""

import dataclasses
import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.linears.heads import HeadLinear
from compiled_llm.models.linears.parts import take_bias
from compiled_llm.models.linears.protocol import (
    AroundKind,
    GroupedLinear,
    Linear,
    LinearKind,
    Put,
    PutQuantized,
    ReadsRegions,
    Region,
    StoredLinear,
    Take,
)
from compiled_llm.models.quantized.scheme import Scheme
from compiled_llm.models.sharding import PARTS, REPLICATED, Section, Shard
from compiled_llm.ops.linear.quantized_weight import QuantizedRows, WeightFormat

from compiled_llm.ops.parallel.rank_group import RankGroup
from compiled_llm.ops.parallel.reductions import all_gather, all_reduce, join_parts
from compiled_llm.ops.sampling.reference import NO_TOKEN


class Ranks(NamedTuple):
    """The ranks that share a layer.

    Attributes:
        exact: as ``Shard.exact``.
    """

    group: RankGroup
    size: int
    exact: bool

    def sum_of(self, products: Sequence[Tensor]) -> Tensor:
        """The sum ``[T, D]`` of all ranks' ``products``: one of each; or, if exact, equal shares of ``PARTS``."""
        if not self.exact:
            return all_reduce(products[0], self.group)
        return join_parts(torch.stack([y.float() for y in products]), self.group, self.size, products[0].dtype)

    def gathered(self, x: Tensor) -> Tensor:
        """The columns of all ranks ``[T, size * n]``."""
        return all_gather(x.contiguous(), self.group, self.size)


class Summed(NamedTuple):
    """A layer that is cut by its inputs."""

    parts: tuple[Linear, ...]  # one, or with exact sums the rank's share of ``PARTS``
    bias: Tensor | None  # [out_features]
    ranks: Ranks

    @property
    def out_features(self) -> int:
        return self.parts[0].out_features

    @property
    def in_features(self) -> int:
        return sum(part.in_features for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts) + (0 if self.bias is None else self.bias.nbytes)

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return (*self.parts[0].cpu_ops, "parallel_cpu")

    def apply(self, x: Tensor) -> Tensor:
        inputs = x.split([part.in_features for part in self.parts], 1)
        y = self.ranks.sum_of([part.apply(own) for part, own in zip(self.parts, inputs, strict=True)])
        return y if self.bias is None else y + self.bias

    def rows(self, ids: Tensor) -> Tensor:
        raise AssertionError("embeddings are cut by their rows")


class VocabularyRows(NamedTuple):
    """An embedding or a head, or both, of which a rank has the rows of some tokens."""

    plain: Linear  # [ceil(V / size), D]; those past the end repeat the last
    first: Tensor  # [1] int64: the rank's first token
    ranks: Ranks
    out_features: int  # V

    @property
    def in_features(self) -> int:
        return self.plain.in_features

    @property
    def nbytes(self) -> int:
        return self.plain.nbytes

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return (*self.plain.cpu_ops, "parallel_cpu")

    def apply(self, x: Tensor) -> Tensor:
        return self.gathered(self.plain.apply(x))

    def gathered(self, own: Tensor) -> Tensor:
        """The logits of all tokens ``[T, V]``, of the rank's ``[T, n]``."""
        y = self.ranks.gathered(own)
        return y if y.shape[1] == self.out_features else y[:, : self.out_features].contiguous()

    def join_greedy(self, own: Tensor, tokens: Tensor) -> None:
        """Of the rank's logits ``[T, n]`` and the likeliest of its tokens ``[T]`` int64: that of all in their place."""
        largest = own.amax(1).double()
        of_ranks = self.ranks.gathered(torch.stack((largest, (tokens.clamp(min=0) + self.first).double()), 1))
        values, ids = of_ranks[:, ::2], of_ranks[:, 1::2]
        best = values.amax(1)
        # The lowest id of equally likely ones. Rows past the vocabulary repeat its last one, which comes first.
        first = torch.where(values == best[:, None], ids, self.out_features).amin(1)
        tokens.copy_(torch.where(best.isfinite(), first.long(), NO_TOKEN))

    def rows(self, ids: Tensor) -> Tensor:
        count = self.plain.out_features
        own = ids - self.first
        y = self.plain.rows(own.clamp(0, count - 1))
        # All others give zeros, so the sum is exact.
        return all_reduce(torch.where(((own >= 0) & (own < count))[:, None], y, 0), self.ranks.group)


class OwnLogits(NamedTuple):
    """A ``VocabularyRows`` that gives the logits of the rank's tokens ``[T, n]`` alone."""

    of: VocabularyRows

    @property
    def out_features(self) -> int:
        return self.of.plain.out_features

    @property
    def in_features(self) -> int:
        return self.of.in_features

    @property
    def nbytes(self) -> int:
        return self.of.nbytes

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return self.of.cpu_ops

    def apply(self, x: Tensor) -> Tensor:
        return self.of.plain.apply(x)

    def rows(self, ids: Tensor) -> Tensor:
        return self.of.rows(ids)


def shared_head(weights: Any) -> VocabularyRows | None:
    """The head of a model's weights, where each of several ranks has the rows of some tokens."""
    head = weights.head
    return head if isinstance(head, VocabularyRows) and head.ranks.size > 1 else None


class NormOverRanks(NamedTuple):
    """The weight of an RMS norm over what several ranks have: they gather it, and each keeps its own."""

    weight: Tensor  # of all
    place: Tensor  # [1] int64, among those that have others
    ranks: Ranks
    repeats: int = 1  # ranks that have the same
    group_size: int = 0  # elements that are normalised together; 0: all

    def gathered(self, x: Tensor) -> Tensor:
        """``[T, n]`` of a rank -> ``[T, len(weight)]``."""
        return self.ranks.gathered(x).unflatten(1, (self.ranks.size, -1))[:, :: self.repeats].flatten(1)

    def own(self, y: Tensor) -> Tensor:
        """The other way."""
        by_rank = y.unflatten(1, (self.ranks.size // self.repeats, -1))
        return by_rank.index_select(1, self.place).flatten(1)


class SummedExperts(NamedTuple):
    """Experts' layers that are cut by their inputs, or of which a rank has whole ones: ``mixture.summed_experts``."""

    parts: tuple[GroupedLinear, ...]  # as those of ``Summed``
    ranks: Ranks

    @property
    def num_experts(self) -> int:
        return self.parts[0].num_experts

    @property
    def top_k(self) -> int:
        return self.parts[0].top_k

    @property
    def out_features(self) -> int:
        return self.parts[0].out_features

    @property
    def in_features(self) -> int:
        return sum(part.in_features for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return (*self.parts[0].cpu_ops, "parallel_cpu")

    def apply_to(self, x: Tensor, rows: Tensor | None, starts: Tensor) -> Tensor:
        raise AssertionError("see mixture.summed_experts: the sum over a token's experts comes before that over ranks")

    def sum_of(self, hidden: Tensor, summed: Callable[[Tensor, GroupedLinear], Tensor]) -> Tensor:
        """The sum over ranks of what ``summed`` makes ``[T, D]`` of ``hidden`` ``[R, in_features]`` and each part."""
        inputs = hidden.split([part.in_features for part in self.parts], 1)
        return self.ranks.sum_of([summed(own, part) for part, own in zip(self.parts, inputs, strict=True)])


class OwnExperts(NamedTuple):
    """Experts' layers of which a rank has some. Rows of the others are anything, or zeros, or those of their ranks."""

    plain: GroupedLinear
    own: Tensor  # [number of own ones + 1] int64: the first, to the one behind the last
    num_experts: int
    zeros: bool = False
    ranks: Ranks | None = None  # given: rows are exchanged, so that sums over a token's experts are in their order

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
        return (*self.plain.cpu_ops, "parallel_cpu")

    def apply_to(self, x: Tensor, rows: Tensor | None, starts: Tensor) -> Tensor:
        starts = starts.index_select(0, self.own)
        y = self.plain.apply_to(x, rows, starts)
        if not self.zeros:
            return y
        places = torch.arange(len(y), device=y.device)
        y = torch.where(((places >= starts[0]) & (places < starts[-1]))[:, None], y, 0)
        return y if self.ranks is None else all_reduce(y, self.ranks.group)


class Piece(NamedTuple):
    """What is taken of the layer ``part``: outputs ``rows``, ascending, and inputs from ``first`` to ``end``."""

    part: StoredLinear
    rows: Tensor  # [n] int64
    first: int
    end: int

    @property
    def layer(self) -> StoredLinear:
        """A layer of that size, by the same name."""
        return self.part._replace(out_features=len(self.rows), in_features=self.end - self.first)

    def region(self, whole_rows: bool = False) -> Region:
        """Where it is in ``part``; ``whole_rows``: with all inputs."""
        first, end = (int(self.rows[0]), int(self.rows[-1]) + 1) if len(self.rows) else (0, 0)
        return Region(first, end, *((0, self.part.in_features) if whole_rows else (self.first, self.end)))

    def within(self, chunk: "Piece") -> "Piece":
        """One of ``chunks``, as a piece of ``part``."""
        return self._replace(first=self.first + chunk.first, end=self.first + chunk.end)

    def chunks(self, count: int) -> list["Piece"]:
        """Equal runs of the inputs of ``layer``."""
        width, rows = (self.end - self.first) // count, torch.arange(len(self.rows))
        return [Piece(self.layer, rows, i * width, (i + 1) * width) for i in range(count)]


@dataclasses.dataclass(frozen=True)
class Sharding(AroundKind):
    """A ``LinearKind`` of another kind's layers, of which a rank has what ``StoredLinear.cut`` says. The outermost.

    Attributes:
        group: of all ranks.
    """

    plain: LinearKind
    shard: Shard
    group: RankGroup

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.group, self.shard.size, self.shard.exact)

    def norm_over_ranks(self, weight: Tensor, section: Section, group_size: int = 0) -> NormOverRanks:
        """Of all of ``section``, or groups of it that have parts of several ranks."""
        repeats = max(1, self.shard.size // section.units)
        place = torch.full((1,), self.shard.units(section)[0] if repeats > 1 else self.shard.rank, device=weight.device)
        return NormOverRanks(weight, place, self.ranks, repeats, group_size)

    def bytes_while_taking(self, nbytes: int) -> int:
        """With exact sums the inputs of a layer are parted in memory."""
        return self.plain.bytes_while_taking(nbytes) + (nbytes if self.shard.exact else 0)

    def take(self, take: Take, parts: Sequence[StoredLinear]) -> Linear:
        if parts[0].role != "layer":
            return self._vocabulary(take, parts[0], self.plain.take)
        pieces = [self._piece(part) for part in parts]
        if not _cut_by_inputs(parts):
            return self.plain.take(CutTake(take, pieces), [piece.layer for piece in pieces])
        bias = take_bias(take, parts)
        pieces = [piece._replace(part=piece.part._replace(bias=False)) for piece in pieces]
        return Summed(tuple(self.plain.take(*each) for each in self._parted(take, pieces)), bias, self.ranks)

    def take_table(self, take: Take, part: StoredLinear) -> Linear:
        return self._vocabulary(take, part, lambda take, parts: self.plain.take_table(take, parts[0]))

    def take_experts(self, take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int) -> GroupedLinear:
        by_inputs = _cut_by_inputs(experts[0])
        if self.shard.whole_experts:
            return self._take_whole_experts(take, experts, top_k, by_inputs)
        pieces = [self._piece(part) for parts in experts for part in parts]
        count = len(experts[0])
        if not by_inputs:
            return self.plain.take_experts(CutTake(take, pieces), _by_expert(pieces, count), top_k)
        layers = []
        for number, (own, parts) in enumerate(self._parted(take, pieces)):
            # An expert's bias is that of the first part of the first rank; the first parts of the others have zeros.
            own.biases = self.shard.rank == 0
            biased = [part._replace(bias=part.bias and number == 0) for part in parts]
            grouped = [biased[i : i + count] for i in range(0, len(biased), count)]
            layers.append(self.plain.take_experts(own, grouped, top_k))
        return SummedExperts(tuple(layers), self.ranks)

    def take_heads(
        self, take: Take, parts: Sequence[StoredLinear], num_heads: int, first: int
    ) -> tuple[HeadLinear, HeadLinear]:
        pieces = [self._piece(part) for part in parts]
        own = num_heads // self.shard.size
        return self.plain.take_heads(CutTake(take, pieces), [piece.layer for piece in pieces], own, first)

    def _piece(self, part: StoredLinear) -> Piece:
        cut = part.cut
        if cut is None:
            raise ValueError(
                f"tensor_parallel_size must be 1 for this model, since nothing says how ranks share {part.name}, given "
                f"{self.shard.size}"
            )
        rows = self.shard.own(cut.outputs) if cut.outputs else torch.arange(part.out_features)
        assert sum(section.size for section in cut.outputs) in (0, part.out_features), f"a wrong cut of {part.name}"
        if not cut.inputs:
            return Piece(part, rows, 0, part.in_features)
        columns = self.shard.own(cut.inputs)
        assert sum(section.size for section in cut.inputs) == part.in_features, f"a wrong cut of {part.name}"
        first, end = int(columns[0]), int(columns[-1]) + 1
        assert end - first == len(columns), "inputs that lie apart are not cut"
        if self.shard.exact and part.in_features % PARTS:
            raise ValueError(
                f"tensor_parallel_exact=True needs layers whose inputs are a multiple of {PARTS}: {part.name} has "
                f"{part.in_features}. Choose tensor_parallel_exact=False"
            )
        return Piece(part, rows, first, end)

    def _parted(self, take: Take, pieces: Sequence[Piece]) -> list[tuple["CutTake", list[StoredLinear]]]:
        """What takes each part of the rank's sum, and the layers that it is: one, or the rank's share of ``PARTS``."""
        own = CutTake(take, pieces)
        if not self.shard.exact:
            return [(own, [piece.layer for piece in pieces])]
        once, count = _Once(own), PARTS // self.shard.size
        by_part = zip(*(piece.chunks(count) for piece in pieces), strict=True)
        takes = []
        for chunks in by_part:
            part = CutTake(once, chunks)
            part.is_part = True
            part.pieces = tuple(piece.within(chunk) for piece, chunk in zip(pieces, chunks, strict=True))
            takes.append((part, [chunk.layer for chunk in chunks]))
        return takes

    def _vocabulary(
        self, take: Take, part: StoredLinear, kind: Callable[[Take, Sequence[StoredLinear]], Linear]
    ) -> VocabularyRows:
        rows = self.shard.own_rows(part.out_features)
        piece = Piece(part, rows, 0, part.in_features)
        first = torch.full((1,), self.shard.rank * len(rows), dtype=torch.int64, device=take.device)
        return VocabularyRows(kind(CutTake(take, [piece]), [piece.layer]), first, self.ranks, part.out_features)

    def _take_whole_experts(
        self, take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int, by_inputs: bool
    ) -> GroupedLinear:
        total = len(experts)
        first, count = self.shard.units(Section(total, total, "num_experts"))
        if take.device.type == "meta":  # where all names are asked for
            take = _Once(take)
            self.plain.take_experts(take, experts, top_k)
        pieces = [
            Piece(part, torch.arange(part.out_features if first <= e < first + count else 0), 0, part.in_features)
            for e, parts in enumerate(experts)
            for part in parts
        ]
        plain = self.plain.take_experts(CutTake(take, pieces, whole=True), experts[first : first + count], top_k)
        own = torch.arange(first, first + count + 1, device=take.device)
        if not by_inputs:
            return OwnExperts(plain, own, total)
        if self.shard.exact:
            return OwnExperts(plain, own, total, zeros=True, ranks=self.ranks)
        return SummedExperts((OwnExperts(plain, own, total, zeros=True),), self.ranks)


def _cut_by_inputs(parts: Sequence[StoredLinear]) -> bool:
    found = {bool((part.cut or REPLICATED).inputs) for part in parts}
    assert len(found) == 1, "parts of a layer have the same inputs"
    return found.pop()


def _by_expert(pieces: Sequence[Piece], count: int) -> list[list[StoredLinear]]:
    return [[piece.layer for piece in pieces[i : i + count]] for i in range(0, len(pieces), count)]


class CutTake:
    """Of what ``take`` gives, the ``pieces``. Layers are asked for by their own sizes, and by the names of all.

    ``whole``: rows of all pieces are always asked for together. Without ``biases`` these are zeros.
    """

    biases = True
    is_part = False  # of a sum: what it takes is one of several parts of a layer

    def __init__(self, take: Take, pieces: Sequence[Piece], *, whole: bool = False) -> None:
        self.dtype, self.device = take.dtype, take.device
        self._take, self.is_of_whole_experts = take, whole
        self._pieces = {piece.part.name: piece for piece in pieces}
        self.pieces = tuple(pieces)  # of the layer as all ranks have it

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        layer, _, which = name.rpartition(".")
        piece = self._pieces[layer]
        part = piece.part
        tensor = self._take(name, (part.out_features, part.in_features)[: 2 if which == "weight" else 1])
        if tensor.is_meta:
            return tensor.new_empty(shape)
        rows = tensor[piece.rows.to(tensor.device)]
        if which == "bias":
            return rows if self.biases else torch.zeros_like(rows)
        return rows[:, piece.first : piece.end].contiguous()

    def check_groups(self, size: int) -> None:
        """``ValueError`` unless the inputs of all pieces are whole groups of ``size``; 0: a group is a row."""
        for piece in self._pieces.values():
            inputs = piece.part.in_features
            if size and (piece.first % size or (piece.end % size and piece.end != inputs)):
                raise ValueError(
                    f"ranks must have whole groups of inputs of a quantised layer: {piece.part.name} has groups of "
                    f"{size}, and shares are {piece.end - piece.first} of {inputs} inputs. Choose a smaller "
                    f"tensor_parallel_size, or smaller groups; with tensor_parallel_exact=True there are {PARTS} shares"
                )

    @property
    def has_rows_scales(self) -> bool:
        """Whether codes with a scale for a whole row have that of all ranks' inputs."""
        cut = [piece for piece in self._pieces.values() if piece.end - piece.first < piece.part.in_features]
        return bool(cut) and not self.is_part

    def rows(self, shapes: Mapping[str, tuple[int, ...]], put: Put) -> None:
        self._rows(shapes, lambda start, rows, inputs: put(start, rows[:, inputs].contiguous()), whole=False)

    def whole_rows(self, shapes: Mapping[str, tuple[int, ...]], put: Callable[[int, Tensor, slice], None]) -> None:
        """As ``rows``, with all inputs of the rows, and which of them are wanted."""
        self._rows(shapes, put, whole=True)

    def _rows(
        self, shapes: Mapping[str, tuple[int, ...]], put: Callable[[int, Tensor, slice], None], *, whole: bool
    ) -> None:
        names = [f"{layer}.weight" for layer in self._pieces] if self.is_of_whole_experts else list(shapes)
        pieces = [self._pieces[name.removesuffix(".weight")] for name in names]
        by_regions = isinstance(self._take, ReadsRegions)
        begins = [0, *itertools.accumulate(piece.part.out_features for piece in pieces)]
        own_begins = dict(
            zip(shapes, itertools.accumulate((shape[0] for shape in shapes.values()), initial=0), strict=False)
        )

        def put_own(start: int, rows: Tensor) -> None:
            number = bisect_right(begins, start) - 1
            piece = pieces[number]
            begin, wanted = _wanted(piece, start - begins[number], len(rows), rows.device)
            if wanted is not None:
                # Where regions alone are read, the others have been left.
                inputs = slice(None) if by_regions and not whole else slice(piece.first, piece.end)
                put(own_begins[names[number]] + begin, rows[wanted], inputs)

        wholes = {
            name: (piece.part.out_features, piece.part.in_features) for name, piece in zip(names, pieces, strict=True)
        }
        if isinstance(self._take, ReadsRegions):
            regions = {name: piece.region(whole) for name, piece in zip(names, pieces, strict=True)}
            self._take.regions(wholes, regions, put_own)
        else:
            self._take.rows(wholes, put_own)

    def kept(self, part: StoredLinear, scheme: Scheme) -> WeightFormat:
        return self._take.kept(self._pieces[part.name].part, scheme)

    def quantized(self, part: StoredLinear, scheme: Scheme, put: PutQuantized) -> tuple[Tensor | None, Tensor | None]:
        piece = self._pieces[part.name]
        size, all_inputs = scheme.form.group_size, piece.part.in_features
        is_cut = (piece.first, piece.end) != (0, all_inputs)
        self.check_groups(size)
        groups = slice(piece.first // size, -(-piece.end // size)) if size else slice(None)

        def put_own(first: int, rows: QuantizedRows) -> None:
            begin, wanted = _wanted(piece, first, len(rows.codes), rows.codes.device)
            if wanted is not None:
                codes = rows.codes[wanted, piece.first : piece.end].contiguous()
                zeros = None if rows.zeros is None else rows.zeros[wanted, groups]
                put(begin, QuantizedRows(codes, rows.scales[wanted, groups], zeros))

        order, input_scale = self._take.quantized(piece.part, scheme, put_own)
        if order is None or not is_cut:
            return order, input_scale
        if not order.is_meta and not torch.equal(order.cpu(), torch.arange(all_inputs, dtype=order.dtype)):
            raise ValueError(
                f"the inputs of {part.name} have an order of their own (actorder='group', desc_act), in which groups "
                "belong to no single rank. Choose tensor_parallel_size=1, or load a model that was quantised without it"
            )
        return order[: piece.end - piece.first], input_scale


def _wanted(piece: Piece, first: int, count: int, device: torch.device) -> tuple[int, Any]:
    """Of rows ``first`` to ``first + count`` those that ``piece`` has: the place of the first there, and an index."""
    begin, end = torch.searchsorted(piece.rows, torch.tensor([first, first + count])).tolist()
    if begin == end:
        return begin, None
    own = piece.rows[begin:end] - first
    if int(own[-1] - own[0]) == end - begin - 1:
        return begin, slice(int(own[0]), int(own[-1]) + 1)
    return begin, own.to(device)


class _Once:
    """What ``take`` gives, to several who ask: each tensor is taken once."""

    def __init__(self, take: Take) -> None:
        self.dtype, self.device = take.dtype, take.device
        self._take = take
        self._tensors: dict[str, Tensor] = {}
        self._codes: dict[str, tuple[list[tuple[int, QuantizedRows]], tuple[Tensor | None, Tensor | None]]] = {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = self._take(name, shape)
        return self._tensors[name]

    def rows(self, shapes: Mapping[str, tuple[int, ...]], put: Put) -> None:
        new = {name: shape for name, shape in shapes.items() if name not in self._tensors}
        if new:
            held = torch.empty(
                sum(s[0] for s in new.values()), next(iter(new.values()))[1], dtype=self.dtype, device=self.device
            )

            def keep(start: int, rows: Tensor) -> None:
                held[start : start + len(rows)] = rows

            self._take.rows(new, keep)
            self._tensors.update(zip(new, held.split([shape[0] for shape in new.values()]), strict=True))
        start = 0
        for name, shape in shapes.items():
            if self.device.type != "meta":
                put(start, self._tensors[name])
            start += shape[0]

    def kept(self, part: StoredLinear, scheme: Scheme) -> WeightFormat:
        return self._take.kept(part, scheme)

    def quantized(self, part: StoredLinear, scheme: Scheme, put: PutQuantized) -> tuple[Tensor | None, Tensor | None]:
        if part.name not in self._codes:
            held: list[tuple[int, QuantizedRows]] = []
            besides = self._take.quantized(part, scheme, lambda first, rows: held.append((first, rows)))
            self._codes[part.name] = held, besides
        held, besides = self._codes[part.name]
        for first, rows in held:
            put(first, rows)
        return besides
