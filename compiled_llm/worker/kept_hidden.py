"""KeptHidden: what the features of steps that are not entered yet will be made of (``DraftCoverage.skip``)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_llm.api.config import EngineLimits
from compiled_llm.ops.torch_private import mark_static_address
from compiled_llm.scheduling.block_pool import SINK_BLOCK
from compiled_llm.worker.field_buffers import FieldBuffers, Fields
from compiled_llm.worker.head_coverage import most_skipped_rows
from compiled_llm.worker.step_buffers import StepSizes, mark_sizes


class KeptHidden:
    """Rows of the hidden states of such steps, and the slots of their tokens once features are computed.

    Attributes:
        num_rows: as ``most_skipped_rows`` says.
        hidden: ``[num_rows, *]``, as ``StepOutputs.hidden``.
        slots: of each number of rows that features are computed of at once, ``[rows]`` int32: ``num_rows`` alone on a
            GPU, where each is a graph; on a CPU powers of two besides.
    """

    def __init__(self, limits: EngineLimits, hidden: Tensor, device: torch.device) -> None:
        """``hidden``: of the steps."""
        self._block_size, self.num_rows = limits.block_size, most_skipped_rows(limits)
        sizes, is_cpu = StepSizes.of(limits, device), device.type == "cpu"
        self.hidden = mark_sizes(hidden.new_zeros(self.num_rows, hidden.shape[1]), sizes.most_tokens)
        mark_static_address(self.hidden)
        self._rows = rows_of(self.hidden)
        counts = {1 << number for number in range((self.num_rows - 1).bit_length())} if is_cpu else set()
        fields: Fields = {count: ((count,), torch.int32) for count in sorted({*counts, self.num_rows})}
        self._buffers = FieldBuffers(fields, device)
        self.slots: dict[int, Tensor] = {
            count: mark_sizes(slots, sizes.tokens) for count, slots in self._buffers.tensors.items()
        }
        for arrays in self._buffers.all_arrays():
            for slots in arrays.values():
                self._pad(slots, 0)
        self._buffers.copy()

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.hidden.nbytes + self._buffers.nbytes

    def keep(self, place: int, rows: np.ndarray | Tensor) -> None:
        """Keep ``rows`` of the step that was just launched, as ``rows_of`` gives them, from row ``place`` on."""
        self._rows[place : place + len(rows)] = rows

    def fill(self, slots: np.ndarray) -> Tensor:
        """The first rows are of tokens in ``slots`` [n]. Returns those of all rows to compute features of."""
        arrays = self._buffers.next_arrays()
        size = next(size for size in self.slots if size >= len(slots))
        arrays[size][: len(slots)] = slots
        self._pad(arrays[size], len(slots))
        self._buffers.copy()
        return self.slots[size]

    def _pad(self, slots: np.ndarray, count: int) -> None:
        """Send what is behind the first ``count`` rows to the sink."""
        slots[count:] = SINK_BLOCK * self._block_size + np.arange(len(slots) - count, dtype=np.int32) % self._block_size


def rows_of(tensor: Tensor) -> Any:
    """``tensor`` ``[rows, *]``, on a CPU its bytes: numpy copies few rows in an eighth of the time that torch takes."""
    return tensor.view(torch.uint8).numpy() if tensor.device.type == "cpu" else tensor  # it knows no bfloat16
