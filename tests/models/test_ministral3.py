"""The scale of Ministral 3's queries, and how its config says it."""

import json
from pathlib import Path

import pytest
import torch

from compiled_llm.models.config_file import parse_config, read_config
from compiled_llm.models.layers.rope import query_scale_table
from tests.families import CONFIGS

MINISTRAL3 = {"architectures": ["Ministral3ForCausalLM"], **CONFIGS["ministral3"][1]}
PARAMETERS = MINISTRAL3["rope_parameters"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_grow_with_each_first_length(dtype: torch.dtype) -> None:
    (rope,) = parse_config(MINISTRAL3).ropes
    table = query_scale_table(rope, 25, torch.zeros(1, dtype=dtype))
    wanted = 1 + 0.8 * torch.tensor([1.0, 2.0, 3.0, 4.0]).log()
    assert (table.dtype, table.shape) == (dtype, (25, 1))
    torch.testing.assert_close(table[:, 0], wanted.repeat_interleave(8)[:25].to(dtype))


def test_a_length_among_the_parameters_says_nothing() -> None:
    assert parse_config({**MINISTRAL3, "rope_parameters": {**PARAMETERS, "max_position_embeddings": 9}}) == (
        parse_config(MINISTRAL3)
    )


@pytest.mark.parametrize("kind", ["ministral3", "mistral"])
def test_of_a_model_with_vision_the_language_model_is_read(kind: str, tmp_path: Path) -> None:
    name = {"ministral3": "Ministral3ForCausalLM", "mistral": "MistralForCausalLM"}[kind]
    text = {**CONFIGS[kind][1], "model_type": kind}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "vision_config": {"model_type": "pixtral"}}))
    with pytest.warns(UserWarning, match="language model"):
        assert read_config(tmp_path) == parse_config({**text, "architectures": [name]})
