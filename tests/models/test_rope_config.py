"""Rotary embeddings in a ``config.json``: whatever stands there is read or refused, and never crashes."""

import math
from typing import Any

import pytest

from compiled_llm.models.config_file import parse_config
from compiled_llm.models.rope_config import Rope, YarnRopeScaling
from tests.families import CONFIGS

LLAMA = {"architectures": ["LlamaForCausalLM"], **CONFIGS["llama"][1]}
LONG = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "yarn": {
        "factor": 2.0, "original_max_position_embeddings": 64, "attention_factor": 1.1, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": False,
    },
    "longrope": {**LONG, "factor": 2.0, "attention_factor": 1.1},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
}  # fmt: skip


def rope_of(**fields: Any) -> Rope:
    """That of Llama with other fields."""
    (rope,) = parse_config({**LLAMA, "max_position_embeddings": 256, **fields}).ropes
    return rope


BAD: list[Any] = [0, -1.0, 1e300, 10**400, math.nan, math.inf, "2", [], [2.0], {}, {"factor": 2.0}, True]


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind, fields in KINDS.items() for field in fields])
def test_each_field_is_checked(kind: str, field: str) -> None:
    good = {"rope_type": kind, **KINDS[kind]}
    assert parse_config({**LLAMA, "rope_parameters": good})
    for value in BAD:
        if field == "truncate" and value is True:
            continue
        with pytest.raises(ValueError, match=rf"config\.json: .*({field} must|high_freq_factor must)"):
            parse_config({**LLAMA, "rope_parameters": {**good, field: value}})
    with pytest.raises(ValueError, match=f"config.json: rope scaling .* is not supported; allowed for .*{kind}"):
        parse_config({**LLAMA, "rope_parameters": {**good, "another": 1.0}})


@pytest.mark.parametrize("kind", KINDS)
def test_fields_that_may_be_left_out_may_be_null(kind: str) -> None:
    optional = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"} & {*KINDS[kind]}
    given = {"rope_type": kind, **KINDS[kind]}
    without = {name: value for name, value in given.items() if name not in optional}
    null = {**given, **dict.fromkeys(optional)}
    assert rope_of(rope_parameters=null) == rope_of(rope_parameters=without)


def test_where_the_first_length_may_stand() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0}
    for config, length in [
        ({"rope_parameters": {**rope, "original_max_position_embeddings": 64}}, 64),
        ({"rope_parameters": rope, "original_max_position_embeddings": 32}, 32),
        ({"rope_parameters": rope, "max_position_embeddings": 128}, 128),
    ]:
        scaling = rope_of(**config).scaling
        assert isinstance(scaling, YarnRopeScaling)
        assert scaling.original_max_position_embeddings == length


def test_a_kind_that_only_long_texts_know_is_no_scaling() -> None:
    assert rope_of(rope_scaling={"type": "dynamic", "factor": 2.0}) == rope_of()
