"""B16: tests of the tests. Bugs are planted in the source one by one, and the ordinary checks must see each of them."""

import ast
import dataclasses
import functools
import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.battery.planted_bugs import BUGS, POOL, Bug, Checks

ROOT = Path(__file__).parents[2]
SMALL = {"the sink is handed out", "digests leave the parent out", "an abort leaks blocks"}


def outcomes(jobs: list[tuple[Bug | None, Checks]]) -> list[dict[str, str]]:
    """Of each bug, or none, and the checks: see ``plant.run``."""
    data = [{"bug": bug and dataclasses.asdict(bug), "checks": dataclasses.asdict(checks)} for bug, checks in jobs]
    command = [sys.executable, "-m", "tests.battery.plant"]
    result = subprocess.run(command, input=json.dumps(data), capture_output=True, text=True, cwd=ROOT)
    lines = result.stdout.splitlines()
    assert len(lines) == len(jobs), result.stderr[-4000:]
    return [json.loads(line) for line in lines]


@functools.cache
def definitions(path: Path) -> dict[str, str]:
    """The source of each function and class of a file."""
    source = path.read_text()
    lines, kinds = source.splitlines(keepends=True), (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = (node for node in ast.parse(source).body if isinstance(node, kinds))
    return {node.name: "".join(lines[node.lineno - 1 : node.end_lineno]) for node in found}


def test_the_place_of_each_bug_is_there_and_takes_it() -> None:
    """So that the list cannot rot unseen: the function has once what the bug changes, and compiles with it."""
    for bug in BUGS:
        path, place = ROOT / f"{bug.module.replace('.', '/')}.py", bug.function.split(".")[0]
        compile(bug.planted(ast.parse(definitions(path)[place])), f"{path} with {bug.name!r}", "exec")


@pytest.mark.parametrize(
    ("names", "also_without"),
    [
        pytest.param(SMALL, False, id="small"),  # the checks run without a bug in the same run, as tests
        pytest.param({bug.name for bug in BUGS}, True, id="full", marks=pytest.mark.battery),
    ],
)
def test_the_checks_pass_until_a_bug_is_planted(
    names: set[str], also_without: bool, battery_counts: Counter[str]
) -> None:
    planted = {bug: checks for bug, checks in BUGS.items() if bug.name in names}
    assert len(planted) == len(names)
    groups = list(dict.fromkeys(planted.values()))
    # The fewer processes that load torch, the better: one for those that do without, and one for the others.
    failures = []
    for load_torch in (False, True):
        jobs: list[tuple[Bug | None, Checks]] = [(None, checks) for checks in groups if also_without]
        jobs = [job for job in [*jobs, *planted.items()] if job[1].load_torch == load_torch]
        for (bug, checks), found in zip(jobs, outcomes(jobs), strict=True):
            expected = "passed" if bug is None else "caught"
            battery_counts["runs without a bug" if bug is None else "planted"] += 1
            if found["outcome"] == expected:
                battery_counts["passed" if bug is None else "caught"] += 1
                if bug is not None:
                    battery_counts["by " + found["by"].split("::")[0].removeprefix("tests/")] += 1
            else:
                failures.append(f"{checks.tests} with {bug and bug.name!r}: {found}")
    assert not failures, "\n".join(failures)
    assert battery_counts["caught"] == battery_counts["planted"] == len(names)


def test_what_is_no_bug_is_not_caught() -> None:
    """A change that nothing observes passes; and one that breaks the source itself does not count as caught."""
    place = "len(self._empty) + len(self._cached)"
    harmless = Bug(
        "",
        "compiled_llm.scheduling.block_pool",
        "BlockPool.num_free",
        place,
        "1 * len(self._empty) + len(self._cached)",
    )
    checks = dataclasses.replace(POOL, tests=("tests/scheduling/test_block_pool.py",))
    changes: list[dict[str, str]] = [
        {"new": "return ("},
        {"new": "no_such_name"},
        {"old": "no_such_text"},
        {"function": "BlockPool.no_such_function"},
        {"old": f"return {place}", "new": "import no_such_module"},
    ]
    broken = [dataclasses.replace(harmless, **change) for change in changes]
    found = outcomes([(bug, checks) for bug in [harmless, *broken]])
    assert [outcome["outcome"] for outcome in found] == ["passed"] + ["broken"] * len(broken), found


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """The source stays as it is, and no .pyc of a planted bug is written."""
    bug = next(bug for bug in BUGS if bug.name == "the sink is handed out")
    module = ROOT / "compiled_llm" / "scheduling" / "block_pool.py"
    cached = Path(importlib.util.cache_from_source(str(module)))
    before = module.read_bytes(), cached.stat().st_mtime_ns if cached.exists() else None
    (found,) = outcomes([(bug, dataclasses.replace(POOL, tests=("tests/scheduling/test_block_pool.py",)))])
    assert found["outcome"] == "caught"
    assert before == (module.read_bytes(), cached.stat().st_mtime_ns if cached.exists() else None)
