"""Fixtures of the tests of Triton kernels and of C++ kernels."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compiled_llm.ops import native
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


@pytest.fixture(scope="module", autouse=True)
def _asked_to_interpret(request: pytest.FixtureRequest) -> None:
    """The process that interprets has a file's cases before its first test, so that it runs beside the other tests."""
    cases = ids_in_this_run(request, "test_interpreted")
    if cases:
        stdin = request.getfixturevalue("interpreter").stdin
        stdin.write(json.dumps([request.module.__name__, cases]) + "\n")
        stdin.flush()


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, interpreter: subprocess.Popen) -> dict[str, str]:
    """The traceback of each function that was interpreted, by its name; "" for none."""
    assert interpreter.stdout is not None
    for line in interpreter.stdout:
        module, outcomes = json.loads(line)
        if module == request.module.__name__:  # not of a file whose outcomes nobody asked for
            assert "" not in outcomes, outcomes[""]
            return outcomes
    raise AssertionError(f"the process that interprets ended with {interpreter.wait()}")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A test may set the number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> native.Kernels:
    """The C++ kernels of the ``OP`` of a test file."""
    found = native.load(request.module.OP)
    if found is None:
        pytest.skip("needs a C++ compiler")
    return found
