"""Functions that Triton's interpreter runs, in a process of a test file's own.

Triton decides when it is imported whether it interprets. So a program of its own (``conftest.py`` starts it) imports
torch and Triton once, and forks for each test file that it is asked for. A file has its cases in the dictionary
``INTERPRETED``, from names to functions that take nothing, and ends with a call of ``each_of``.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.drawn import marked
from tests.ops.quick_interpreter import make_quick

Cases = Mapping[str, Callable[[], object]]


def each_of(cases: Cases, ordinary: Collection[str] | None = None) -> Callable[[str, dict[str, str]], None]:
    """A test of each case; the battery has those that are not ``ordinary``, if that is given."""

    @pytest.mark.parametrize("name", marked(cases, cases if ordinary is None else ordinary))
    def test_interpreted(name: str, outcomes: dict[str, str]) -> None:
        assert not outcomes[name], outcomes[name]

    return test_interpreted


def sums_without_an_order() -> None:
    """Have ``tl.dot`` add up in float64, where the sums of products of 16-bit numbers are exact.

    It is numpy's matrix product, whose order of summation depends on the place of a row, on some CPUs.
    """
    dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if not np.issubdtype(d.data.dtype, np.floating):
            return dot(builder, a, b, d, *options)
        start = interpreter.TensorHandle(d.data.astype(np.float64), tl.float64)
        sums = dot(builder, a, b, start, *options)
        return interpreter.TensorHandle(sums.data.astype(d.data.dtype), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def outcome(case: Callable[[], object]) -> str:
    """The traceback of a case; "" for none."""
    torch.manual_seed(0)
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return ""


def outcomes_of(module: str, names: list[str]) -> dict[str, str]:
    torch.set_num_threads(1)
    sums_without_an_order()
    make_quick()
    cases: Cases = importlib.import_module(module).INTERPRETED
    return {name: outcome(cases[name]) for name in names}


def serve() -> None:
    """Run the cases that stdin names: a line is [module, [name of a case, ...]] in JSON.

    Prints [module, {name: outcome}] for each; ``{"": traceback}`` where the file itself failed.
    """
    for line in sys.stdin:
        module, names = json.loads(line)
        process = os.fork()
        if process == 0:
            try:
                answer = outcomes_of(module, names)
            except BaseException:
                answer = {"": traceback.format_exc()}
            print(json.dumps([module, answer]), flush=True)
            os._exit(0)
        if status := os.waitpid(process, 0)[1]:
            print(json.dumps([module, {"": f"the process ended with {os.waitstatus_to_exitcode(status)}"}]), flush=True)


if __name__ == "__main__":
    serve()
