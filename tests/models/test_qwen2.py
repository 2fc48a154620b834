"""Qwen2's windows, which begin at a layer and have a switch."""

from typing import Any

import pytest

from compiled_llm.models.config_file import parse_config
from compiled_llm.models.qwen2 import layers
from tests.families import CONFIGS

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], **CONFIGS["qwen2"][1]}


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, [0, 6]),
        ({"max_window_layers": 0}, [6, 6]),
        ({"use_sliding_window": False}, [0, 0]),
        ({"layer_types": ["sliding_attention", "full_attention"]}, [6, 0]),
    ],
)
def test_windows_of_the_layers(change: dict[str, Any], windows: list[int]) -> None:
    assert [spec.window for spec in layers(parse_config({**QWEN2, **change}))] == windows


def test_heads_may_have_a_size_of_their_own() -> None:
    """Though transformers' class does not name the field, its model looks at it."""
    assert parse_config(QWEN2).head_dim == 24
    assert parse_config({name: value for name, value in QWEN2.items() if name != "head_dim"}).head_dim == 8
