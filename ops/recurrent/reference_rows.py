"""The requests of a step one after the other, as the references of the ops with a state take them."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.ops.recurrent.state_rows import SINK_SLOT


class Row(NamedTuple):
    """One request."""

    tokens: range
    """Its rows of the flat tokens."""
    read_slot: int | None
    """None: it starts from zeros."""
    writes: list[tuple[int, int]]
    """(after so many tokens, slot)."""


def rows_of(
    query_start_loc: Tensor, seq_lens: Tensor, read_slot: Tensor, write_slot: Tensor, write_after: Tensor
) -> Iterator[Row]:
    """The requests that have tokens, one after the other."""
    starts, lengths, reads = query_start_loc.tolist(), seq_lens.tolist(), read_slot.tolist()
    slots, afters = write_slot.tolist(), write_after.tolist()
    for r, length in enumerate(lengths):
        tokens = range(starts[r], starts[r + 1])
        if length and tokens:
            writes = [
                (after, slot) for after, slot in zip(afters[r], slots[r], strict=True) if after and slot != SINK_SLOT
            ]
            yield Row(tokens, None if length == len(tokens) else reads[r], writes)


def first_state(state: Tensor, row: Row, dtype: torch.dtype) -> Tensor:
    """A copy of the state before the row's first token."""
    if row.read_slot is None:
        return state.new_zeros(state.shape[1:], dtype=dtype)
    return state[row.read_slot].to(dtype, copy=True)


def write_state(state: Tensor, row: Row, after: int, value: Tensor) -> None:
    """Keep the state after so many of the row's tokens, if it is wanted."""
    for wanted, slot in row.writes:
        if wanted == after:
            state[slot] = value.to(state.dtype)
