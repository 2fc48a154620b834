"""Checkpoints in both layouts that transformers writes, in one file and in several: all are the same model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiled_llm.checkpoint.loader import load_weights
from compiled_llm.checkpoint.quantization import published
from compiled_llm.checkpoint.stored_layout import by_family_names, parts_of
from compiled_llm.checkpoint.stored_tensors import CheckpointError
from compiled_llm.models.config_file import read_config
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.weights import tensors
from tests.families import EVERY_CONFIG, checkpoint, transformers_model

CPU = torch.device("cpu")
# Names that transformers' own modules have differ from those of published checkpoints. That the ones of ``checkpoint``
# give transformers' logits is shown in tests/models/test_forward.py.
ORDINARY = [name for name in EVERY_CONFIG if "moe" in name]
ORDINARY += ["mixtral", "gpt-oss", "qwen3-next", "mistral4", "gpt-neox", "gpt-neox-in-turn"]
LAYOUTS = {
    "modules, in shards": {"save_original_format": False, "max_shard_size": "150KB"},
    "modules": {"save_original_format": False},
    "in shards": {"max_shard_size": "150KB"},
}
CASES = [(name, layout) for layout in LAYOUTS for name in EVERY_CONFIG]


def loaded(directory: Path) -> list[Tensor]:
    return tensors(load_weights(directory, read_config(directory), torch.float32, CPU, Dense))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(*case, marks=() if case[0] in ORDINARY and "modules, in" in case[1] else pytest.mark.battery)
        for case in CASES
    ],
)
def test_every_layout_of_transformers_is_the_same_model(name: str, layout: str, tmp_path: Path) -> None:
    transformers_model(name).save_pretrained(tmp_path, **LAYOUTS[layout])
    assert (len([*tmp_path.glob("*.safetensors")]) > 1) == layout.endswith("in shards")
    for a, b in zip(loaded(tmp_path), loaded(checkpoint(name)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["gemma4-moe", "mistral4"])
def test_experts_that_transformers_writes_in_one_tensor_may_be_one_by_one(name: str, tmp_path: Path) -> None:
    """As quantisers and trainers that know single experts write them."""
    (tmp_path / "config.json").write_bytes((checkpoint(name) / "config.json").read_bytes())
    stored, one_by_one = load_file(checkpoint(name) / "model.safetensors"), {}
    for tensor_name, tensor in stored.items():
        base, _, last = tensor_name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj") or tensor.dim() != 3:
            one_by_one[tensor_name] = tensor
            continue
        names = ["gate_proj", "up_proj"] if last == "gate_up_proj" else ["down_proj"]
        for expert, matrix in enumerate(tensor):
            for part_name, part in zip(names, matrix.chunk(len(names)), strict=True):
                one_by_one[f"{base}.{expert}.{part_name}.weight"] = part.clone()
    assert len(one_by_one) > len(stored)
    save_file(one_by_one, tmp_path / "model.safetensors")
    for a, b in zip(loaded(tmp_path), loaded(checkpoint(name)), strict=True):
        assert torch.equal(a, b)


def as_modules(tmp_path: Path) -> dict[str, Tensor]:
    transformers_model("qwen3-moe").save_pretrained(tmp_path, save_original_format=False)
    return load_file(tmp_path / "model.safetensors")


def test_experts_of_another_shape_are_named(tmp_path: Path) -> None:
    stored = as_modules(tmp_path)
    name = "model.layers.2.mlp.experts.gate_up_proj"
    stored[name] = stored[name].transpose(1, 2).contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        loaded(tmp_path)
    assert f"{name} (model.safetensors) is (7, 112, 144), config.json implies (7, 144, 112)" in str(error.value)
    assert "missing" not in str(error.value)


def test_experts_that_are_there_twice_are_named(tmp_path: Path) -> None:
    stored = as_modules(tmp_path)
    name = "model.layers.2.mlp.experts.0.gate_proj.weight"
    save_file(stored | {name: torch.ones(72, 112)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"not part of .*model\.layers\.2\.mlp\.experts\.gate_up_proj"):
        loaded(tmp_path)


def test_quantised_experts_in_one_tensor_are_named(tmp_path: Path) -> None:
    """What is plain where the config says that it is quantised is not read as if it were."""
    as_modules(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = read_config(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"experts\.gate_up_proj .* holds the weights of all experts, which config"
    ):
        load_weights(tmp_path, config, torch.float32, CPU, published(config, Dense))


# -- Names


NAMES = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
# As checkpoints of models around a language model, and of its body alone, have them.
WAYS = {
    "its own": lambda name: name,
    "whole in another": lambda name: f"language_model.{name}",
    "body in another's": lambda name: name.replace("model.", "model.language_model."),
    "body as text model": lambda name: name.replace("model.", "model.text_model."),
    "body alone": lambda name: name.removeprefix("model."),
    "body alone in another": lambda name: name.replace("model.", "language_model."),
}


@pytest.mark.parametrize("way", WAYS)
def test_names_of_other_models(way: str) -> None:
    stored = {WAYS[way](name): number for number, name in enumerate(NAMES)} | {"visual.layers.0.weight": 9}
    found = by_family_names(stored, NAMES)
    assert found == {**{name: number for number, name in enumerate(NAMES)}, "visual.layers.0.weight": 9}


def test_a_head_may_stay_under_its_own_name() -> None:
    stored = {f"language_model.{name}": name for name in NAMES[:-1]} | {"lm_head.weight": "lm_head.weight"}
    assert by_family_names(stored, NAMES) == {name: name for name in NAMES}


def test_other_roots() -> None:
    names = ["transformer.wte.weight", "transformer.h.0.ln_1.weight", "transformer.h.1.ln_1.weight"]
    stored = {name.removeprefix("transformer."): name for name in names}
    assert by_family_names(stored, names) == {name: name for name in names}


def test_a_body_as_transformers_names_it() -> None:
    names = ["backbone.embeddings.weight", "backbone.layers.0.norm.weight", "lm_head.weight"]
    stored = {name.replace("backbone.", "model."): name for name in names}
    assert by_family_names(stored, names) == {name: name for name in names}


def test_nothing_is_renamed_where_nothing_fits() -> None:
    assert by_family_names({"a": 1, "b.0.c": 2}, NAMES) == {"a": 1, "b.0.c": 2}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("vision_tower.layers.0.mlp.weight", "vision_tower"),
        ("model.visual.blocks.0.attn.weight", "visual"),
        ("model.multi_modal_projector.linear_1.weight", "multi_modal_projector"),
        ("mtp.layers.0.mlp.up_proj.weight", "mtp"),
        ("model.mtp_layers.0.enorm.weight", "mtp_layers"),
        ("model.layers.2.mlp.up_proj.weight", "model.layers.2"),
        ("model.layers.2.eh_proj.weight", "model.layers.2"),
        ("model.layers.3.mlp.up_proj.weight", None),  # one layer too many, and nothing says what for
        ("model.layers.1.self_attn.q_norm.weight", None),  # a layer that is run
        ("model.layers.1.mlp.visual.weight", None),
        ("model.embed_positions.weight", None),
        (f"model.layers.{'9' * 5000}.eh_proj.weight", None),
    ],
)
def test_parts_that_may_be_left(name: str, part: str | None) -> None:
    extra = ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight", name]
    assert parts_of(extra, 2)[name] == part
