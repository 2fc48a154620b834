"""What a checkpoint suggests for sampling is read as data, and checked like what a user gives."""

import json
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.engine.generation_config import default_sampling_params, listed, suggested_sampling
from compiled_llm.sampling_params import SamplingParams


def suggested(directory: Path, fields: Any) -> dict[str, Any]:
    (directory / "generation_config.json").write_text(json.dumps(fields))
    return suggested_sampling(directory)


def test_a_published_file(tmp_path: Path) -> None:
    """Of Qwen3."""
    fields = {
        "bos_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "pad_token_id": 151643,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "transformers_version": "4.51.0",
    }
    found = suggested(tmp_path, fields)
    assert found == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert default_sampling_params(found) == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert listed(found) == "temperature=0.6, top_p=0.95, top_k=20"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "max_length": 4096, "num_beams": 4}, {}),
        ({"temperature": None, "top_p": None}, {}),
        ({"do_sample": False, "temperature": 0.9}, {"temperature": 0}),
        ({"max_new_tokens": 512, "repetition_penalty": 1.1, "min_p": 0.1}, None),
    ],
)
def test_fields(tmp_path: Path, fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    wanted = {"max_tokens": 512, "repetition_penalty": 1.1, "min_p": 0.1} if expected is None else expected
    assert suggested(tmp_path, fields) == wanted
    assert default_sampling_params(wanted) == SamplingParams(**wanted)


def test_no_file_suggests_nothing(tmp_path: Path) -> None:
    assert suggested_sampling(tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", "hot", "temperature must be a number"),
        ("temperature", -1, "temperature must be a number"),
        ("top_k", 2.5, "top_k must be an integer"),
        ("top_p", 2, "top_p must be a number"),
        ("max_new_tokens", [1], "max_tokens must be an integer"),
    ],
)
def test_bad_values_are_refused_with_the_files_name(tmp_path: Path, name: str, value: Any, message: str) -> None:
    found = suggested(tmp_path, {name: value})
    with pytest.raises(ValueError, match=f"generation_config.json: {message}.*: give sampling_params of your own"):
        default_sampling_params(found)


@pytest.mark.parametrize("text", ["[]", "{", "\x00"])
def test_a_file_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        suggested_sampling(tmp_path)
