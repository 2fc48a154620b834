"""Turns, times and ratios of the benchmarks; graphs of a GPU; kernels that are compiled ahead in processes."""

import contextlib
import os
import random
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.bench import harness


def test_turns_are_rounds_of_all_in_changing_orders() -> None:
    seen: list[str] = []
    runs = {name: lambda name=name: seen.append(name) or len(seen) for name in "abc"}  # type: ignore[func-returns-value]
    found = harness.in_turns(runs, rounds=4, warm_up=1)
    rounds = [seen[at : at + 3] for at in range(0, 15, 3)]
    assert len(seen) == 15
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert rounds[2] == rounds[1][::-1]
    assert rounds[4] == rounds[3][::-1]
    assert {name: len(values) for name, values in found.items()} == {"a": 4, "b": 4, "c": 4}
    assert min(min(values) for values in found.values()) == 4, "the first round warms up and does not count"


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.0, 5, 5), (0.05, 6, 60)])
def test_turns_end_with_their_time_but_not_before_five_rounds(seconds: float, least: int, most: int) -> None:
    (values,) = harness.in_turns({"a": lambda: time.sleep(0.001)}, seconds=seconds).values()
    assert least <= len(values) <= most


def test_a_ratio_is_the_median_of_those_within_a_round() -> None:
    assert harness.median_ratio([2.0, 4.0, 1.0], [1.0, 3.0, 2.0]) == pytest.approx(4 / 3)
    with pytest.raises(ValueError, match="longer"):
        harness.median_ratio([1.0], [1.0, 2.0])


def test_calls_on_a_cpu_read_one_copy_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(harness, "seconds_of", lambda run, device="cpu": (run() and 1e-3) or 1e-3)
    found = harness.call_seconds({"a": seen.append}, 3, "cpu", seconds=0.0)
    assert seen == [copy % 3 for copy in range(len(seen))]
    assert found == {"a": [1e-3 / 3] * 5}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: dict[str, Any] = {"graph_pool_handle": lambda: None, "synchronize": lambda: None, "Stream": lambda: None}
    for name, function in (nothing | {"stream": contextlib.nullcontext}).items():
        monkeypatch.setattr(torch.cuda, name, function)


@pytest.mark.usefixtures("gpu")
def test_a_slope_is_the_time_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(run: Any, launches: int, copies: int, pool: Any) -> float:
        return 5.0 + launches * run(0)  # seconds of the graph: 5 to start

    def fails(copy: int) -> None:
        raise RuntimeError("not in a\ngraph")

    monkeypatch.setattr(harness, "_captured", captured)
    monkeypatch.setattr(harness, "_graph_seconds", lambda graph: graph)
    left_out: dict[str, str] = {}
    runs = {"a": lambda copy: 2.0, "b": lambda copy: 0.5, "c": fails}
    found = harness.call_seconds(runs, 16, "cuda", seconds=0.0, left_out=left_out)
    assert found == {"a": [2.0] * 5, "b": [0.5] * 5}
    assert left_out == {"c": "RuntimeError: not in a graph"}
    with pytest.raises(RuntimeError, match="not in a"):
        harness.call_seconds({"c": fails}, 16, "cuda", seconds=0.0)


@pytest.mark.usefixtures("gpu")
def test_what_a_captured_graph_reads_is_there_while_it_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph knows addresses, and keeps no tensor: its replay would read what came to lie there later."""

    class Graph:
        capture_begin = capture_end = lambda self, *given, **options: None

    def alive(graph: Any) -> float:
        assert read() is not None
        return 1.0

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(harness, "_graph_seconds", alive)
    tensor = torch.ones(3)
    read, runs = weakref.ref(tensor), {"a": lambda copy, tensor=tensor: tensor.sum()}
    del tensor
    assert harness.call_seconds(runs, 2, "cuda", seconds=0.0) == {"a": [0.0] * 5}


def test_copies_are_more_than_a_cache_holds() -> None:
    for nbytes in (1 << 20, 33 << 20, 235 << 20, 1 << 30):
        assert harness.copies_of(nbytes) * nbytes >= min(harness.CACHED_BYTES, 64 * nbytes)
    assert harness.copies_of(1 << 30) == 1


def test_jobs_are_prepared_in_processes_of_their_own(tmp_path: Path) -> None:
    here = Path.cwd()
    todo = {"one": str(tmp_path), "two": str(tmp_path / "no\nsuch"), "three": "."}
    (reason,) = harness.prepared(os.chdir, todo, 1, 60)
    assert reason.startswith("two: FileNotFoundError: ")
    assert "\n" not in reason
    assert Path.cwd() == here != tmp_path


def test_limits_are_those_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "CACHED_BYTES", 1 << 12)
    runs = harness.limit_runs("cpu", torch.float32, 8)
    assert {name: amount for name, (_, amount) in runs.items()} == {"memory": 1 << 12, "matmul": 2 * 8**3}
    assert runs["memory"][0](random.randrange(9)) == 1 << 10  # ones
