"""What Mistral's config says of its window."""

from compiled_llm.models.config_file import parse_config
from compiled_llm.models.mistral import layers
from tests.families import CONFIGS

MISTRAL = {"architectures": ["MistralForCausalLM"], **CONFIGS["mistral"][1]}


def test_a_window_that_is_left_out_is_transformers_default() -> None:
    without = {name: value for name, value in MISTRAL.items() if name != "sliding_window"}
    assert {spec.window for spec in layers(parse_config(without))} == {4096}
    assert {spec.window for spec in layers(parse_config({**MISTRAL, "sliding_window": None}))} == {0}
