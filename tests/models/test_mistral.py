"""What Mistral's config says of its window."""

import pytest

from compiled_llm.models.config_file import parse_config
from compiled_llm.models.mistral import layers
from tests.families import CONFIGS

MISTRAL = {"architectures": ["MistralForCausalLM"], **CONFIGS["mistral"][1]}


def test_a_window_that_is_left_out_is_transformers_default() -> None:
    without = {name: value for name, value in MISTRAL.items() if name != "sliding_window"}
    assert {spec.window for spec in layers(parse_config(without))} == {4096}
    assert {spec.window for spec in layers(parse_config({**MISTRAL, "sliding_window": None}))} == {0}


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_without_a_key_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match=f"config.json: sliding_window must be at least 1, given {window}"):
        parse_config({**MISTRAL, "sliding_window": window})
