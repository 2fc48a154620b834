"""Models with more than text: their language model's part of ``config.json`` is read as if it stood alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_llm.checkpoint.loader import load_weights
from compiled_llm.models.config_file import parse_config, read_config
from compiled_llm.models.weights import tensors
from tests.families import CONFIGS, checkpoint

TEXT = {**CONFIGS["gemma3"][1], "model_type": "gemma3_text"}
WHOLE: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "eos_token_id": [1, 106],
    "image_token_index": 400,
    "model_type": "gemma3",
    "text_config": {name: value for name, value in TEXT.items() if name not in ("eos_token_id", "tie_word_embeddings")},
    "tie_word_embeddings": False,
    "vision_config": {"hidden_size": 32, "num_hidden_layers": 2},
}


def test_is_the_language_model_alone_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WHOLE))
    with pytest.warns(UserWarning, match="Gemma3ForConditionalGeneration the language model alone is loaded") as warned:
        found = read_config(tmp_path)
    assert len(warned) == 1
    alone = {**TEXT, "architectures": ["Gemma3ForCausalLM"], "dtype": "bfloat16", "eos_token_id": [1, 106]}
    assert found == parse_config(alone)
    assert not found.tie_word_embeddings


def test_its_tensors_are_those_of_the_language_model(tmp_path: Path) -> None:
    stored = load_file(checkpoint("gemma3") / "model.safetensors")
    whole = {f"language_model.{name}": tensor for name, tensor in stored.items()}
    save_file(whole | {"vision_tower.embeddings.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(WHOLE))
    config = parse_config(WHOLE)
    with pytest.warns(UserWarning, match="vision_tower"):
        found = load_weights(tmp_path, config, torch.float32, torch.device("cpu"))
    alone = load_weights(checkpoint("gemma3"), config, torch.float32, torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(tensors(found), tensors(alone), strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text_config": None}, "text_config must be an object"),
        ({"text_config": {**TEXT, "model_type": "llama"}}, "model_type of text_config must be gemma3_text .*'llama'"),
        ({"text_config": {**TEXT, "tie_word_embeddings": True}}, "tie_word_embeddings of text_config contradicts"),
        ({"text_config": {**TEXT, "model_type": []}}, "model_type of text_config must be"),
        ({"text_config": {**TEXT, "tie_word_embeddings": []}}, "tie_word_embeddings of text_config contradicts"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "LlavaForConditionalGeneration.* is not supported"),
    ],
)
def test_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"config.json: .*{words}"):
        parse_config({**WHOLE, **change})
