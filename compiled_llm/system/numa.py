"""Which cores the processes of one model get, so that each has its own, near its memory."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from compiled_llm.system.resources import granted_cores

_NODES = Path("/sys/devices/system/node")


def cores_of_ranks(size: int, nodes: Path = _NODES, allowed: Sequence[int] | None = None) -> list[list[int]]:
    """For each of ``size`` processes, the cores that it is to keep to, of those that this process may use.

    Where there are several NUMA nodes, a process stays within one, if as many processes can have each. What a process
    first writes then lies in its node's memory. With more processes than cores, several have the same core.
    ``allowed``: the cores that they may use, in place of this process's.
    """
    groups = _groups(size, nodes, allowed)
    each = size // len(groups)
    return [_part(cores, number, each) for cores in groups for number in range(each)]


def cores_of_stages(
    num_stages: int, num_ranks: int, nodes: Path = _NODES, allowed: Sequence[int] | None = None
) -> tuple[list[list[int]], int]:
    """For each of ``num_ranks`` processes of each stage, stage after stage, the cores that it is to keep to.

    Stages that follow one another share the cores of a NUMA node, each rank its part of them: they take turns. Returned
    besides is how many stages can compute at once, since no other has their cores: one on a machine with one memory.
    ``allowed``: as of ``cores_of_ranks``.
    """
    groups = _groups(num_stages, nodes, allowed)
    if len(groups) == 1 or min(map(len, groups)) < num_ranks:  # then the ranks of a stage may lie on several nodes
        return cores_of_ranks(num_ranks, nodes, allowed) * num_stages, 1
    of_each = num_stages // len(groups)
    of_ranks = [[_part(cores, rank, num_ranks) for rank in range(num_ranks)] for cores in groups]
    return [cores for own in of_ranks for cores in own * of_each], len(groups)


def threads_each(parts: Sequence[Sequence[int]], num_stages: int, num_ranks: int) -> int:
    """Threads of each process of several engines, the same for all, with which none waits for a core; one at least.

    Args:
        parts: the cores of each engine, which together may keep ``granted_cores`` busy.
    """
    found = [cores_of_stages(num_stages, num_ranks, allowed=part) for part in parts]
    at_once = len(parts) * num_ranks * max(stages for _, stages in found)
    return max(1, min(granted_cores() // at_once, *(len(own) for cores, _ in found for own in cores)))


def _groups(size: int, nodes: Path, among: Sequence[int] | None) -> list[list[int]]:
    """The cores that there are, by NUMA nodes if as many of ``size`` things can have each; else together."""
    allowed = sorted(os.sched_getaffinity(0) if among is None else among)
    groups = [cores for node in _cores_of_nodes(nodes) if (cores := [core for core in allowed if core in node])]
    known = {core for cores in groups for core in cores}
    return [allowed] if not groups or known != set(allowed) or size % len(groups) else groups


def _part(cores: Sequence[int], number: int, number_of: int) -> list[int]:
    if number_of > len(cores):
        return [cores[number % len(cores)]]
    return list(cores[len(cores) * number // number_of : len(cores) * (number + 1) // number_of])


def _cores_of_nodes(nodes: Path) -> list[set[int]]:
    """As Linux lists them: 0-3,8-11."""
    found = []
    for path in sorted(nodes.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:])):
        spans = re.findall(r"(\d+)(?:-(\d+))?", path.read_text())
        found.append({core for first, last in spans for core in range(int(first), int(last or first) + 1)})
    return found
