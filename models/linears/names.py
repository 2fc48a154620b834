"""What the linear layers of a model are called."""

import dataclasses
from collections.abc import Sequence

import torch

from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.experts import DenseExperts
from compiled_llm.models.linears.heads import DenseHeads
from compiled_llm.models.linears.protocol import StoredLinear, Take


@dataclasses.dataclass(frozen=True)
class Names:
    """A ``LinearKind`` of plain layers that notes the parts it takes, for ``Family.describe``."""

    parts: list[StoredLinear] = dataclasses.field(default_factory=list)

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        return Dense.serves(device, dtype)

    def is_exact(self) -> bool:
        return Dense.is_exact()

    def bytes_while_taking(self, nbytes: int) -> int:
        return Dense.bytes_while_taking(nbytes)

    def take(self, take: Take, parts: Sequence[StoredLinear]) -> Dense:
        self.parts.extend(parts)
        return Dense.take(take, parts)

    def take_table(self, take: Take, part: StoredLinear) -> Dense:
        return self.take(take, [part])

    def take_experts(self, take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int) -> DenseExperts:
        self.parts.extend(part for parts in experts for part in parts)
        return DenseExperts.take(take, experts, top_k)

    def take_heads(
        self, take: Take, parts: Sequence[StoredLinear], num_heads: int, first: int
    ) -> tuple[DenseHeads, DenseHeads]:
        """Not noted: they are never rounded at load."""
        return Dense.take_heads(take, parts, num_heads, first)
