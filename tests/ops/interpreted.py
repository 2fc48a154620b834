"""Functions that Triton's interpreter runs, in a process of a test file's own.

As a program (``conftest.py`` starts it) it imports torch and Triton once, and forks for each test file that it is asked
to run.
"""

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


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


def language_put_in_place_once() -> None:
    """Have the interpreter put its own functions in the place of Triton's language once for each module.

    It would do so at each launch and at each call of a function, which takes a third of the time. Nothing in this
    process needs the language as it was.
    """
    put_in_place = interpreter._patch_lang
    modules: set[str] = set()

    def once(function: Callable) -> interpreter._LangPatchScope:
        if function.__module__ not in modules:
            modules.add(function.__module__)
            put_in_place(function)
        return interpreter._LangPatchScope()  # nothing to take back

    interpreter._patch_lang = once


def run(cases: Mapping[str, Callable[[], object] | tuple[Callable, tuple | dict]]) -> None:
    """Run those that stdin names, a JSON list in one line; print the traceback of each by its name, "" for none.

    A case is a function, or a function and its arguments.
    """

    def outcome(case: Callable[[], object] | tuple[Callable, tuple | dict]) -> str:
        function, given = case if isinstance(case, tuple) else (case, ())
        try:
            function(**given) if isinstance(given, dict) else function(*given)
        except Exception:
            return traceback.format_exc()
        return ""

    torch.set_num_threads(1)
    sums_without_an_order()
    language_put_in_place_once()
    names = json.loads(sys.stdin.readline())
    print(json.dumps({name: outcome(cases[name]) for name in names}))


def serve() -> None:
    """Run the test files that stdin names as programs: a line is [module, [name of a case, ...]] in JSON.

    Prints [module, what ``run`` printed] for each; the traceback as ``{"": traceback}`` where the file itself failed.
    """
    for line in sys.stdin:
        module, names = json.loads(line)
        process = os.fork()
        if process == 0:
            try:
                answer = _outcomes_of(module, names)
            except BaseException:
                answer = {"": traceback.format_exc()}
            print(json.dumps([module, answer]), flush=True)
            os._exit(0)
        if status := os.waitpid(process, 0)[1]:
            print(json.dumps([module, {"": f"the process ended with {os.waitstatus_to_exitcode(status)}"}]), flush=True)


def _outcomes_of(module: str, names: list[str]) -> dict[str, str]:
    sys.stdin = io.StringIO(json.dumps(names) + "\n")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return json.loads(printed.getvalue())


if __name__ == "__main__":
    serve()
