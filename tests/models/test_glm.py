"""What GLM-4 alone has: the share of a head that is turned, in either place of ``config.json``."""

from typing import Any

import pytest

from compiled_llm.models.config_file import parse_config
from tests.families import CONFIGS

GLM4 = {"architectures": ["Glm4ForCausalLM"], **CONFIGS["glm4"][1]}


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ({}, 0.5),
        ({"partial_rotary_factor": 0.25}, 0.25),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}, 1.0),
    ],
)
def test_the_share_of_a_head_that_is_turned(fields: dict[str, Any], share: float) -> None:
    (rope,) = parse_config({**GLM4, **fields}).ropes
    assert (rope.partial, rope.interleaved) == (share, True)
