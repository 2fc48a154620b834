"""Where rows of several requests lie that are one below the other."""

import pytest
import torch

from compiled_llm.step.drafting import rows_below


@pytest.mark.parametrize("seed", range(20))
def test_rows_lie_below_those_of_the_requests_before(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_requests = int(torch.randint(1, 9, (), generator=generator))
    counts = torch.randint(0, 5, (num_requests,), generator=generator, dtype=torch.int32)
    numbers = torch.arange(5 * num_requests, dtype=torch.int32)
    ends, owner, place = rows_below(counts, numbers)
    assert ends.tolist() == counts.cumsum(0).tolist()
    expected = [(request, number) for request, count in enumerate(counts.tolist()) for number in range(count)]
    assert list(zip(owner.tolist(), place.tolist(), strict=True))[: len(expected)] == expected
    assert set(owner[len(expected) :].tolist()) <= {num_requests - 1}, "padding has a request that there is"
    assert {tensor.dtype for tensor in (ends, owner, place)} == {torch.int32}
