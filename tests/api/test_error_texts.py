"""What error messages show of a value: all of a short one, and not much of a long one, in no time."""

import time
from typing import Any

import pytest

from compiled_llm.api.error_texts import shown


@pytest.mark.parametrize(
    "value", ["x", "a\0b'", 5, -(2**63), 1.5, None, [5, "x"], {"a": (1, 2)}, b"ab", {3}, [], float("nan")]
)
def test_short_values_are_shown_whole(value: Any) -> None:
    assert shown(value) == repr(value)


LONG = {
    "str": "x" * 10**8,
    "bytes": b"x" * 10**8,
    "list": [5] * 10**7,
    "dict": dict.fromkeys(range(10**6)),
    "int": 1 << 10**7,
    "nested": [["x" * 10**7] * 100] * 100,
    "deep": {"a": {"b": {"c": ["y" * 10**6]}}},
}


@pytest.mark.parametrize("name", LONG)
def test_long_values_are_cut_and_cost_nothing(name: str) -> None:
    begun = time.perf_counter()
    text = shown(LONG[name])
    assert len(text) <= 210
    assert time.perf_counter() - begun < 0.5
    if name == "str":
        assert text.startswith("'xxx")
        assert text.endswith("...")
