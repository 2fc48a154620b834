"""What one of several stages has of a model: pipeline parallelism, whole layers that follow one another.

The first stage has the embedding, the last one the final norm and the head. Between two stages goes the residual stream
``[T, D]``, in the model's dtype, where it has been rounded in any case: so nothing is another number than in one
process (Huang et al., 2018, arXiv:1811.06965). Families are cut as they are: of their layers a stage passes its own.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.fallback.config import TransformersConfig
from compiled_llm.models.layers.attention import AttentionSpec, Spec
from compiled_llm.models.layers.residual import GivenNorm
from compiled_llm.models.linears.heads import HeadLinear
from compiled_llm.models.linears.protocol import (
    AroundKind,
    GroupedLinear,
    Linear,
    LinearKind,
    Put,
    PutQuantized,
    StoredLinear,
    Take,
)
from compiled_llm.models.quantized.scheme import Scheme
from compiled_llm.models.registry import layers_of
from compiled_llm.ops.linear.quantized_weight import WeightFormat

_NUMBER = re.compile(r"\.(\d+)\.")  # the first in the name of a tensor: of its layer


def numbers_of(config: ModelConfig, layers: Iterable[int]) -> frozenset[int]:
    """Of ``layers``: the numbers that they have in the names of their tensors."""
    blocks = getattr(config, "blocks", None)  # of Nemotron-H, whose layers have one number or two
    if blocks is None:
        return frozenset(layers)
    return frozenset(number for layer in layers for number in blocks[layer] if number is not None)


def number_in(name: str) -> int | None:
    """The number of the layer that a tensor of this name belongs to; None: to no single one."""
    found = _NUMBER.search(f"{name}.")
    return None if found is None else int(found[1])


def is_first(config: ModelConfig) -> bool:
    """Whether a stage, whose config this is, has the embedding; so one that has all layers."""
    return config.own_layers is None or config.own_layers[0] == 0


def is_last(config: ModelConfig) -> bool:
    """Whether it has the head."""
    return config.own_layers is None or config.own_layers[1] == len(layers_of(config.whole))


def check_stages(config: ModelConfig, num_stages: int) -> None:
    """``ValueError`` if the model of ``config`` cannot be cut into so many stages."""
    reason = ""
    if isinstance(config, TransformersConfig):
        reason = "runs through transformers' modelling code"
    elif getattr(config, "hidden_size_per_layer_input", 0):
        reason = "has embeddings that go into each layer"
    if reason:
        raise ValueError(
            f"pipeline_parallel_size must be 1 for {config.architecture}, which {reason}, given {num_stages}"
        )
    equal = [1.0] * len(layers_of(config.whole))
    possible = [count for count in range(1, num_stages + 1) if balanced(config, equal, count) is not None]
    if num_stages not in possible:
        raise ValueError(
            f"pipeline_parallel_size must be at most {possible[-1]} for {config.architecture} with {len(equal)} "
            "layers (each stage has attention with keys of its own, and all layers that read them), given "
            f"{num_stages}"
        )


def may_be_stage(specs: Sequence[Spec], first: int, end: int) -> bool:
    """Whether layers from ``first`` to ``end`` may be a stage: some keep keys, and none reads those of another."""
    own = [spec for spec in specs[first:end] if isinstance(spec, AttentionSpec)]
    shared = [spec.shares_cache_of for spec in own if spec.shares_cache_of is not None]
    return len(own) > len(shared) and all(source >= first for source in shared)


def balanced(config: ModelConfig, costs: Sequence[float], num_stages: int) -> list[tuple[int, int]] | None:
    """The layers of each stage, such that the one that takes longest takes as little as it can. None: there is no way.

    ``costs``: of each layer, in any unit; of the first with the embedding, of the last with the head.
    """
    specs, count = layers_of(config.whole), len(costs)
    before = [0.0, *itertools.accumulate(costs)]
    # For layers up to an end: the most that a stage takes, and where each begins.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for _ in range(num_stages):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (most, begins) in best.items():
            for end in range(first + 1, count + 1):
                if may_be_stage(specs, first, end):
                    found = max(most, before[end] - before[first]), (*begins, first)
                    longer[end] = min(longer.get(end, found), found)
        best = longer
    if count not in best:
        return None
    begins = best[count][1]
    return list(zip(begins, (*begins[1:], count), strict=True))


def own_weights(weights: Any, config: ModelConfig) -> Any:
    """Of all weights, those of the stage whose config this is; None in the place of embedding and head of others."""
    if config.own_layers is None:
        return weights
    own: dict[str, Any] = {"layers": weights.layers[slice(*config.own_layers)]}
    if not is_first(config):
        own["embedding"] = None
    if not is_last(config):
        own |= {"head": None, "final_norm": None}  # some families end with this norm: None leaves the stream as it is
    return weights._replace(**own)


class _GivenRows(NamedTuple):
    """In the place of an embedding: the rows that it would give."""

    given: Tensor  # [T, D]

    def rows(self, ids: Tensor) -> Tensor:
        return self.given


def with_stream(weights: Any, stream: Tensor) -> Any:
    """``weights`` of a stage that begins with the residual stream ``[T, D]`` of the stage before it.

    What a family makes of its embedding, such as a product, has been done there: the first norm reads ``stream``.
    """
    first, *others = weights.layers
    if hasattr(first, "input_norm"):
        first = first._replace(input_norm=GivenNorm(first.input_norm, stream))
    return weights._replace(embedding=_GivenRows(stream), layers=(first, *others))


@dataclasses.dataclass(frozen=True)
class OwnLayers(AroundKind):
    """A ``LinearKind`` that takes what a stage has, of the kind ``plain``; of the rest shapes alone.

    Attributes:
        numbers: of the stage's layers, as they are in the names of their tensors.
    """

    plain: LinearKind
    numbers: frozenset[int]
    is_first: bool
    is_last: bool

    @classmethod
    def of(cls, config: ModelConfig, plain: LinearKind) -> "OwnLayers":
        assert config.own_layers is not None
        numbers = numbers_of(config, range(*config.own_layers))
        return cls(plain, numbers, is_first(config), is_last(config))

    def has(self, part: StoredLinear) -> bool:
        """Whether the stage has this layer, or table."""
        if part.role == "embedding":
            return self.is_first
        if part.role == "head":
            return self.is_last or (self.is_first and bool(part.also))
        return self.has_name(part.name)

    def has_name(self, name: str) -> bool:
        """The same of a tensor of a layer, or one of all layers."""
        number = number_in(name)
        return number is None or number in self.numbers

    def take(self, take: Take, parts: Sequence[StoredLinear]) -> Linear:
        return self.plain.take(self._from(take, parts[0]), parts)

    def take_table(self, take: Take, part: StoredLinear) -> Linear:
        return self.plain.take_table(self._from(take, part), part)

    def take_experts(self, take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int) -> GroupedLinear:
        return self.plain.take_experts(self._from(take, experts[0][0]), experts, top_k)

    def take_heads(
        self, take: Take, parts: Sequence[StoredLinear], num_heads: int, first: int
    ) -> tuple[HeadLinear, HeadLinear]:
        return self.plain.take_heads(self._from(take, parts[0]), parts, num_heads, first)

    def _from(self, take: Take, part: StoredLinear) -> Take:
        # Where names and shapes are asked for, a checkpoint is checked as a whole.
        return take if take.device.type == "meta" or self.has(part) else _NotRead(take)


class _NotRead:
    """A ``Take`` of what another stage has: nothing is read, and tensors are on the device "meta"."""

    device = torch.device("meta")

    def __init__(self, take: Take) -> None:
        self.dtype, self._take = take.dtype, take

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def rows(self, shapes: Mapping[str, tuple[int, ...]], put: Put) -> None:
        pass

    def kept(self, part: StoredLinear, scheme: Scheme) -> WeightFormat:
        return self._take.kept(part, scheme)

    def quantized(self, part: StoredLinear, scheme: Scheme, put: PutQuantized) -> tuple[Tensor | None, Tensor | None]:
        order = torch.empty(part.in_features, dtype=torch.int32, device=self.device) if scheme.ordered else None
        return order, torch.empty(1, device=self.device) if scheme.static_activations else None
