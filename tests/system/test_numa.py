"""Cores of ranks: apart, near each other, of one NUMA node. Those of stages that share a node: the same."""

import os
from pathlib import Path

import pytest

from compiled_llm.system import numa
from compiled_llm.system.numa import cores_of_ranks, cores_of_stages, threads_each


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
    machine(allowed, lists, tmp_path, monkeypatch)
    assert cores_of_ranks(size, tmp_path) == expected


def machine(allowed: list[int], lists: list[str], nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux shows it."""
    for number, text in enumerate(lists):
        (nodes / f"node{number}").mkdir()
        (nodes / f"node{number}" / "cpulist").write_text(text + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))


@pytest.mark.parametrize(
    ("allowed", "lists", "sizes", "expected", "at_once"),
    [
        (range(2), ["0-1"], (2, 1), [[0, 1], [0, 1]], 1),
        (range(4), [], (3, 2), [[0, 1], [2, 3]] * 3, 1),
        (range(4), ["0-1", "2-3"], (2, 1), [[0, 1], [2, 3]], 2),
        (range(4), ["0-1", "2-3"], (4, 1), [[0, 1], [0, 1], [2, 3], [2, 3]], 2),
        (range(4), ["0-1", "2-3"], (2, 2), [[0], [1], [2], [3]], 2),
        (range(4), ["0-1", "2-3"], (3, 2), [[0, 1], [2, 3]] * 3, 1),  # the ranks of each stage lie on both nodes
        (range(4), ["0-1", "2-3"], (3, 1), [[0, 1, 2, 3]] * 3, 1),
        (range(1), ["0"], (2, 2), [[0]] * 4, 1),
        ([0, 2, 3], ["0-1", "2-3"], (2, 2), [[0], [2, 3]] * 2, 1),  # a node has fewer cores than a stage has ranks
    ],
)
def test_cores_of_stages(
    allowed: list[int],
    lists: list[str],
    sizes: tuple[int, int],
    expected: list,
    at_once: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(allowed, lists, tmp_path, monkeypatch)
    assert cores_of_stages(*sizes, tmp_path) == (expected, at_once)


@pytest.mark.parametrize(
    ("parts", "sizes", "granted", "expected"),
    [
        ([range(4), range(4, 8)], (1, 1), 8, 4),
        ([range(4), range(4, 8)], (1, 2), 8, 2),
        ([range(4), range(4, 8)], (2, 1), 8, 4),  # stages of a node take turns
        ([range(4), range(4, 8)], (2, 2), 8, 2),
        ([range(4), range(4, 8)], (2, 1), 5, 2),
        ([[0, 1, 4, 5], [2, 3, 6, 7]], (2, 1), 8, 2),  # each stage has a node's
        ([range(6), range(6, 8)], (1, 1), 8, 2),
        ([range(4), range(4, 8)], (1, 8), 8, 1),
    ],
)
def test_threads_each(
    parts: list[list[int]],
    sizes: tuple[int, int],
    granted: int,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine([], ["0-3", "4-7"], tmp_path, monkeypatch)
    monkeypatch.setattr(numa, "_cores_of_nodes", lambda nodes, read=numa._cores_of_nodes: read(tmp_path))
    monkeypatch.setattr(numa, "granted_cores", lambda: granted)
    assert threads_each(parts, *sizes) == expected
