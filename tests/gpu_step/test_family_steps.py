"""Launches of every family's step on a GPU, counted without one: more of them, or others, are a failed test.

What is expected is in ``expected.py``, also what is not as it should be yet.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.families import EVERY_CONFIG
from tests.gpu_step.expected import KNOWN, STEPS, Case

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from compiled_llm.ops.triton_programmatic import wait_for_launches_before  # noqa: E402
from tests.gpu_step.family_steps import too_early  # noqa: E402

# The others: battery. Of the sample, a kernel is compiled.
SAMPLE = ("qwen3, programmatic",)

Step = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def step() -> Iterator[Step]:
    """What the program ``family_steps.py`` says of a case of ``STEPS``, so many of its kernels compiled.

    It answers one by one, so that those are computed that were asked for, and torch is imported once for all.
    """
    processes: dict[str, subprocess.Popen[str]] = {}

    def ask(name: str, gpu: str = "h100", num_compiled: int = 1000) -> dict[str, Any]:
        if gpu not in processes:
            processes[gpu] = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu_step.family_steps", gpu],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_ENABLE_PDL": "1"},  # must be without effect
            )
        process, case = processes[gpu], STEPS[name]
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps([case.family, case.bucket, case.arguments, num_compiled]), file=process.stdin, flush=True)
        found = process.stdout.readline()
        if not found:
            del processes[gpu]  # the next case gets another one
            raise AssertionError(f"{name}: the process ended with status {process.wait()}")
        answer: dict[str, Any] = json.loads(found)
        return answer

    yield ask
    for process in processes.values():
        process.communicate()


def check(case: Case, name: str, found: dict[str, Any]) -> None:
    layers = [len(layer) for layer in found["layers"]]
    assert layers == list(case.launches_per_layer), f"{name}: launches from layer to layer are {found['layers']}"
    around = len(found["before"]), len(found["after"])
    assert around == case.around, f"{name}: launches around the layers are {found['before']} and {found['after']}"
    known = KNOWN.get(name, {})
    for what in ("copies", "addmm_with_matrix", "dynamic_inputs", "skip_reasons", "spilled"):
        given = found[what]
        number = given if isinstance(given, int) else len(given)
        assert number == known.get(what, 0), f"{name}: {what}: {given}; expected.py knows of {known.get(what, 0)}"
    assert found["compiled"], f"{name}: no kernel was compiled"
    assert len(found["programmatic"]) == case.programmatic, f"{name}: {found['programmatic']}"
    assert not found["too_early"], f"{name}: does this before it waits: {found['too_early']}"
    assert not found["behind_programmatic"], f"{name}: {found['behind_programmatic']}"
    assert bool(found["before_attention"]) == ("a request alone, " in name and case.programmatic > 0), name
    # A product of queries, keys and values, or a gather of cosines: attention reads neither before it waits.
    others = {*found["before_attention"]} - {"exact_linear_kernel", "keep_rows_kernel"}
    assert not others, f"{name}: {others} may still run when attention reads what they write"
    assert found["of_the_compiler"] == 0, f"{name}: kernels of Inductor's may start early too"


@triton.jit
def _waiting_kernel(x, out, LOADS: tl.constexpr, WAITS: tl.constexpr, SOME: tl.constexpr):
    """LOADS before it WAITS; SOME: only some programs wait."""
    place = tl.program_id(0)
    value = place
    if LOADS:
        value = tl.load(x + place)
    if WAITS:
        if SOME:
            if place > 0:
                wait_for_launches_before()
        else:
            wait_for_launches_before()
    tl.store(out + place, value + tl.load(x))


@pytest.mark.parametrize(
    ("loads", "waits", "some", "found"),
    [
        (False, True, False, []),
        (True, True, False, ["LDG"]),
        (False, False, False, ["it never waits"]),
        (False, True, True, ["BRA"]),  # some programs jump over it
    ],
)
def test_what_comes_too_early_is_seen(loads: bool, waits: bool, some: bool, found: list[str]) -> None:
    constants = {"LOADS": loads, "WAITS": waits, "SOME": some}
    signature = {"x": "*i32", "out": "*i32"} | dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(_waiting_kernel, signature, constants)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    assert [instruction.split(".")[0] for instruction in too_early(binary.asm["cubin"])] == found


def test_every_family_is_expected() -> None:
    assert {case.family for case in STEPS.values()} == set(EVERY_CONFIG)
    assert KNOWN.keys() <= STEPS.keys()


@pytest.mark.parametrize("name", SAMPLE)
def test_a_step_launches_what_is_expected(name: str, step: Step) -> None:
    check(STEPS[name], name, step(name, num_compiled=1))


@pytest.mark.battery
@pytest.mark.parametrize("name", [name for name in STEPS if name not in SAMPLE])
def test_every_step_launches_what_is_expected(name: str, step: Step) -> None:
    check(STEPS[name], name, step(name))


PROGRAMMATIC_STEPS = tuple(name for name, case in STEPS.items() if case.programmatic)


@pytest.mark.battery
@pytest.mark.parametrize("name", PROGRAMMATIC_STEPS)
def test_a_b200_waits_likewise(name: str, step: Step) -> None:
    """Before that its kernels ask for memory of the matrix units, with branches and atomics in shared memory."""
    found = step(name, "b200")
    assert found["programmatic"]
    early = {instruction.split(".")[0] for names in found["too_early"].values() for instruction in names}
    assert early <= {"BRA"}, found["too_early"]
    assert not found["behind_programmatic"], found["behind_programmatic"]
