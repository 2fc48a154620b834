"""Granite's multipliers have to be numbers that multiply."""

import math

import pytest

from compiled_llm.models.config_file import parse_config
from tests.families import CONFIGS

GRANITE = {"architectures": ["GraniteForCausalLM"], **CONFIGS["granite"][1]}


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize(
    "name", ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"]
)
def test_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(
        ValueError, match=rf"config\.json: {name} must be a positive number, at most 1e6, given {value}"
    ):
        parse_config({**GRANITE, name: value})
