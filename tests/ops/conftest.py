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


@pytest.fixture(scope="module")
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen]:
    """The process that interprets, started before anything is compiled so that both run at once."""
    command = [sys.executable, "-m", request.module.__name__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(ids_in_this_run(request, "test_interpreted")) + "\n")
        process.stdin.flush()
        yield process
        process.kill()


@pytest.fixture(scope="module")
def outcomes(child: subprocess.Popen) -> dict[str, str]:
    """The traceback of each function that was interpreted, by its name; "" for none."""
    stdout, stderr = child.communicate()
    assert child.returncode == 0, stderr
    return json.loads(stdout)
