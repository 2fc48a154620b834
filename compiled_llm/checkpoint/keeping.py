"""A kind of linear layer that writes the layers of another kind to a file, or has them from there (kept_weights.py)."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.checkpoint.kept_weights import KeptWeights, LayersWriter
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
from compiled_llm.ops.linear.quantized_weight import WeightFormat


@dataclasses.dataclass
class Keeping(AroundKind):
    """A ``LinearKind`` that makes layers of the kind ``plain``, and takes their tensors to or from ``file``.

    Attributes:
        file: to write, whose layers are left on the device "meta"; or to read, which needs none of the checkpoint's
            values. None: neither, as where shapes alone are asked for.
    """

    plain: LinearKind
    file: LayersWriter | KeptWeights | None = None

    def take(self, take: Take, parts: Sequence[StoredLinear]) -> Linear:
        role = "head" if parts[0].role == "head" else "layer"
        return self._taken(take, parts[0].name, role, lambda own: self.plain.take(own, parts))

    def take_table(self, take: Take, part: StoredLinear) -> Linear:
        return self._taken(take, part.name, "table", lambda own: self.plain.take_table(own, part))

    def take_experts(self, take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int) -> GroupedLinear:
        name = experts[0][0].name
        return self._taken(take, name, "experts", lambda own: self.plain.take_experts(own, experts, top_k))

    def take_heads(
        self, take: Take, parts: Sequence[StoredLinear], num_heads: int, first: int
    ) -> tuple[HeadLinear, HeadLinear]:
        heads = f"{parts[0].name}.heads"
        return self._taken(take, heads, "layer", lambda own: self.plain.take_heads(own, parts, num_heads, first))

    def _taken(self, take: Take, name: str, role: str, made: Callable[[Take], Any]) -> Any:
        if self.file is None or take.device.type == "meta":
            return made(take)
        return self.file.layer(name, role, made(_OnMeta(take) if isinstance(self.file, KeptWeights) else take))


class _OnMeta(NamedTuple):
    """The shapes of what ``of`` would give, in the forms that its checkpoint has."""

    of: Take

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def rows(self, shapes: Mapping[str, tuple[int, ...]], put: Put) -> None:
        pass

    def kept(self, part: StoredLinear, scheme: Scheme) -> WeightFormat:
        return self.of.kept(part, scheme)

    def quantized(self, part: StoredLinear, scheme: Scheme, put: PutQuantized) -> tuple[Tensor | None, Tensor | None]:
        order = torch.empty(part.in_features, dtype=torch.int32, device="meta") if scheme.ordered else None
        return order, torch.empty(1, device="meta") if scheme.static_activations else None
