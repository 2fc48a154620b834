"""Heads and embeddings that adapters bring whole (PEFT's ``modules_to_save``): slots for them, and their places."""

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.linears.protocol import Linear, StoredLinear
from compiled_llm.ops import empty_packed, native, own_head, pack_weight
from compiled_llm.ops.pinned import on_device

_ROWS_AT_ONCE = 4096


class WholeMatrices(NamedTuple):
    """Matrices ``[V, D]`` of the first S adapter slots, in the place of a head's or of an embedding's."""

    weights: Tensor  # [S, V, D]; of a head on a CPU as ``own_head`` takes it packed
    present: Tensor  # [S] int32: 1 for slots that have one

    @classmethod
    def empty(
        cls, num_slots: int, part: StoredLinear, is_head: bool, dtype: torch.dtype, device: torch.device
    ) -> "WholeMatrices":
        """Slots without any."""
        shape, is_packed = (num_slots, part.out_features, part.in_features), False
        if device.type == "cpu":
            is_packed = is_head and native.is_available("linear_cpu")
        if is_packed:
            each = empty_packed(part.out_features, part.in_features, dtype, torch.device("meta")).shape
            shape = num_slots, *each
        weights = torch.zeros(shape, dtype=dtype, device=device)
        return cls(weights, torch.zeros(num_slots, dtype=torch.int32, device=device))

    def change(self, y: Tensor, x: Tensor, slots: Tensor) -> None:
        """Write the rows of logits ``y`` ``[T, V]`` of ``x`` ``[T, D]`` that slots have a head for."""
        own_head(y, x, slots, *self)

    def rows(self, y: Tensor, ids: Tensor, slots: Tensor) -> Tensor:
        """``y`` ``[T, D]``, the embedding of ``ids``, with the rows of the slots' own."""
        num_slots, vocab_size = self.weights.shape[:2]
        number = (slots.clamp(1, num_slots) - 1).long()
        has = (slots > 0) & (slots <= num_slots) & (self.present[number] > 0)
        own = self.weights.flatten(0, 1)[number * vocab_size + ids]
        return torch.where(has[:, None], own, y)

    def prepared(self, matrix: Tensor) -> Tensor:
        """What ``put`` copies of ``matrix`` ``[V, D]``: packed as the slots are, or in pinned memory for a GPU.

        This takes longer than the copy. Whoever reads adapters does it, in other threads than that of the steps.
        """
        if self.weights.dim() == 5:
            return pack_weight(matrix)
        return matrix.pin_memory() if self.weights.is_cuda else matrix

    def put(self, slot: int, matrix: Tensor | None) -> None:
        """Let ``slot``, from 1 on, have ``matrix``, as ``prepared`` gives it; None: none. In the stream's order."""
        if slot > len(self.present):
            assert matrix is None, "an adapter with whole matrices in a slot without"
            return
        self.present[slot - 1].fill_(int(matrix is not None))
        if matrix is not None:
            self.weights[slot - 1].copy_(on_device(matrix, self.weights.device))


class WholePlace(NamedTuple):
    """A head or an embedding that adapters may bring whole.

    Attributes:
        linear: the model's own, without adapters; on the device "meta" where other processes have it.
        matrices: None: no slot may have one.
    """

    part: StoredLinear
    linear: Linear
    matrices: WholeMatrices | None
    dtype: torch.dtype
    device: torch.device
    is_shared: bool  # whether several ranks have parts of it

    @property
    def shape(self) -> tuple[int, int]:
        return self.part.out_features, self.part.in_features

    def differing(self, matrix: Tensor) -> Tensor | None:
        """Tokens whose rows of ``matrix`` are not those of the model; None: all, or nobody here knows the model's."""
        if self.is_shared or self.device.type == "meta":
            return None
        found = []
        for start in range(0, len(matrix), _ROWS_AT_ONCE):
            rows = matrix[start : start + _ROWS_AT_ONCE]
            ids = torch.arange(start, start + len(rows))
            base = self.linear.rows(on_device(ids, self.device)).to("cpu")
            found.append(ids[(base != rows).any(1)])
        return torch.cat(found)
