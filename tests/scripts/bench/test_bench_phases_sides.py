"""bench_phases_sides: static batches, and what is read off the times of a run."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts" / "bench"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("bench_phases_sides")


def test_only_steps_in_which_all_requests_decode_count(script: ModuleType) -> None:
    """The second request's prompt delays a token of the first, which later ends while the second goes on."""
    served = script.Served([0.0, 0.0], [[1, 5, 6, 8], [5, 6, 8, 11]], 8)
    assert script.step_seconds([served]) == [1, 2]
    assert script.ttft([served]) == 5


def test_static_batches_start_together_and_wait_for_their_longest(script: ModuleType) -> None:
    class Side:
        """A step takes a second, and so does a batch's prefill."""

        name = "engine"

        def run(self, requests: Any) -> Any:
            times = [[1.0 + n for n in range(request.output_len)] for request in requests]
            return script.Served([0.0] * len(requests), times, sum(map(len, times)))

    workloads = importlib.import_module("workloads")
    requests = [workloads.WorkloadRequest([1], length) for length in (2, 5, 3)]
    served = script.in_static_batches(Side(), requests, 2)
    assert served.starts == [0, 0, 5]
    assert [times[-1] for times in served.token_times] == [5, 5, 8]
    assert served.row_steps == 2 * 5 + 3
