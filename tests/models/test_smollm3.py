"""Which layers of SmolLM3 have positions, and windows."""

import pytest

from compiled_llm.models.config_file import parse_config
from compiled_llm.models.smollm3 import layers
from tests.families import CONFIGS

SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], **CONFIGS["smollm3"][1], "num_hidden_layers": 6}
PLAIN = {name: value for name, value in SMOLLM3.items() if name != "no_rope_layers"}


def test_layers_without_positions() -> None:
    assert [spec.rotary for spec in layers(parse_config(PLAIN))] == [True, True, True, False, True, True]
    every_second = layers(parse_config({**PLAIN, "no_rope_layer_interval": 2}))
    assert [spec.rotary for spec in every_second] == [True, False] * 3
    assert [spec.window for spec in every_second] == [0, 6] * 3
    named = layers(parse_config({**PLAIN, "no_rope_layers": [0, 0, 1, 1, 1, 1, 0]}))
    assert [spec.rotary for spec in named] == [False, False, True, True, True, True]


def test_the_base_that_is_left_out() -> None:
    assert parse_config(PLAIN).ropes[0].theta == 2e6


def test_layers_that_are_left_out_are_counted_by_default() -> None:
    without = {name: value for name, value in PLAIN.items() if name != "num_hidden_layers"}
    with pytest.raises(
        ValueError, match=r"config\.json: no_rope_layers must be 0 or 1 for each of num_hidden_layers=36 layers"
    ):
        parse_config({**without, "no_rope_layers": [1, 0]})
