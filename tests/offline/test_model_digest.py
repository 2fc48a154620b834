"""The digests of a model and a tokenizer change when a tensor, a config or a tokenizer does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.offline.model_digest import model_digest, tokenizer_digest

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))


def change_config(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "rope_theta": 1.0}))


def rename_tensors(directory: Path) -> None:
    """Two tensors of one shape change their names."""
    tensors = load_file(directory / WEIGHTS)
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up], tensors[gate]
    save_file(tensors, directory / WEIGHTS)


@pytest.mark.parametrize("change", [change_config, rename_tensors])
def test_another_model_has_another_digest(model: Path, change: Callable[[Path], None]) -> None:
    before = model_digest(model, "auto")
    assert before == model_digest(DEMO_MODEL, "auto"), "whatever the directory is called"
    change(model)
    assert model_digest(model, "auto") != before


def test_every_tensor_counts(model: Path) -> None:
    """Each is trained a little further by itself."""
    before = model_digest(model, "auto")
    tensors = load_file(model / WEIGHTS)
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor + torch.full_like(tensor, 0.125)}, model / WEIGHTS)
        assert model_digest(model, "auto") != before, name


def test_random_weights_need_no_files(model: Path) -> None:
    before = model_digest(model, "dummy")
    (model / WEIGHTS).unlink()
    assert model_digest(model, "dummy") == before
    with pytest.raises(ValueError, match=r"no \.safetensors file"):
        model_digest(model, "auto")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_every_file_of_a_tokenizer_counts(model: Path, name: str) -> None:
    config = EngineConfig()
    before = tokenizer_digest(config, model)
    with open(model / name, "a") as file:
        file.write(" ")
    assert tokenizer_digest(config, model) != before
    assert tokenizer_digest(EngineConfig(tokenizer=str(DEMO_MODEL)), model) == before
