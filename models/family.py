"""What a model family is to the engine: one object of this class, ``FAMILY`` in the family's file."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, Spec
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.protocol import LinearKind, Put, PutQuantized, StoredLinear
from compiled_llm.models.quantized.plan import GENERAL
from compiled_llm.models.quantized.scheme import FLOATS, StoredPart, usual_dtypes
from compiled_llm.models.reader import Wanted, WantedCodes
from compiled_llm.models.rope_config import Rope, read_partial_rope, read_rope
from compiled_llm.models.weights import ModelWeights, Source
from compiled_llm.ops.linear.quantized_weight import WeightFormat

C = TypeVar("C", bound=ModelConfig)
W = TypeVar("W", bound=ModelWeights)

Layers = tuple[AttentionSpec, ...]
MixedLayers = tuple[Spec, ...]


def one_rope(config: Any) -> tuple[Rope, ...]:
    """The rotary embeddings of transformers' ``config`` whose layers all have the same."""
    return (read_rope(config.rope_parameters, config.max_position_embeddings),)


def one_partial_rope(config: Any) -> tuple[Rope, ...]:
    """The same of layers that may turn a part of each head."""
    return (read_partial_rope(config.rope_parameters, config.max_position_embeddings),)


@dataclasses.dataclass(frozen=True)
class Family(Generic[C, W]):
    """All that the engine knows of a family.

    Attributes:
        hf_config: transformers' class for its ``config.json``: the fields that it has are those that can matter.
        config: ``ModelConfig``, or a subclass with the fields of this family's own. A field that transformers acts on
            and that neither has is refused, unless it has the class's default.
        take: (config, source) -> weights. Asks ``source`` for every tensor of a checkpoint, by its name and shape.
        layers: config -> each layer's attention, or its state.
        forward: (weights, step, KV cache, config, layers) -> what the head takes, ``[T, D]``. Writes the step's keys
            and values to the cache. Pure besides, and traced as a whole.
        head: (weights, rows of what ``forward`` gave ``[R, D]``, config) -> logits ``[R, V]``. Pure.
        requires: field of ``config.json`` -> the values that the functions above are right for. The first is named in
            messages. Fields of ``config`` are not looked up here: it checks its own.
        read_ropes: transformers' config -> ``ModelConfig.ropes``. ``ValueError`` for what is not supported.
        updated: parsed ``config.json`` -> the same in the words of the transformers that is installed, where its class
            no longer knows those of older files. ``ValueError`` for what is not supported.
        check: parsed ``config.json`` with the class's defaults -> ``ValueError`` for what the class would stumble over,
            or not look at.
        old_fields: fields that ``hf_config`` does not declare, and that it or its model acts on where they are given;
            and those that ``sizes`` reads.
        sizes: transformers' config -> those of ``ModelConfig``'s fields that it has under other names, by their usual
            ones, and those of ``config``'s that it has not as they are. The other names belong to ``old_fields``.
        quantizations: the kinds of ``quantization_config`` that its checkpoints have.
        derived_tensors: ends of the names of tensors that old checkpoints hold, and that follow from the config.
        ends_normed: whether ``forward`` ends with the last norm; else it is the head's.
    """

    hf_config: str
    config: type[C]
    take: Callable[[C, Source], W]
    layers: Callable[[C], MixedLayers]
    forward: Callable[[W, StepInput, KVCache, C, Any], Tensor]
    head: Callable[[W, Tensor, C], Tensor]
    requires: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    read_ropes: Callable[[Any], tuple[Rope, ...]] = one_rope
    updated: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
    check: Callable[[dict[str, Any]], None] = lambda config: None
    old_fields: tuple[str, ...] = ()
    sizes: Callable[[Any], dict[str, Any]] = lambda config: {}
    quantizations: tuple[str, ...] = GENERAL
    derived_tensors: tuple[str, ...] = ("rotary_emb.inv_freq",)
    ends_normed: bool = False

    def describe(self, config: C, dtype: torch.dtype = torch.float32, linears: LinearKind = Dense) -> "Description[W]":
        """What the weights of a model in ``dtype`` are, without reading any."""
        reader = _ShapeReader(dtype)
        source = Source(reader, linears)
        weights = self.take(config, source)
        return Description(
            reader.taken, reader.stored, source.may_repeat, source.unused, source.other_names, source.stacks, weights
        )


class _ShapeReader:
    """Notes what is asked for."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, torch.device("meta")
        self.taken: dict[str, tuple[int, ...]] = {}
        self.stored: dict[str, StoredPart] = {}

    def tensor(self, wanted: Wanted) -> Tensor:
        assert wanted.name not in self.taken, f"{wanted.name} is taken twice"
        self.taken[wanted.name] = wanted.shape
        whole = wanted.dtype is not None and not wanted.dtype.is_floating_point
        self.stored[wanted.name] = StoredPart((wanted.shape,), (torch.int64, torch.int32) if whole else FLOATS)
        return torch.empty(wanted.shape, dtype=wanted.dtype or self.dtype, device="meta")

    def rows(self, wanted: Sequence[Wanted], put: Put) -> None:
        for one in wanted:
            self.tensor(one)

    def kept(self, wanted: WantedCodes) -> WeightFormat:
        """As checkpoints in this dtype usually have it: none is read."""
        return wanted.scheme.kept(usual_dtypes(_stored(wanted), self.dtype), self.dtype)

    def quantized(self, wanted: WantedCodes, put: PutQuantized) -> tuple[Tensor | None, Tensor | None]:
        scheme, stack = wanted.scheme, wanted.stack
        is_taken = wanted.weight in self.taken and (stack is None or stack.number == 0)
        assert not is_taken, f"{wanted.name} is taken twice"
        before = () if stack is None else (stack.size,)
        self.taken[wanted.weight] = (*before, wanted.out_features, wanted.in_features)
        for which, part in _stored(wanted).items():
            shapes = tuple((*before, *shape) for shape in part.shapes)
            self.stored[wanted.stored_name(which)] = part._replace(shapes=shapes)
        order = torch.empty(wanted.in_features, dtype=torch.int32, device="meta") if scheme.ordered else None
        return order, torch.empty(1, device="meta") if scheme.static_activations else None


def _stored(wanted: WantedCodes) -> dict[str, StoredPart]:
    try:
        return wanted.stored()
    except ValueError as error:
        raise ValueError(f"config.json: {wanted.name} cannot be quantised so: {error}") from error


@dataclasses.dataclass(frozen=True)
class Description(Generic[W]):
    """Weights that take no memory.

    Attributes:
        taken: name -> shape of every tensor that the family takes.
        stored: the tensors of a checkpoint by their names: the same, but for those of quantised layers.
        may_repeat: name of a tensor that some checkpoints hold besides -> the one that it must equal.
        unused: name of a tensor that some checkpoints hold and the model does not use -> what it is.
        other_names: name that some checkpoints have for a tensor -> that in ``stored``.
        stacks: name of a tensor that some checkpoints hold in the place of the weights of experts -> the experts.
        weights: on the device "meta".
    """

    taken: dict[str, tuple[int, ...]]
    stored: dict[str, StoredPart]
    may_repeat: dict[str, str]
    unused: dict[str, str]
    other_names: dict[str, str]
    stacks: dict[str, Sequence[Sequence[StoredLinear]]]
    weights: W
