"""What a checkpoint suggests for sampling is read as data, and checked like what a user gives."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from compiled_llm.api.config import EngineConfig
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.checkpoint.generation_config import (
    _NO_EFFECT,
    _OFF,
    _PARAMETERS,
    default_sampling_params,
    listed,
    suggested_sampling,
    warn_of_unserved,
)
from compiled_llm.offline.serving import run_sampling


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
        ({"min_new_tokens": 3, "stop_strings": ["a", "b"]}, {"min_tokens": 3, "stop": ["a", "b"]}),
        ({"min_new_tokens": 0, "stop_strings": [], "num_return_sequences": 1, "sequence_bias": []}, {}),
        ({"stop_strings": "a", "num_return_sequences": 3}, {"stop": "a", "n": 3}),
        ({"do_sample": False, "num_return_sequences": 3, "num_beams": 3}, {"temperature": 0}),
        ({"sequence_bias": [[[5], -2.5], [[6], 100]]}, {"logit_bias": {5: -2.5, 6: 100}}),
        ({"temperature": None, "top_p": None}, {}),
        ({"do_sample": False, "temperature": 0.9}, {"temperature": 0}),
        ({"max_new_tokens": 512, "repetition_penalty": 1.1, "min_p": 0.1}, None),
    ],
)
def test_fields(tmp_path: Path, fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    wanted = {"max_tokens": 512, "repetition_penalty": 1.1, "min_p": 0.1} if expected is None else expected
    assert suggested(tmp_path, fields) == wanted
    assert default_sampling_params(wanted) == SamplingParams(**wanted)


def test_min_new_tokens_alone_leaves_room_for_as_many(tmp_path: Path) -> None:
    assert default_sampling_params(suggested(tmp_path, {"min_new_tokens": 50})).max_tokens == 50
    assert default_sampling_params(suggested(tmp_path, {"min_new_tokens": 5})) == SamplingParams(min_tokens=5)
    arguments, text = run_sampling(EngineConfig(model=str(tmp_path)), {"temperature": 0})
    assert arguments == {"max_tokens": 64, "temperature": 0, "min_tokens": 5}
    assert text == "max_tokens=64, temperature=0; by generation_config.json: min_tokens=5"


# -- What is not served


def left(directory: Path, fields: Any, max_model_len: int = 1024) -> str:
    """What is named of the file; empty if nothing is."""
    (directory / "generation_config.json").write_text(json.dumps(fields))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_unserved(directory, max_model_len)
    assert len(caught) <= 1
    if not caught:
        return ""
    before, _, named = str(caught[0].message).partition(" are ignored: ")
    assert before == f"{directory / 'generation_config.json'}: fields for which there is no sampling parameter"
    return named


UNSERVED = {
    "bad_words_ids": [[5, 6]],
    "begin_suppress_tokens": [220],
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.2,
    "epsilon_cutoff": 3e-4,
    "eta_cutoff": 3e-4,
    "exponential_decay_length_penalty": [5, 1.1],
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "guidance_scale": 1.5,
    "max_length": 512,
    "max_time": 2.5,
    "min_length": 5,
    "no_repeat_ngram_size": 3,
    "num_beams": 4,
    "penalty_alpha": 0.6,
    "sequence_bias": [[[5, 6], -2.5]],
    "suppress_tokens": [1, 2],
    "token_healing": True,
    "top_h": 0.4,
    "typical_p": 0.9,
    "watermarking_config": {"bias": 2.0},
    "chat_format": "chatml",  # that transformers does not know
}


def test_what_is_not_served_is_named_in_one_line(tmp_path: Path) -> None:
    for name, value in UNSERVED.items():
        assert left(tmp_path, {name: value, "temperature": 0.5, "use_cache": True}) == f"{name}={value!r}"
    assert left(tmp_path, UNSERVED) == listed(UNSERVED)
    assert left(tmp_path, {"max_length": 512}, max_model_len=512) == "", "no text is longer"
    assert left(tmp_path, {"sequence_bias": [[[5], 101]]}) == "sequence_bias=[[[5], 101]]"


def test_what_asks_for_nothing_is_not_named(tmp_path: Path) -> None:
    assert left(tmp_path, dict.fromkeys(UNSERVED)) == ""
    assert left(tmp_path, GenerationConfig._get_default_generation_params()) == ""
    assert left(tmp_path, {"num_return_sequences": 3, "stop_strings": "a", "sequence_bias": [[[5], 2]]}) == ""


def test_every_field_of_transformers_is_known() -> None:
    """A field of a later transformers is decided upon here."""
    assert GenerationConfig().__dict__.keys() == _PARAMETERS.keys() | _NO_EFFECT | {
        *(UNSERVED.keys() - {"chat_format"}),
        *("constraints", "dola_layers", "force_words_ids"),  # not served, either
    }
    assert not _NO_EFFECT & (_PARAMETERS.keys() | _OFF.keys())


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
