"""Whether what a row holds are values of JSON: columns of a table may hold others, and Python reads NaN from JSON."""

import math
from collections.abc import Mapping
from typing import Any

from compiled_llm.api.error_texts import shown

_MOST_DEPTH = 100  # of lists and objects; far below what Python's own functions for JSON can go down


def check_json(name: str, value: Any, depth: int = 0) -> None:
    """``ValueError``, with the place in ``name``, unless ``value`` and all in it are values of JSON."""
    if value is None or isinstance(value, str | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, given {value}")
        return
    if depth >= _MOST_DEPTH:
        raise ValueError(f"{name} must not be more than {_MOST_DEPTH} lists and objects deep")
    if isinstance(value, list):
        for number, item in enumerate(value):
            if not isinstance(item, str | int):  # most are: then no name is made
                check_json(f"{name}[{number}]", item, depth + 1)
    elif isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            check_json(f"{name}.{key:.100}" if name else f"{key:.100}", item, depth + 1)
    else:
        raise ValueError(
            f"{name} must be a value of JSON (a string, a number, true, false, null, a list or an object), given "
            f"{type(value).__name__}: {shown(value)}"
        )
