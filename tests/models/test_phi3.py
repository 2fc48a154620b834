"""Kinds of rotary embeddings that Phi-3's configs name, and the length they begin with."""

from typing import Any

import pytest

from compiled_llm.models.config_file import parse_config
from compiled_llm.models.rope_config import LongRopeScaling
from tests.families import CONFIGS

PHI3 = {"architectures": ["Phi3ForCausalLM"], **CONFIGS["phi3"][1]}
PARAMETERS = PHI3["rope_parameters"]


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_the_names_of_longrope(name: str, kind: str) -> None:
    given = {**{key: value for key, value in PARAMETERS.items() if key != "rope_type"}, name: kind}
    (rope,) = parse_config({**PHI3, "rope_parameters": given}).ropes
    assert isinstance(rope.scaling, LongRopeScaling)
    assert (rope.partial, rope.scaling.original_max_position_embeddings) == (0.75, 256)


def test_the_first_length_that_is_left_out_is_transformers_default() -> None:
    longer = {name: value for name, value in PHI3.items() if name != "original_max_position_embeddings"}
    (rope,) = parse_config({**longer, "max_position_embeddings": 8192}).ropes
    assert isinstance(rope.scaling, LongRopeScaling)
    assert rope.scaling.original_max_position_embeddings == 4096


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type must be 'default' or 'longrope'"),
        ({"rope_parameters": {**PARAMETERS, "rope_type": ["su"]}}, "rope_type must be 'default' or 'longrope'"),
        ({"rope_parameters": {**PARAMETERS, "long_factor": [1.0]}}, "long_factor must have a number for each of the 6"),
        (
            {"rope_parameters": {**PARAMETERS, "original_max_position_embeddings": 64}},
            "original_max_position_embeddings is both 256 and 64",
        ),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be a number above 0, at most 1"),
        ({"partial_rotary_factor": 0.7}, "partial_rotary_factor must turn an even number"),
    ],
)
def test_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"config.json: .*{words}"):
        parse_config({**PHI3, **change})
