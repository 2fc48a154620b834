"""ModelConfig: every field of config.json is used, known to have no effect, or refused by name."""

import json
from pathlib import Path

import pytest

from compiled_llm.models.config import ModelConfig

GOOD = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_fields_and_defaults() -> None:
    config = ModelConfig.from_dict({**GOOD, "rope_theta": 5e5, "rope_scaling": LLAMA3}, {"eos_token_id": [5, 3]})
    assert (config.head_dim, config.num_layers, config.rope_theta) == (16, 2, 5e5)
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 8.0
    assert config.eos_token_ids == (3, 5)
    assert config.dtype == "bfloat16"


def test_the_two_ways_to_write_rope_are_one() -> None:
    old = ModelConfig.from_dict({**GOOD, "rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = ModelConfig.from_dict({**GOOD, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}})
    assert old == new


def test_qwen3_head_dim_comes_from_its_own_defaults() -> None:
    assert ModelConfig.from_dict({**GOOD, "architectures": ["Qwen3ForCausalLM"]}).head_dim == 128


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": []}, ["architectures"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"layer_types": ["sliding_attention", "full_attention"]}, ["layer_types"]),
        ({"use_sliding_window": True, "sliding_window": 4}, ["sliding_window"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "llama3"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, ["low_freq_factor"]),
        ({"rope_scaling": {**LLAMA3, "factor": -1.0}}, ["factor"]),
        ({"rope_scaling": {**LLAMA3, "factor": "8"}, "rope_parameters": {"rope_theta": 5.0}}, ["contradict"]),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5.0}}, ["rope_theta"]),
        ({"rope_theta": float("inf")}, ["rope_theta"]),
        ({"architectures": [["x"]]}, ["architectures"]),
        ({"layer_types": [[]]}, ["layer_types"]),
        ({"num_hidden_layers": 2**30}, ["num_hidden_layers"]),
        ({"rope_theta": "big"}, ["rope_theta"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads"]),
        ({"num_hidden_layers": 0}, ["num_layers"]),
        ({"vocab_size": -5}, ["vocab_size"]),
        ({"vocab_size": "many"}, ["vocab_size"]),
        ({"dtype": "float8"}, ["dtype", "float8"]),
        ({"eos_token_id": "end"}, ["eos_token_id"]),
    ],
)
def test_refused_by_name(change: dict, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"config\.json|architecture|eos_token_id") as error:
        ModelConfig.from_dict({**GOOD, **change})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", '{"a": ', "\x00", "[" * 100_000])
def test_unreadable_json_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelConfig.from_directory(tmp_path)


def test_missing_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        ModelConfig.from_directory(tmp_path)


def test_auto_map_is_never_followed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GOOD, "auto_map": {"AutoModelForCausalLM": "evil.Evil"}}))
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')")
    assert ModelConfig.from_directory(tmp_path).architecture == "LlamaForCausalLM"
