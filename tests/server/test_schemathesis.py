"""schemathesis: bodies that /openapi.json allows and forbids end in no fault, and in answers that it describes.

It has an environment of its own, whose programs are in PATH: ``python -m venv st; st/bin/pip install schemathesis``.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from compiled_llm import CompiledEngine
from tests.server.conftest import SIZES, Running, running_with

PROGRAM = shutil.which("schemathesis")


@pytest.fixture(scope="module")
def short_answers() -> Iterator[Running]:
    """A server whose answers end soon: cases that ask for as many tokens as there are would take most of the time."""
    arguments = {**SIZES, "max_model_len": 64, "enforce_eager": True, "progress": "off", "num_threads": 1}
    with CompiledEngine(**arguments) as engine, running_with(engine) as server:  # type: ignore[arg-type]
        yield server


@pytest.mark.battery
@pytest.mark.skipif(PROGRAM is None, reason="schemathesis is not installed")
@pytest.mark.parametrize("seed", range(5))
def test_no_case_is_a_fault(seed: int, short_answers: Running) -> None:
    """2,000 cases or more, of all routes. Cases that the schemas allow may be refused: fields may contradict others."""
    assert PROGRAM is not None
    flags = ["--max-examples", "200", "--seed", str(seed), "--exclude-checks", "positive_data_acceptance"]
    flags += ["--request-timeout", "300", "--continue-on-failure", "--no-color", "--output-sanitize", "false"]
    done = subprocess.run(
        [PROGRAM, "run", f"{short_answers.url}/openapi.json", *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:]
    found = re.search(r"(\d+) generated, (\d+) found|(\d+) generated, (\d+) passed", done.stdout)
    assert found is not None, done.stdout[-2000:]
    assert int(found[1] or found[3]) >= 2000
