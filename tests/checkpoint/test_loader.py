"""The loader accounts for every tensor, and reads nothing but safetensors beside the index."""

import contextlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from compiled_llm.checkpoint import loader
from compiled_llm.checkpoint import stored_tensors as checkpoint_files
from compiled_llm.checkpoint.stored_tensors import CheckpointError
from compiled_llm.models.config_file import read_config
from compiled_llm.models.linears.packed import Packed
from tests.families import checkpoint, transformers_model

CPU = torch.device("cpu")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    return tmp_path


def load(directory: Path):
    return loader.load_weights(directory, read_config(directory), torch.float32, CPU)


def change(directory: Path, edit) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_sharded_equals_whole(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    sharded = tmp_path_factory.mktemp("sharded")
    transformers_model("llama").save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    one, other = load(directory), load(sharded)
    for a, b in zip(one.layers, other.layers, strict=True):
        assert torch.equal(a.attention.qkv.weight, b.attention.qkv.weight)
        assert torch.equal(a.mlp.down.weight, b.mlp.down.weight)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists a process's maps")
def test_nothing_of_the_file_stays_mapped_once_matrices_are_converted(directory: Path) -> None:
    change(directory, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    config = read_config(directory)
    layers = loader.load_weights(directory, config, torch.bfloat16, CPU, Packed).layers
    assert layers[0].mlp_norm.dtype == torch.bfloat16
    assert str(directory) not in Path("/proc/self/maps").read_text()


def test_missing_extra_and_misshaped_tensors_are_all_listed(directory: Path) -> None:
    def edit(tensors: dict) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(4)
        tensors["model.norm.weight"] = torch.ones(5)
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(torch.int8)

    change(directory, edit)
    with pytest.raises(CheckpointError) as error:
        load(directory)
    for words in ("missing: model.layers.1.mlp.up_proj", "self_attn.q_norm.weight (model.safetensors)", "(5,)", "I8"):
        assert words in str(error.value)


def test_tied_head_may_stand_twice_if_it_is_the_same(tmp_path: Path) -> None:
    shutil.copytree(checkpoint("qwen3"), tmp_path, dirs_exist_ok=True)
    change(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    weights = load(tmp_path)
    assert weights.head is weights.embedding
    change(tmp_path, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(CheckpointError, match="tied"):
        load(tmp_path)


def test_a_tied_head_is_compared_piece_by_piece(tmp_path: Path) -> None:
    shutil.copytree(checkpoint("qwen3"), tmp_path, dirs_exist_ok=True)
    rows = torch.randn(5000, 112)
    save_file(
        {"a": rows, "b": rows.clone(), "c": rows + (torch.arange(5000) == 4999)[:, None]}, tmp_path / "x.safetensors"
    )
    stored = checkpoint_files.stored_tensors(tmp_path / "x.safetensors")
    assert stored["a"].nbytes > 2 << 20
    assert checkpoint_files.have_same_bytes(stored["a"], stored["b"])
    assert not checkpoint_files.have_same_bytes(stored["a"], stored["c"])


def test_a_language_model_in_another_model(directory: Path) -> None:
    """Under another prefix, with parts that it has not, and buffers that old checkpoints hold."""
    own = load(directory)

    def edit(tensors: dict) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_tower.blocks.0.weight"] = torch.ones(3, dtype=torch.int8)
        tensors["multi_modal_projector.linear.weight"] = torch.ones(3)
        tensors["multi_modal_projector.linear.bias"] = torch.ones(3)
        tensors["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)

    change(directory, edit)
    with pytest.warns(UserWarning, match="left, since the language model has no such parts") as warned:
        found = load(directory)
    assert len(warned) == 1
    for words in ("vision_tower (1 tensors)", "multi_modal_projector (2 tensors)"):
        assert words in str(warned[0].message)
    assert torch.equal(own.head.weight, found.head.weight)
    assert torch.equal(own.layers[1].mlp.gate_up.weight, found.layers[1].mlp.gate_up.weight)
    change(directory, lambda tensors: tensors.update({"language_model.model.layers.0.mlp.scale": torch.ones(1)}))
    with pytest.raises(
        CheckpointError, match=r"not part of LlamaForCausalLM: language_model\.model\.layers\.0\.mlp\.scale"
    ):
        load(directory)


def test_weights_that_stand_there_twice_in_two_formats(directory: Path) -> None:
    shutil.copy(directory / "model.safetensors", directory / "consolidated.safetensors")
    shutil.copy(directory / "model.safetensors", directory / "another.safetensors")
    assert load(directory).layers


def test_truncated_file(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = path.read_bytes()
    for length in (0, 5, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            load(directory)
    path.write_bytes(content + b"more")
    with pytest.raises(CheckpointError, match="bytes where its header says"):
        load(directory)


def test_flipped_header_bytes_never_do_worse_than_an_error(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    header_size = int.from_bytes(content[:8], "little")
    for position in torch.randint(0, 8 + header_size, (100,), generator=generator).tolist():
        broken = bytearray(content)
        broken[position] ^= 1 << (position % 8)
        path.write_bytes(broken)
        with contextlib.suppress(CheckpointError):  # a flip in __metadata__ or in the padding changes nothing
            load(directory)


@pytest.mark.parametrize("shard", ["../evil.safetensors", "/etc/evil.safetensors", "model.bin", "sub/x.safetensors"])
def test_index_may_only_name_files_beside_itself(directory: Path, shard: str) -> None:
    index = {"weight_map": {"model.norm.weight": shard}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="beside the index"):
        load(directory)


def test_a_tensor_that_the_index_leaves_out_is_named(directory: Path) -> None:
    change(directory, lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(4)}))
    names = [name for name in load_file(directory / "model.safetensors") if "q_norm" not in name]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index does not name: .*q_norm"):
        load(directory)


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("differs", [False, True])
def test_a_tensor_in_two_shards_is_the_one_that_the_index_names(directory: Path, place: str, differs: bool) -> None:
    expected = load(directory).layers[0].mlp_norm
    tensors, name = load_file(directory / "model.safetensors"), "model.layers.0.post_attention_layernorm.weight"
    shards = {"first": "model-00001-of-00002.safetensors", "last": "model-00002-of-00002.safetensors"}
    (other,) = shards.keys() - {place}
    (directory / "model.safetensors").unlink()
    save_file(tensors, directory / shards[place])
    unused = "rotary_emb.inv_freq"  # so that the index names both files
    save_file({name: tensors[name] + differs, unused: torch.ones(1)}, directory / shards[other])
    index = {"weight_map": dict.fromkeys(tensors, shards[place]) | {unused: shards[other]}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    said = f"{name} of {shards[place]} ({'another' if differs else 'as'} in {shards[other]})"
    with pytest.warns(UserWarning, match=f"several files hold are taken: {re.escape(said)}$") as warned:
        assert torch.equal(load(directory).layers[0].mlp_norm, expected)
    assert len(warned) == 1
    (directory / "model.safetensors.index.json").unlink()
    if differs:
        with pytest.raises(CheckpointError, match=r"of .*00001-of-.* and of .*00002-of-.* differ, and no .*index"):
            load(directory)
    else:
        with pytest.warns(UserWarning, match="several files hold are taken"):
            assert torch.equal(load(directory).layers[0].mlp_norm, expected)


def test_missing_shard_and_missing_checkpoint(directory: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="model-00001-of-00002"):
        load(directory)
    (directory / "model.safetensors.index.json").unlink()
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"code")
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        load(directory)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_that_are_no_numbers_are_named(directory: Path, name: str, value: float) -> None:
    change(directory, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {name} holds NaN or infinite values"):
        load(directory)


def test_weights_that_the_dtype_cannot_hold_are_named(directory: Path) -> None:
    change(directory, lambda tensors: tensors["lm_head.weight"].fill_(1e30))
    load(directory)
    with pytest.raises(CheckpointError, match=r"lm_head.weight holds values too large for float16: choose a wider"):
        loader.load_weights(directory, read_config(directory), torch.float16, CPU)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_fifo_in_place_of_a_file_does_not_hang(directory: Path, name: str) -> None:
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    with pytest.raises(ValueError, match=rf"{name}: .*a FIFO"):
        load(directory)


def test_a_header_is_parsed_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, parsed = read_config(directory), []
    for owner, name, function in ((json, "loads", json.loads), (checkpoint_files, "safe_open", safe_open)):
        counting = lambda *args, function=function, **kwargs: parsed.append(1) or function(*args, **kwargs)  # noqa: E731
        monkeypatch.setattr(owner, name, counting)
    loader.load_weights(directory, config, torch.float32, CPU)
    assert len(parsed) == 2, "by this program, and by the library that checks it"


def test_a_header_without_end_is_refused(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end] + b" " * (17 << 20)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: its header must have at most 16777216 bytes"):
        load(directory)


def test_a_file_that_becomes_shorter_while_it_is_read(directory: Path) -> None:
    path = directory / "model.safetensors"
    stored = checkpoint_files.stored_tensors(path)["model.norm.weight"]
    os.truncate(path, stored.offset + 4)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cut off within model\.norm\.weight"):
        stored.read()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_read_as_they_were_written(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7), "c": torch.randn(()), "d": torch.randn(0, 4)}
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    stored = checkpoint_files.stored_tensors(tmp_path / "x.safetensors")
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(stored[name].read(), tensor)
        assert stored[name].read().dtype == dtype
