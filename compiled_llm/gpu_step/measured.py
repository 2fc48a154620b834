"""Times that were measured on a GPU, beside the estimates of the same step's launches.

``compiled-llm bench kernels --json`` writes what ran, in its order. The same order is estimated here. Both are
aligned by what a launch is: a kernel of the project's by its name, one of Inductor's by its name without the number
at its end (which depends on how many layers were generated), and all others by their kind, since libraries choose
kernels of any name. What has no partner is not left out in silence.
"""

import difflib
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compiled_llm.gpu_step.inspection import Inspection
from compiled_llm.gpu_step.launches import Launch
from compiled_llm.worker.profiler import kind_of


class Unmatched(NamedTuple):
    """Kernels of one name that ran and were not expected. ``us``: of all of them."""

    name: str
    launches: int
    us: float


class Measured(NamedTuple):
    """Attributes:

    us: of each of ``Inspection.rows``, the mean over the layers that it stands for; None where nothing matched.
    gap_us: the gap before it, likewise.
    unmatched: what ran and no row stands for, the longest first.
    not_run: names of the rows without a time.
    busy_us, all_gaps_us: of the whole step, unmatched ones included.
    gpu: the one that was measured.
    """

    us: tuple[float | None, ...]
    gap_us: tuple[float | None, ...]
    unmatched: tuple[Unmatched, ...]
    not_run: tuple[str, ...]
    busy_us: float
    all_gaps_us: float
    gpu: str

    def as_json(self) -> dict[str, Any]:
        """Plain values, in the order of the inspection's rows."""
        return {**self._asdict(), "unmatched": [one._asdict() for one in self.unmatched]}


def read_measured(path: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What ``bench kernels`` wrote. ``asked``: values that it must have, as "shape", "batch_size" and "context".

    Raises:
        ValueError: the file is something else, or of another step.
    """
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--measured {path}: {error}") from None
    if not isinstance(result, dict) or result.get("benchmark") != "kernels" or "in_order" not in result:
        raise ValueError(f"--measured {path}: not a result of compiled-llm bench kernels --json")
    others = [
        f"{name} {result.get(name)!r}, asked {value!r}" for name, value in asked.items() if result.get(name) != value
    ]
    if others:
        raise ValueError(f"--measured {path} is of another step: {'; '.join(others)}; measure or inspect the same")
    if "gpu" not in result.get("machine", {}):
        raise ValueError(f"--measured {path}: it was measured on a CPU; run compiled-llm bench kernels --device cuda")
    return result


def match(inspection: Inspection, result: Mapping[str, Any]) -> Measured:
    """``result``: as ``read_measured`` gives it."""
    ran: Sequence[Mapping[str, Any]] = result["in_order"]
    expected = inspection.order
    keys = [_key(row.launch) for row in inspection.rows]
    known = set(keys)
    ran_keys = [_key_of_name(kernel["name"], known) for kernel in ran]
    matcher = difflib.SequenceMatcher(None, [keys[index] for index in expected], ran_keys, autojunk=False)
    pairs = [(expected[block.a + n], block.b + n) for block in matcher.get_matching_blocks() for n in range(block.size)]
    found: dict[int, list[Mapping[str, Any]]] = {}
    for index, place in pairs:
        found.setdefault(index, []).append(ran[place])
    matched = {place for _, place in pairs}
    others: dict[str, list[float]] = {}
    for place, kernel in enumerate(ran):
        if place not in matched:
            others.setdefault(kernel["name"], []).append(kernel["us"])
    unmatched = [Unmatched(name, len(us), sum(us)) for name, us in others.items()]

    def means(field: str) -> tuple[float | None, ...]:
        return tuple(
            statistics.mean(kernel[field] for kernel in found[index]) if index in found else None
            for index in range(len(inspection.rows))
        )

    return Measured(
        means("us"),
        means("gap_us"),
        tuple(sorted(unmatched, key=lambda one: -one.us)),
        tuple(row.launch.name for index, row in enumerate(inspection.rows) if index not in found),
        sum(kernel["us"] for kernel in ran),
        sum(kernel["gap_us"] for kernel in ran),
        result["machine"]["gpu"],
    )


def _key(launch: Launch) -> str:
    if launch.kind in ("op", "generated"):
        return _without_number(launch.name)
    return launch.kind


def _key_of_name(name: str, known: set[str]) -> str:
    """Of a kernel that ran: ``known`` are the keys that are expected."""
    own = _without_number(name)
    if own in known or own.startswith("triton_"):
        return own
    if kind_of(name) == "linears":
        return "product"
    return "copy" if re.search("memcpy|copy", name, re.IGNORECASE) else "torch"


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name)
