"""A model's weights: where a family takes them from, what those of all families share, and what memory they take."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.layers.attention import AttentionWeights
from compiled_llm.models.layers.mlp import MlpWeights, PlainMlpWeights
from compiled_llm.models.layers.moe import MoeWeights
from compiled_llm.models.layers.residual import FetchingNorm, LayerNorm
from compiled_llm.models.layers.rope import head_arrangement, rope_table
from compiled_llm.models.linears.heads import HeadLinear
from compiled_llm.models.linears.mixture import NUM_COUNTERS, UsedExperts
from compiled_llm.models.linears.protocol import (
    GroupedLinear,
    Linear,
    LinearKind,
    Put,
    PutQuantized,
    Region,
    StoredLinear,
)
from compiled_llm.models.linears.published import in_columns, in_order_of
from compiled_llm.models.linears.sharded import NormOverRanks, Sharding
from compiled_llm.models.quantized.mxfp4 import StackedMxfp4
from compiled_llm.models.quantized.scheme import Scheme
from compiled_llm.models.reader import Reader, Stack, Wanted, WantedCodes
from compiled_llm.models.rope_config import Rope
from compiled_llm.models.sharding import REPLICATED, Cut, Section, of_elements, of_heads, of_kv_heads
from compiled_llm.ops.linear.quantized_weight import QuantizedRows, WeightFormat
from compiled_llm.ops.parallel.rank_group import RankGroup

_COLUMNS = 64  # of a matrix that are transposed at a time, in the caches


class ModelWeights(Protocol):
    """What the engine knows of a family's weights: a NamedTuple of tensors, linear layers and tuples of such.

    A step reads all of it, of the embedding and the tables only the rows of its tokens.
    """

    @property
    def embedding(self) -> Linear:
        """``[V, D]``; the very object that ``head`` is where the two are tied."""

    @property
    def layers(self) -> tuple[Any, ...]: ...

    @property
    def head(self) -> Linear:
        """``[V, D]``, makes the logits."""

    @property
    def ropes(self) -> tuple[Tensor, ...]:
        """Tables of rotary embeddings, ``[max_position_embeddings, H]`` float32 each, made from the config."""


class Source:
    """Where a family's weights come from: a checkpoint, random numbers, or nowhere (``Family.describe``).

    A family names every tensor of its checkpoints once, with its shape, when it takes it from here. Linear layers take
    theirs from here as well: this is their ``Take``.

    Attributes:
        may_repeat: name of a tensor that some checkpoints hold besides -> the one that it must equal.
        unused: name of a tensor that some checkpoints hold and the model does not use -> what it is.
        other_names: name that some checkpoints have for a tensor -> the family's.
        stacks: name of a tensor that some checkpoints hold in the place of all weights of experts -> those experts; see
            ``may_be_stacked``.
    """

    def __init__(self, reader: Reader, linears: LinearKind) -> None:
        self._reader, self._linears = reader, linears
        self.may_repeat: dict[str, str] = {}
        self.unused: dict[str, str] = {}
        self.other_names: dict[str, str] = {}
        self.stacks: dict[str, Sequence[Sequence[StoredLinear]]] = {}
        self._used_experts: UsedExperts | None = None
        self._shard = linears.shard if isinstance(linears, Sharding) else None

    @property
    def dtype(self) -> torch.dtype:
        return self._reader.dtype

    @property
    def device(self) -> torch.device:
        return self._reader.device

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.tensor(name, shape)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        mean: float = 0.0,
        std: float | None = None,
        dtype: torch.dtype | None = None,
        arrange: Callable[[Tensor], Tensor] | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        """The checkpoint's tensor ``name``, in the model's dtype or in ``dtype``.

        Args:
            mean, std: of random weights; by default such that activations keep their size.
            arrange, cut: of its rows, as those of ``StoredLinear``.
        """
        tensor = self._reader.tensor(_wanted(name, shape, mean, std, dtype))
        if arrange is not None and not tensor.is_meta:
            tensor = arrange(tensor)
        if self._shard is None:
            return tensor
        if cut is None:
            raise ValueError(
                f"tensor_parallel_size must be 1 for this model, since nothing says how ranks share {name}, given "
                f"{self._shard.size}"
            )
        return tensor[self._shard.own(cut.outputs).to(tensor.device)] if cut.outputs else tensor

    def rows(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        put: Put,
        dtype: torch.dtype | None = None,
        regions: Mapping[str, Region] = MappingProxyType({}),
    ) -> None:
        """The rows of the matrices of these names, one below the other, or their ``regions``; see ``Take.rows``."""
        wanted = [_wanted(name, shape, dtype=dtype) for name, shape in shapes.items()]
        self._reader.rows([one._replace(region=regions.get(one.name)) for one in wanted], put)

    def kept(self, part: StoredLinear, scheme: Scheme) -> WeightFormat:
        """As ``Take.kept``."""
        return self._reader.kept(_codes_of(part, scheme))

    def quantized(self, part: StoredLinear, scheme: Scheme, put: PutQuantized) -> tuple[Tensor | None, Tensor | None]:
        """As ``Take.quantized``, the rows as the checkpoint has them."""
        return self._reader.quantized(_codes_of(part, scheme), put)

    def norm(self, name: str, size: int, *, in_float32: bool = False) -> Tensor:
        """The weight ``[size]`` of an RMS norm; in float32 where it multiplies before the result is rounded."""
        weight = self.tensor(f"{name}.weight", (size,), mean=1.0, cut=REPLICATED)
        return weight.float() if in_float32 else weight

    def norms_of_all_heads(self, name: str, config: ModelConfig) -> dict[str, Any]:
        """Fields of ``AttentionWeights``: norms of all heads together, of queries and of keys, in float32."""
        sizes = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
        sections = [own(config, size) for own, size in zip((of_heads, of_kv_heads), sizes, strict=True)]
        weights = [
            self.norm(f"{name}.{x}_norm", section.size, in_float32=True)
            for x, section in zip("qk", sections, strict=True)
        ]
        if isinstance(self._linears, Sharding):
            return {"over_ranks": tuple(map(self._linears.norm_over_ranks, weights, sections))}
        return dict(zip(("q_norm", "k_norm"), weights, strict=True))

    def norm_of_groups(self, name: str, section: Section, groups: int) -> Tensor | NormOverRanks:
        """That of an RMS norm of each of ``groups`` of ``section`` by itself: a rank's own, where it has whole ones."""
        weight, linears = self.norm(name, section.size), self._linears
        if not isinstance(linears, Sharding):
            return weight
        if groups % linears.shard.size:
            return linears.norm_over_ranks(weight, section, section.size // groups)
        return weight[linears.shard.own((section,)).to(weight.device)]

    def constant(self, size: int, value: float = 1.0) -> Tensor:
        """A weight ``[size]`` float32 that no checkpoint has: of an RMS norm without one, or a multiplier."""
        return torch.full((size,), value, device=self.device)

    def leave(self, name: str, what: str) -> None:
        """Says that checkpoints may hold a tensor that the model does not use, and what it is."""
        self.unused[name] = what

    def may_be_called(self, name: str, other: str) -> None:
        """Says that checkpoints may have the tensor ``name`` under the name ``other``."""
        self.other_names[other] = name

    def may_be_stacked(self, name: str, experts: Sequence[Sequence[StoredLinear]]) -> None:
        """Says that checkpoints may have one tensor ``name`` in the place of the weights of ``experts``.

        It is ``[num_experts, out_features, in_features]``, the rows of an expert's parts one below the other: as
        transformers' modules keep them, and as some checkpoints are published.
        """
        self.stacks[name] = experts

    def layer_norm(self, name: str, size: int) -> LayerNorm:
        """Weight and bias, ``[size]`` each, of a layer norm."""
        return LayerNorm(self.norm(name, size), self.tensor(f"{name}.bias", (size,), cut=REPLICATED))

    def norm_plus_one(self, name: str, size: int) -> Tensor:
        """The same for checkpoints that hold ``w`` where the norm multiplies by ``1 + w``: that sum, in float32."""
        weight = self.tensor(f"{name}.weight", (size,), cut=REPLICATED).float()
        # What torch has in Python of tensors without contents imports its compiler: 1 s and 100 MB.
        return weight if weight.is_meta else 1 + weight

    def linear(self, *parts: StoredLinear, dtype: torch.dtype | None = None) -> Linear:
        """One linear layer that computes all ``parts``, which have the same input; in ``dtype``, or the model's."""
        return self._linears.take(_PartsTake(self, parts, dtype), parts)

    def table(self, part: StoredLinear) -> Linear:
        """A table of which a step reads single rows."""
        part = part._replace(role="embedding")
        return self._linears.take_table(_PartsTake(self, [part]), part)

    def experts(
        self, experts: Sequence[Sequence[StoredLinear]], top_k: int, stacked: str | None = None
    ) -> GroupedLinear:
        """The layers of a mixture's experts, of which a token uses ``top_k``; each computes all of its parts.

        Their weights may be one tensor ``stacked``, if it is given; see ``may_be_stacked``.
        """
        if stacked is not None:
            self.may_be_stacked(stacked, experts)
            experts = [[part._replace(stacked=stacked) for part in parts] for parts in experts]
        return self._linears.take_experts(_PartsTake(self, list(itertools.chain(*experts))), experts, top_k)

    def mixture(
        self,
        router: str,
        experts: str,
        config: ModelConfig,
        num_experts: int,
        top_k: int,
        inner: int,
        *,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        stacked: str | None = None,
        router_dtype: torch.dtype | None = None,
    ) -> MoeWeights:
        """A mixture of gated MLPs of ``inner`` elements as most checkpoints have it, a tensor for each expert.

        Args:
            router, experts: beginnings of the tensors' names; after the second come the number and one of ``names``.
            stacked: the same of ``gate_up_proj`` and ``down_proj``, which may hold those of all experts; None: as
                ``experts``.
            router_dtype: of the router; None: the model's.
        """
        d, each, stacked = config.hidden_size, [f"{experts}.{e}" for e in range(num_experts)], stacked or experts
        gate, up, down = names
        own = of_elements(inner, "the size of experts")
        gate_up = [[StoredLinear(f"{e}.{x}", inner, d, cut=own.outputs) for x in (gate, up)] for e in each]
        downs = [[StoredLinear(f"{e}.{down}", d, inner, cut=own.inputs)] for e in each]
        return MoeWeights(
            router=self.linear(StoredLinear(router, num_experts, d, cut=REPLICATED), dtype=router_dtype),
            gate_up=self.experts(gate_up, top_k, f"{stacked}.gate_up_proj"),
            down=self.experts(downs, top_k, f"{stacked}.down_proj"),
            used=self.used_experts(),
        )

    def stacked_experts(
        self,
        name: str,
        num_experts: int,
        out_features: int,
        in_features: int,
        top_k: int,
        *,
        in_turn: int = 1,
        transposed: bool = True,
        bias: bool = True,
        cut: Cut | None = None,
    ) -> GroupedLinear:
        """The layers of experts that lie in one tensor, ``name``.

        It is ``[num_experts, in_features, out_features]`` where ``transposed``, else the last two are in turn, as they
        always are where they are quantised. Biases are ``name_bias`` ``[num_experts, out_features]``.

        Args:
            in_turn: so many parts of the outputs follow one another in the model, of which the checkpoint has the first
                output each, then the second each, and so on.
            cut: as that of ``StoredLinear``, of each expert.
        """
        sizes = (in_features, out_features) if transposed else (out_features, in_features)
        wanted = Wanted(name, (num_experts, *sizes), 0.0, in_features**-0.5, whole=transposed)
        biases = self.tensor(f"{name}_bias", (num_experts, out_features), std=0.1, cut=REPLICATED) if bias else None
        part = StoredLinear(name, out_features, in_features, bias, transposed, stacked=name, cut=cut)
        if in_turn > 1:
            part = part._replace(arrange=lambda rows: rows.unflatten(0, (-1, in_turn)).transpose(0, 1).flatten(0, 1))
        parts = [[part._replace(name=f"{name}.{e}")] for e in range(num_experts)]
        return self._linears.take_experts(_StackedTake(self._reader, wanted, biases, in_turn), parts, top_k)

    def heads(self, parts: Sequence[StoredLinear], num_heads: int, first: int) -> tuple[HeadLinear, HeadLinear]:
        """Layers of single heads, see ``LinearKind.take_heads``."""
        return self._linears.take_heads(_PartsTake(self, parts), parts, num_heads, first)

    def used_experts(self) -> UsedExperts:
        """The model's count of experts, at 0."""
        if self._used_experts is None:
            total = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._used_experts = UsedExperts(total, torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=self.device))
        return self._used_experts

    def attention(
        self,
        name: str,
        config: ModelConfig,
        *,
        bias: bool = False,
        o_bias: bool | None = None,
        o_name: str = "o_proj",
    ) -> AttentionWeights:
        """A layer's projections as most checkpoints name them: queries, keys and values in one, and the output.

        Args:
            bias: whether they have biases.
            o_bias: the same of the output's; by default as ``bias``.
            o_name: of the output's.
        """
        parts = self.query_key_value(name, config, bias)
        for x in "qk" if config.ropes else "":
            parts[x] = parts[x]._replace(arrange=head_arrangement(config.ropes[0], config.head_dim))
        qkv = self.linear(*parts.values())
        d, size, bias = config.hidden_size, parts["q"].out_features, bias if o_bias is None else o_bias
        o = StoredLinear(f"{name}.{o_name}", d, size, bias, cut=of_heads(config, size).inputs)
        return AttentionWeights(qkv, self.linear(o))

    @staticmethod
    def query_key_value(name: str, config: ModelConfig, bias: bool = False) -> dict[str, StoredLinear]:
        """The projections of a layer's queries, keys and values as most checkpoints name them, by their first letters.

        Args:
            name: the beginning of the tensors' names.
            bias: whether they have biases.
        """
        q, kv = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
        owned = {"q": of_heads(config, q), "k": of_kv_heads(config, kv), "v": of_kv_heads(config, kv)}
        return {
            x: StoredLinear(f"{name}.{x}_proj", own.size, config.hidden_size, bias, cut=own.outputs)
            for x, own in owned.items()
        }

    def mlp(self, name: str, config: ModelConfig, *, bias: bool = False) -> MlpWeights:
        """A layer's gated MLP as most checkpoints name it: gate and up in one, and down."""
        return self.gated_mlp(name, config.hidden_size, config.intermediate_size, bias=bias)

    def gated_mlp(
        self,
        name: str,
        size: int,
        inner: int,
        *,
        bias: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> MlpWeights:
        """A gated MLP of ``inner`` elements; ``names``: what follows ``name`` in those of its tensors."""
        (gate, up, down), own = names, of_elements(inner)
        firsts = [StoredLinear(f"{name}.{x}", inner, size, bias, cut=own.outputs) for x in (gate, up)]
        return MlpWeights(
            self.linear(*firsts), self.linear(StoredLinear(f"{name}.{down}", size, inner, bias, cut=own.inputs))
        )

    def plain_mlp(
        self, up: str, down: str, size: int, inner: int, bias: bool, transposed: bool = False
    ) -> PlainMlpWeights:
        """An MLP of ``inner`` elements without a gate, whose layers have these names."""
        own = of_elements(inner)
        return PlainMlpWeights(
            self.linear(StoredLinear(up, inner, size, bias, transposed, cut=own.outputs)),
            self.linear(StoredLinear(down, size, inner, bias, transposed, cut=own.inputs)),
        )

    def embedding_and_head(
        self, embedding: str, head: str, vocab_size: int, hidden_size: int, *, tied: bool
    ) -> tuple[Linear, Linear]:
        """The embedding and the head, both ``[V, D]``; one object where they are ``tied``."""
        if tied:
            self.may_repeat[f"{head}.weight"] = f"{embedding}.weight"
            both = self.linear(StoredLinear(embedding, vocab_size, hidden_size, role="head", also=head))
            return both, both
        table = self.table(StoredLinear(embedding, vocab_size, hidden_size))
        return table, self.linear(StoredLinear(head, vocab_size, hidden_size, role="head"))

    def rope(self, rope: Rope, head_dim: int, length: int) -> Tensor:
        """The table of ``rope``, see ``rope_table``."""
        return rope_table(rope, head_dim, length, self.device)


class _PartsTake:
    """What ``parts`` take from ``source``: their tensors in the order and direction that the model takes them in."""

    def __init__(self, source: Source, parts: Sequence[StoredLinear], dtype: torch.dtype | None = None) -> None:
        self.dtype, self.device = dtype or source.dtype, source.device
        self._source = source
        self._parts = {f"{part.name}.{which}": part for part in parts for which in ("weight", "bias")}

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        part = self._parts[name]
        transposed = part.transposed and len(shape) == 2
        stored = shape[::-1] if transposed else shape
        tensor = self._source.tensor(name, stored, dtype=self.dtype, cut=REPLICATED)  # the kind of layer cuts it
        if tensor.is_meta:
            return tensor.new_empty(shape)
        tensor = tensor.t().contiguous() if transposed else tensor
        if part.arrange_inputs is not None and len(shape) == 2:
            tensor = part.arrange_inputs(tensor.t()).t().contiguous()
        return tensor if part.arrange is None else part.arrange(tensor)

    def rows(self, shapes: Mapping[str, tuple[int, ...]], put: Put) -> None:
        self.regions(shapes, {}, put)

    def regions(self, shapes: Mapping[str, tuple[int, ...]], regions: Mapping[str, Region], put: Put) -> None:
        """Matrices that are to be changed are read as a whole first, one at a time."""
        changed = {name for name in shapes if _is_changed(self._parts[name])}
        if not changed:
            self._source.rows(shapes, put, self.dtype, regions)
            return
        start = 0

        def put_below(first: int, rows: Tensor) -> None:
            put(start + first, rows)

        for name, shape in shapes.items():
            if name not in changed:
                self._source.rows({name: shape}, put_below, self.dtype, regions)
            elif not (tensor := self(name, shape)).is_meta:
                whole = Region(0, shape[0], 0, shape[1])
                first, end, left, right = regions.get(name, whole)
                put(start + first, tensor[first:end, left:right])
            start += shape[0]

    def kept(self, part: StoredLinear, scheme: Scheme) -> WeightFormat:
        return self._source.kept(part, scheme)

    def quantized(self, part: StoredLinear, scheme: Scheme, put: PutQuantized) -> tuple[Tensor | None, Tensor | None]:
        """Rows that are to be changed in order are decoded as a whole first."""
        if part.transposed:
            raise ValueError(f"quantised weights are not read for {part.name}, which checkpoints keep transposed")
        if self.device.type == "meta":
            return self._source.quantized(part, scheme, put)
        if part.arrange_inputs is not None:
            put = in_columns(put, part.arrange_inputs(torch.arange(part.in_features)), scheme.form.group_size)
        if part.arrange is None:
            return self._source.quantized(part, scheme, put)
        pieces: list[tuple[int, QuantizedRows]] = []
        besides = self._source.quantized(part, scheme, lambda first, rows: pieces.append((first, rows)))
        put(0, in_order_of(pieces, part.arrange(torch.arange(part.out_features))))
        return besides


def _is_changed(part: StoredLinear) -> bool:
    return part.transposed or part.arrange is not None or part.arrange_inputs is not None


class _StackedTake:
    """What experts take of the one tensor ``wanted`` and the ``biases`` of all. Names of parts end in the number.

    Matrices that lie transposed come as a whole.
    """

    def __init__(self, reader: Reader, wanted: Wanted, biases: Tensor | None, in_turn: int) -> None:
        self.dtype, self.device = reader.dtype, reader.device
        self._reader, self._wanted, self._biases, self._in_turn = reader, wanted, biases, in_turn

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert self._biases is not None
        bias = self._biases[int(name.removesuffix(".bias").rpartition(".")[2])]
        return bias if bias.is_meta else bias.view(-1, self._in_turn).t().flatten()

    def kept(self, part: StoredLinear, scheme: Scheme) -> WeightFormat:
        return scheme.form

    def quantized(self, part: StoredLinear, scheme: Scheme, put: PutQuantized) -> tuple[Tensor | None, Tensor | None]:
        if not isinstance(scheme, StackedMxfp4):
            raise ValueError(
                f"config.json: quantization_config quantises {self._wanted.name}, experts that lie in one tensor, "
                "which is read with quant_method 'mxfp4' alone. Load a checkpoint that has these experts plainly"
            )
        stack = Stack(int(part.name.rpartition(".")[2]), self._wanted.shape[0])

        def put_in_order(first: int, rows: QuantizedRows) -> None:
            for row, own in _in_turn(first, part.out_features, self._in_turn):
                if len(codes := rows.codes[own]):
                    put(row, QuantizedRows(codes, rows.scales[own]))

        wanted = _codes_of(part, scheme)._replace(name=self._wanted.name, stack=stack)
        return self._reader.quantized(wanted, put_in_order)

    def rows(self, shapes: Mapping[str, tuple[int, ...]], put: Put) -> None:
        """``shapes`` are those of all experts, in their order."""
        assert len(shapes) == self._wanted.shape[0]
        out_features = next(iter(shapes.values()))[0]

        def put_in_order(start: int, rows: Tensor) -> None:
            expert, first = divmod(start, out_features)
            for row, own in _in_turn(first, out_features, self._in_turn):
                if len(of_part := rows[own]):
                    put(expert * out_features + row, of_part.contiguous())

        def put_columns(start: int, rows: Tensor) -> None:
            begin = start // len(rows) * out_features
            for column in range(0, out_features, _COLUMNS):
                # torch transposes what lies together eight times as fast.
                columns = rows[:, column : column + _COLUMNS].contiguous().t().contiguous()
                put_in_order(begin + column, columns)

        self._reader.rows([self._wanted], put_columns if self._wanted.whole else put_in_order)


def _in_turn(first: int, out_features: int, parts: int) -> Iterator[tuple[int, slice]]:
    """For rows of a matrix from ``first`` on: which of them each part has, and where the first of these belongs."""
    for part in range(parts):
        skipped = (part - first) % parts
        yield part * (out_features // parts) + (first + skipped) // parts, slice(skipped, None, parts)


def _codes_of(part: StoredLinear, scheme: Scheme) -> WantedCodes:
    return WantedCodes(part.name, scheme, part.out_features, part.in_features)


def _wanted(
    name: str,
    shape: tuple[int, ...],
    mean: float = 0.0,
    std: float | None = None,
    dtype: torch.dtype | None = None,
) -> Wanted:
    return Wanted(name, shape, mean, std if std is not None else shape[-1] ** -0.5 if len(shape) > 1 else 0.1, dtype)


def tensors(weights: Any) -> list[Tensor]:
    """All tensors of a weights tuple, each storage once (tied weights are one tensor)."""
    if isinstance(weights, Tensor):
        return [weights]
    if isinstance(weights, RankGroup):  # what ranks share
        return []
    found = [t for item in weights for t in tensors(item)] if isinstance(weights, tuple) else []
    return list({(t.data_ptr() or id(t), t.shape): t for t in found}.values())  # on "meta" there are no addresses


_KINDS: dict[tuple[type, type], bool] = {}


def _is_a(value: Any, protocol: type) -> bool:
    """``isinstance``, asked once of a class, since it looks for all that the protocol has: 0.1 ms each time."""
    key = type(value), protocol
    if key not in _KINDS:
        _KINDS[key] = isinstance(value, protocol)
    return _KINDS[key]


def linears(weights: Any) -> list[Linear]:
    """All linear layers of a weights tuple, each once."""
    if not isinstance(weights, tuple):
        return []
    if _is_a(weights, Linear):
        return [cast(Linear, weights)]
    found = [linear for item in weights for linear in linears(item)]
    return list({id(linear): linear for linear in found}.values())


def experts(weights: Any) -> list[GroupedLinear]:
    """The layers of all mixtures of experts in a weights tuple."""
    if not isinstance(weights, tuple):
        return []
    if _is_a(weights, GroupedLinear):
        return [cast(GroupedLinear, weights)]
    return [found for item in weights for found in experts(item)]


def linear_layers(weights: Any) -> list[Linear | GroupedLinear]:
    """All linear layers of a weights tuple, those of experts included."""
    return [*linears(weights), *experts(weights)]


def used_experts(weights: Any) -> Tensor | None:
    """The tensor of ``UsedExperts`` in a weights tuple; None where there are no experts."""
    if isinstance(weights, UsedExperts):
        return weights.total
    found = map(used_experts, weights) if isinstance(weights, tuple) else ()
    return next((count for count in found if count is not None), None)


def bytes_to_read(weights: Any) -> int:
    """Bytes that a step reads of a weights tuple that it uses once: tensors, and linear layers without padding.

    Without those of experts, which follow from the tokens.
    """
    if isinstance(weights, Tensor) or _is_a(weights, Linear):
        return weights.nbytes
    if isinstance(weights, FetchingNorm):  # what comes from the host is read once it has come, and counted there
        return bytes_to_read(weights.norm)
    if isinstance(weights, UsedExperts) or _is_a(weights, GroupedLinear):
        return 0
    return sum(map(bytes_to_read, weights)) if isinstance(weights, tuple) else 0
