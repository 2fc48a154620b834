"""Cores of ranks: apart, near each other, of one NUMA node."""

import os
from pathlib import Path

import pytest

from compiled_llm.system.numa import cores_of_ranks


@pytest.mark.parametrize(
    ("allowed", "lists", "size", "expected"),
    [
        (range(4), [], 2, [[0, 1], [2, 3]]),
        (range(5), ["0-4"], 2, [[0, 1], [2, 3, 4]]),
        (range(8), ["0-1,4-5", "2-3,6-7"], 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (range(8), ["0-1,4-5", "2-3,6-7"], 4, [[0, 1], [4, 5], [2, 3], [6, 7]]),
        (range(8), ["0-3", "4-7"], 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),  # not as many for each node
        ([0, 5], ["0-3", "4-7"], 2, [[0], [5]]),
        ([1, 2], ["0-3", "4-7"], 2, [[1], [2]]),  # a node of which nothing is allowed
        (range(4), ["0-1"], 2, [[0, 1], [2, 3]]),  # cores of no known node
        (range(2), ["0-1"], 4, [[0], [1], [0], [1]]),
    ],
)
def test_cores_of_ranks(
    allowed: list[int], lists: list[str], size: int, expected: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, text in enumerate(lists):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(text + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
    assert cores_of_ranks(size, tmp_path) == expected
