"""KeptHidden: rows of steps one behind the other, and the slots of their tokens."""

import numpy as np
import pytest
import torch

from compiled_llm.api.config import EngineLimits
from compiled_llm.worker import head_coverage
from compiled_llm.worker.kept_hidden import KeptHidden, rows_of

LIMITS = EngineLimits(32, 3, 16, 4, (1, 3), (16,), True)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_steps(dtype: torch.dtype) -> None:
    hidden, generator = torch.zeros(16, 6, dtype=dtype), torch.Generator().manual_seed(0)
    kept, wanted = KeptHidden(LIMITS, hidden, CPU), []
    for place in range(0, 9, 3):
        hidden.copy_(torch.randn(16, 6, generator=generator))
        kept.keep(place, rows_of(hidden)[:3])
        wanted.append(hidden[:3].clone())
    assert torch.equal(kept.hidden[:9], torch.cat(wanted))
    assert not kept.hidden[9:].any()


@pytest.mark.parametrize("count", [1, 5, 8, 64 * 3])
def test_slots_behind_the_last_row_are_those_of_the_sink(count: int) -> None:
    kept = KeptHidden(LIMITS, torch.zeros(16, 6), CPU)
    kept.fill(np.arange(4, 4 + kept.num_rows))  # as many as there may be
    slots = kept.fill(np.arange(70, 70 + count))
    assert slots[:count].tolist() == list(range(70, 70 + count))
    assert len(slots) < max(2, 2 * count)
    assert set(slots[count:].tolist()) <= {0, 1, 2, 3}


def test_its_rows_are_bounded_and_its_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the most requests fits in."""
    for most, num_rows in ((1024, 192), (100, 100), (2, 3)):
        monkeypatch.setattr(head_coverage, "_MOST_ROWS", most)
        kept = KeptHidden(LIMITS, torch.zeros(16, 6), CPU)
        assert kept.hidden.shape == (num_rows, 6)
        assert kept.nbytes >= 4 * num_rows * (6 + 1)
