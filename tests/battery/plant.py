"""Runs checks with a bug planted: ``python -m tests.battery.plant``, jobs as JSON on stdin, outcomes on stdout.

With names of bugs as arguments it runs these: ``python -m tests.battery.plant "an abort leaks blocks"``.

The working tree is not touched: the source of one module is changed between reading and compiling it, in a process of
its own. Those are forks of this one, which has loaded what takes long, and nothing of the package.
"""

import ast
import dataclasses
import importlib
import importlib.machinery
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import CodeType, ModuleType
from typing import Any

import hypothesis  # noqa: F401
import pytest

from tests.battery.planted_bugs import BUGS, Bug, Checks

MOST_SECONDS = 120
# What a check fails with. Anything else, such as a NameError, says that the bug was planted badly.
FAILURES = (AssertionError, LookupError, RuntimeError, ValueError, pytest.fail.Exception)


class PlantingLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, bug: Bug, path: str) -> None:
        super().__init__(bug.module, path)
        self.bug = bug

    def get_code(self, fullname: str) -> CodeType:
        """Compiled from the source each time: no .pyc is read."""
        source = self.get_data(self.path).decode()
        return self.source_to_code(self.bug.planted(ast.parse(source)), self.path)


class PlantingFinder:
    """Goes before the others in ``sys.meta_path``, for one module."""

    def __init__(self, bug: Bug) -> None:
        self.bug = bug

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.bug.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = PlantingLoader(self.bug, spec.origin)
        return spec


class Observer:
    """A pytest plugin: what failed first, and why."""

    def __init__(self) -> None:
        self.failed: str | None = None
        self.error: BaseException | None = None

    def pytest_exception_interact(self, node: Any, call: pytest.CallInfo, report: Any) -> None:
        if self.failed is None and call.excinfo is not None:
            self.failed, self.error = node.nodeid, call.excinfo.value

    @pytest.fixture
    def battery_counts(self) -> Counter[str]:
        """Where conftest.py, which has the real one, is not loaded."""
        return Counter()


def run(bug: Bug | None, checks: Checks) -> dict[str, str]:
    """The outcome: "passed", "caught", or "broken" where the failure says nothing about the checks."""
    if bug is not None:
        assert bug.module not in sys.modules
        sys.meta_path.insert(0, PlantingFinder(bug))
        try:
            importlib.import_module(bug.module)
        except Exception as error:
            return {"outcome": "broken", "by": "the import", "error": f"{type(error).__name__}: {error}"}
    observer = Observer()
    # In this process; the warning is of hypothesis, which is loaded already.
    options = "-q -x --tb=no -p no:cacheprovider -p no:xdist -W ignore::pytest.PytestAssertRewriteWarning"
    arguments = [*options.split(), "-m", "not battery", *checks.tests]
    code = pytest.main(arguments if checks.load_torch else ["--noconftest", *arguments], [observer])
    if code == pytest.ExitCode.OK:
        return {"outcome": "passed", "by": "", "error": ""}
    seen = code == pytest.ExitCode.TESTS_FAILED and _says_failure(observer.error)
    return {
        "outcome": "caught" if seen else "broken",
        "by": str(observer.failed),
        "error": f"{type(observer.error).__name__}: {observer.error}"[:300],
    }


def _says_failure(error: BaseException | None) -> bool:
    """Whether a check failed with it; tasks that failed beside each other each with one."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_says_failure, error.exceptions))
    return isinstance(error, FAILURES)


def _run_and_send(bug: Bug | None, checks: Checks, connection: Connection) -> None:
    sys.stdout = sys.stderr  # pytest's report; the outcomes alone stand in stdout
    connection.send(run(bug, checks))


def run_in_a_fork(bug: Bug | None, checks: Checks) -> dict[str, str]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_and_send, args=(bug, checks, sender))
    process.start()
    sender.close()
    try:
        # A second at a time: one in which all processes are stopped for a while is no longer than another.
        if any(receiver.poll(1) for _ in range(MOST_SECONDS)):
            return receiver.recv()
        return {"outcome": "broken", "by": "", "error": f"no end after {MOST_SECONDS} seconds"}
    except EOFError:
        return {"outcome": "broken", "by": "", "error": "the process died"}
    finally:
        process.kill()
        process.join()


def _named(name: str) -> dict[str, Any]:
    """The job of the bug of this name."""
    found = next(((bug, checks) for bug, checks in BUGS.items() if bug.name == name), None)
    if found is None:
        raise SystemExit(f"no bug of tests/battery/planted_bugs.py has the name {name!r}")
    return {"bug": dataclasses.asdict(found[0]), "checks": dataclasses.asdict(found[1])}


def main() -> None:
    sys.dont_write_bytecode = True
    jobs = list(map(_named, sys.argv[1:])) or json.load(sys.stdin)
    # As tests/conftest.py sets it, which comes too late here: threads of small tensors wait for each other.
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    if any(job["checks"]["load_torch"] for job in jobs):
        import torch._dynamo  # noqa: F401
        import transformers  # noqa: F401
    for job in jobs:
        bug = None if job["bug"] is None else Bug(**job["bug"])
        print(json.dumps(run_in_a_fork(bug, Checks(**job["checks"]))), flush=True)


if __name__ == "__main__":
    main()
