"""Fixtures of the tests that Triton's interpreter runs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drawn import ids_in_this_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def interpreter() -> Iterator[subprocess.Popen]:
    """The process that forks the processes that interpret."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.ops.interpreted"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def child(request: pytest.FixtureRequest, interpreter: subprocess.Popen) -> subprocess.Popen:
    """What interprets, asked for this file's cases before anything is compiled so that both run at once."""
    assert interpreter.stdin is not None
    cases = ids_in_this_run(request, "test_interpreted")
    interpreter.stdin.write(json.dumps([request.module.__name__, cases]) + "\n")
    interpreter.stdin.flush()
    return interpreter


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, child: subprocess.Popen) -> dict[str, str]:
    """The traceback of each function that was interpreted, by its name; "" for none."""
    assert child.stdout is not None
    for line in child.stdout:
        module, outcomes = json.loads(line)
        if module == request.module.__name__:  # not of a file whose outcomes nobody asked for
            assert "" not in outcomes, outcomes[""]
            return outcomes
    raise AssertionError(f"the process that interprets ended with {child.wait()}")
