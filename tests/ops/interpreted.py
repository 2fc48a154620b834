"""Functions that Triton's interpreter runs, in a process of a test file's own: ``conftest.py`` starts it."""

import json
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


def run(functions: Mapping[str, Callable[[], object]]) -> None:
    """Run those that stdin names, a JSON list in one line; print the traceback of each by its name, "" for none."""

    def outcome(function: Callable[[], object]) -> str:
        try:
            function()
        except Exception:
            return traceback.format_exc()
        return ""

    torch.set_num_threads(1)
    sums_without_an_order()
    names = json.loads(sys.stdin.readline())
    print(json.dumps({name: outcome(functions[name]) for name in names}))
