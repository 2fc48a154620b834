"""Files of every architecture are the model that they were made of, to the bit."""

import dataclasses
from pathlib import Path

import pytest
import torch

from compiled_llm.checkpoint.gguf.architectures import ARCHITECTURES
from compiled_llm.checkpoint.loader import load_weights
from compiled_llm.checkpoint.model_files import model_directory
from compiled_llm.checkpoint.stored_tensors import CheckpointError
from compiled_llm.models.config_file import read_config
from compiled_llm.models.files import read_json
from compiled_llm.models.known_classes import NotKnown
from compiled_llm.models.weights import tensors
from tests.checkpoint.gguf.writing import MODELS, hub_checkpoint, metadata_of, tensors_of, write
from tests.models.test_known_classes import by_table

CPU = torch.device("cpu")
# Whose classes act on a field that a file says or leaves out: transformers is imported at the first start.
ASKED = {"deepseek2", "granitehybrid", "nemotron_h", "nemotron_h_moe", "phi3", "smollm3"}
NOT_SAID = {"dtype", "eos_token_ids", "gguf_layout", "published", "ropes"}  # by a file, or in other words


def test_every_architecture_is_tried() -> None:
    assert {model[0] for model in MODELS.values()} == {*ARCHITECTURES}


@pytest.mark.filterwarnings("ignore:max_model_len=256 is longer than original_max_position_embeddings")
@pytest.mark.filterwarnings("ignore:.*/compiled-llm-test-.*fields that transformers ignores")
@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_model_that_it_was_made_of(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", MODELS[name][0], metadata_of(name), tensors_of(name))
    directory, expected = model_directory(str(path)), read_config(hub_checkpoint(name))
    config = read_config(directory)
    assert "model_type" not in read_json(directory / "config.json")  # see test_its_general_class_would_change_nothing
    for field in dataclasses.fields(expected):
        if field.name not in NOT_SAID:
            assert getattr(config, field.name) == getattr(expected, field.name), field.name
    try:
        assert by_table(read_json(directory / "config.json")) == config
    except NotKnown:
        assert MODELS[name][0] in ASKED
    ours, theirs = (
        [*tensors(load_weights(where, made, torch.float32, CPU))]
        for where, made in ((directory, config), (hub_checkpoint(name), expected))
    )
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5, msg=f"tensor {number} of {len(ours)}")


def test_what_does_not_fit_the_architecture_is_named(tmp_path: Path) -> None:
    metadata, held = metadata_of("qwen3"), tensors_of("qwen3")
    lacking = {name: one for name, one in held.items() if name != "blk.1.ffn_up.weight"}
    path = write(tmp_path / "a.gguf", "qwen3", metadata, {**lacking, "blk.0.spare.weight": torch.zeros(2)})
    with pytest.raises(
        CheckpointError, match=r"lacks: model\.layers\.1\.mlp\.up_proj\.weight; holds besides: blk\.0\.spare"
    ):
        model_directory(str(path))
    with pytest.raises(CheckpointError, match=r"general\.architecture must be one of deepseek2, .*, found 'rwkv7'"):
        model_directory(str(write(tmp_path / "b.gguf", "rwkv7", metadata, held)))
    del metadata["qwen3.block_count"]
    with pytest.raises(CheckpointError, match=r"lack qwen3\.block_count"):
        model_directory(str(write(tmp_path / "c.gguf", "qwen3", metadata, held)))


def test_a_tensor_of_another_size_is_named(tmp_path: Path) -> None:
    """Else the bytes of the tensors behind it would be read."""
    metadata, held = metadata_of("qwen3moe"), tensors_of("qwen3moe")
    for name, changed in (
        ("blk.1.attn_norm.weight", held["blk.1.attn_norm.weight"][:-1]),
        ("blk.0.ffn_up_exps.weight", held["blk.0.ffn_up_exps.weight"][:2]),
        ("blk.0.ffn_gate_exps.weight", torch.cat([held["blk.0.ffn_gate_exps.weight"]] * 2)),
    ):
        path = write(tmp_path / f"{name}.gguf", "qwen3moe", metadata, held | {name: changed})
        with pytest.raises(CheckpointError, match=r"has in another size: model\.layers\.[01]\."):
            model_directory(str(path))


def test_a_fused_tensor_of_another_size_is_named(tmp_path: Path) -> None:
    for name, changed in (("qwen35moe", "blk.0.ffn_gate_up_exps.weight"), ("llama fused", "blk.1.attn_qkv.weight")):
        held = tensors_of(name)
        path = tmp_path / f"{changed}.gguf"
        write(path, MODELS[name][0], metadata_of(name), held | {changed: held[changed][..., :-4, :]})
        with pytest.raises(CheckpointError, match=r"has in another size: model\.layers\.[01]\."):
            model_directory(str(path))


def test_a_state_that_cannot_decay_is_refused(tmp_path: Path) -> None:
    """The logarithm of what is kept as a negative number."""
    held = tensors_of("qwen35")
    path = write(tmp_path / "model.gguf", "qwen35", metadata_of("qwen35"), held | {"blk.0.ssm_a": -held["blk.0.ssm_a"]})
    directory = model_directory(str(path))
    with pytest.raises(CheckpointError, match=r"A_log holds NaN or infinite values: the file is damaged"):
        load_weights(directory, read_config(directory), torch.float32, CPU)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen3", "block_count", "two"),
        ("qwen3", "attention.head_count", [4, 4]),
        ("qwen3", "attention.head_count", 0),
        ("qwen3", "rope.freq_base", "x"),
        ("qwen35", "ssm.time_step_rank", 0),
        ("qwen35", "ssm.inner_size", 96),
        ("nemotron_h", "feed_forward_length", [0, 160]),
        ("granitehybrid", "attention.head_count_kv", 2),
        ("deepseek2", "attention.key_length_mla", 8),
        ("gpt-oss", "expert_count", 4),
    ],
)
def test_metadata_that_no_model_has(name: str, key: str, value: object, tmp_path: Path) -> None:
    metadata = metadata_of(name) | {f"{name}.{key}": value}
    path = write(tmp_path / "model.gguf", name, metadata, tensors_of(name))
    with pytest.raises(CheckpointError, match=r"model\.gguf: "):
        model_directory(str(path))


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen35"])
def test_more_layers_than_any_model_has(name: str, tmp_path: Path) -> None:
    """Lists of that length are made of them."""
    path = write(tmp_path / "model.gguf", name, metadata_of(name) | {f"{name}.block_count": 2**31}, tensors_of(name))
    with pytest.raises(CheckpointError, match=rf"{name}\.block_count must be at most 1024, found 2147483648: .* again"):
        model_directory(str(path))


def test_an_end_of_text_token_that_is_no_number(tmp_path: Path) -> None:
    metadata = metadata_of("qwen3") | {"tokenizer.ggml.eos_token_id": "x"}
    with pytest.raises(CheckpointError, match=r"model\.gguf: "):
        model_directory(str(write(tmp_path / "model.gguf", "qwen3", metadata, tensors_of("qwen3"))))
