"""The time of a launch: what a graph's start takes is no part of it."""

import contextlib
from typing import Any

import pytest
import torch

from tests.scripts.test_gpu_validate import ROOT, load


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load(ROOT / "scripts" / "bench" / "graph_times.py")
    for name, function in {
        "graph_pool_handle": lambda: None,
        "synchronize": lambda: None,
        "Stream": lambda: None,
        "stream": contextlib.nullcontext,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return module


def test_a_slope_is_the_time_of_a_launch(times: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(run: Any, launches: int, pool: Any) -> float:
        return 5.0 + launches * run(0)  # seconds of the graph: 5 to start

    monkeypatch.setattr(times, "_captured", captured)
    monkeypatch.setattr(times, "_seconds", lambda graph: graph)
    left_out: dict[str, str] = {}

    def fails(copy: int) -> None:
        raise RuntimeError("not in a graph")

    found = times.slopes({"a": lambda copy: 2.0, "b": lambda copy: 0.5, "c": fails}, 16, 0.0, left_out)
    assert found == {"a": 2.0, "b": 0.5}
    assert left_out == {"c": "RuntimeError: not in a graph"}


def test_launches_read_more_than_a_cache_holds(times: Any) -> None:
    for nbytes in (1 << 20, 33 << 20, 235 << 20, 1 << 30):
        count = times.launches_for(nbytes)
        assert count * nbytes > 128 << 20
        assert count >= 4
