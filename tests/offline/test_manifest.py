"""The manifest: a run goes on only with rows that it would have made itself."""

import copy
import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.offline import manifest as manifest_module
from compiled_llm.offline.files import manifest_path
from compiled_llm.offline.manifest import (
    DECIDING,
    check_manifest,
    check_replaceable,
    make_manifest,
    model_digest,
    tokenizer_digest,
    write_manifest,
)
from compiled_llm.offline.reading import InputFile

# Engine arguments that change no token. Those of the model and the tokenizer are compared by their files.
CHANGING_NO_TOKEN = {
    *("model", "revision", "tokenizer", "tokenizer_revision"),
    *("bucket_sizes", "token_bucket_sizes", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks"),
    *("kv_cache_memory_bytes", "num_state_slots", "gpu_memory_utilization", "swap_space_bytes", "preemption_mode"),
    *(
        "compress_weights",
        "keep_weights_twice",
        "scheduling_policy",
        "target_itl_ms",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "async_scheduling",
    ),
    *("cuda_graphs", "compile_workers", "num_threads", "max_logprobs", "max_queued_requests", "max_request_id_length"),
    *("max_grammar_seconds", "max_grammar_bytes", "model_process", "enforce_eager", "progress", "check_invariants"),
    *("wait_for_compile", "speculative_config", "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras"),
    "max_lora_modules_to_save",
    *("lora_target_modules", "kv_host_bytes", "kv_disk_path", "kv_disk_bytes"),
    *("role", "kv_transfer_address", "kv_transfer_bytes", "kv_transfer_peers"),
    *("weights_path", "weights_bytes", "cpu_offload_gb", "pipeline_parallel_size"),
}


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    names = []
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": name}) + "\n")
        names.append(str(tmp_path / name))
    return names


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return manifest_path(tmp_path / "out.jsonl")


def made(inputs: list[str], sampling: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    digests = {kind: changes.pop(f"{kind}_sha256", default) for kind, default in (("model", "a"), ("tokenizer", "b"))}
    device = changes.pop("device", "cpu")
    files = [InputFile.of(name) for name in inputs]
    return make_manifest(files, EngineConfig(**changes), sampling or {"max_tokens": 8}, device=device, digests=digests)


def test_every_engine_argument_is_compared_or_changes_no_token() -> None:
    """A new argument has to be put into one of the two."""
    assert {field.name for field in dataclasses.fields(EngineConfig)} == set(DECIDING) | CHANGING_NO_TOKEN
    assert not set(DECIDING) & CHANGING_NO_TOKEN


def test_the_same_run_goes_on(path: Path, inputs: list[str]) -> None:
    write_manifest(path, made(inputs))
    assert check_manifest(path, made(inputs)) == []
    assert sorted(os.listdir(path.parent)) == ["a.jsonl", "b.jsonl", path.name]
    written = json.loads(path.read_text())
    assert [entry["name"] for entry in written["inputs"]] == ["a.jsonl", "b.jsonl"]
    assert written["information"]["inputs"] == inputs


def test_what_changes_no_token_may_change(path: Path, inputs: list[str], tmp_path: Path) -> None:
    write_manifest(path, made(inputs))
    changes = {"bucket_sizes": (1, 4), "max_num_batched_tokens": 64, "num_kv_blocks": 99, "model": "/elsewhere"}
    moved = [str(Path(name).rename(tmp_path / f"moved-{Path(name).name}")) for name in inputs]
    assert check_manifest(path, made(moved, **changes)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype is 'int8' and was 'auto'"),
        ({"seed": 1}, "--seed is 1 and was 0"),
        ({"device": "cuda"}, "--device is 'cuda' and was 'cpu'"),
        (
            {"quantization": "int8", "quantization_skip": ("layers.0",)},
            r"--quantization is 'int8' and was None; --quantization-skip is \['layers.0'\] and was \[\]",
        ),
        ({"sampling": {"max_tokens": 9}}, "--max-tokens is 9 and was 8"),
        ({"sampling": {"max_tokens": 8, "top_p": 0.5}}, "--top-p is 0.5 and was None"),
        ({"model_sha256": "c", "model": "y"}, r"the model is another one, then 'x' \(sha256 c and was a\)"),
        ({"tokenizer_sha256": "c"}, r"the tokenizer is another one \(sha256 c and was b\)"),
        ({"seed": 1, "dtype": "float32"}, "--dtype is 'float32' and was 'auto'; --seed is 1 and was 0. Give those"),
    ],
)
def test_what_decides_the_rows_is_named(path: Path, inputs: list[str], changes: dict[str, Any], words: str) -> None:
    write_manifest(path, made(inputs, model="x"))
    with pytest.raises(ValueError, match=words) as error:
        check_manifest(path, made(inputs, **{"model": "x", **changes}))
    assert str(path) in str(error.value), "what to do"


def test_other_inputs_are_named(path: Path, inputs: list[str], tmp_path: Path) -> None:
    write_manifest(path, made(inputs))
    with pytest.raises(ValueError, match="--input has 1 files and had 2"):
        check_manifest(path, made(inputs[:1]))
    with pytest.raises(ValueError, match=r"'b.jsonl' has not the content of 'a.jsonl' .*; --input 'a.jsonl' has not"):
        check_manifest(path, made(inputs[::-1]))
    text = Path(inputs[0]).rename(tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"--input 'a.txt' has not the content of 'a.jsonl'"):
        check_manifest(path, made([str(text), inputs[1]]))  # each line is a prompt, then
    text.rename(inputs[0])
    with open(inputs[1], "a") as file:
        file.write(" ")
    with pytest.raises(ValueError, match=r"--input 'b.jsonl' has another content than it had \(sha256 \w+ and was"):
        check_manifest(path, made(inputs))


def test_of_many_other_inputs_the_first_are_named(path: Path, inputs: list[str]) -> None:
    write_manifest(path, made(inputs[:1] * 9))
    with pytest.raises(ValueError, match=r"6 more inputs have other contents\. Give") as error:
        check_manifest(path, made(inputs[1:] * 9))
    assert str(error.value).count("has not the content") == 3


def test_other_versions_are_told(path: Path, inputs: list[str]) -> None:
    earlier = made(inputs)
    now = copy.deepcopy(earlier)
    earlier["information"]["versions"] |= {"torch": "1.0"}
    del earlier["information"]["versions"]["python"]
    write_manifest(path, earlier)
    told = check_manifest(path, now)
    versions = now["information"]["versions"]
    assert told == [f"python is {versions['python']} and was None", f"torch is {versions['torch']} and was 1.0"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not readable as JSON"),
        (b"[]", "must hold a JSON object"),
        (b"[" * 100_000, "not readable as JSON"),
        (b"\xff", "not readable as JSON"),
        (b"{}", "must have the format 1, found None"),
        (b'{"format": 2}', "must have the format 1, found 2"),
        (b'{"format": 1}', "--input has 2 files and had 0"),
        (b'{"format": 1, "inputs": [1, null], "engine": [], "sampling": 3, "information": "x"}', "sha256"),
    ],
)
def test_what_no_run_wrote_is_refused(path: Path, inputs: list[str], content: bytes, words: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"--resume: .*{words}.* another --output"):
        check_manifest(path, made(inputs))
    assert path.read_bytes() == content


def test_without_a_manifest_nothing_is_resumed(path: Path, inputs: list[str]) -> None:
    with pytest.raises(ValueError, match=r"it is not there\. .*: give another --output"):
        check_manifest(path, made(inputs))
    path.mkdir()
    with pytest.raises(ValueError, match="must be a regular file, found a directory"):
        check_manifest(path, made(inputs))


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_it_is_there_whole_or_not_at_all(
    path: Path, inputs: list[str], monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    write_manifest(path, made(inputs))
    before = path.read_bytes()

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as failing:
        failing.setattr(manifest_module.os, function, full)
        with pytest.raises(OSError, match=rf"the manifest .*{path.name}: No space left"):
            write_manifest(path, made(inputs, seed=5))
    assert path.read_bytes() == before
    assert sorted(os.listdir(path.parent)) == ["a.jsonl", "b.jsonl", path.name]


def test_standard_input_has_no_digest() -> None:
    assert made(["-"])["inputs"][0]["sha256"] is None


# -- Files of others


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"notes\n", b'{"format": 1}', b"\xff", b"[" * 10**5])
def test_a_file_of_somebody_else_is_not_replaced(path: Path, inputs: list[str], content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"must be a new file, or that of an earlier run, and .* is none: move it"):
        write_manifest(path, made(inputs))
    assert path.read_bytes() == content


def test_an_earlier_manifest_is_replaced(path: Path, inputs: list[str]) -> None:
    check_replaceable(path)
    write_manifest(path, made(inputs, seed=1))
    check_replaceable(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    write_manifest(path, made(inputs))
    assert check_manifest(path, made(inputs)) == []


def test_files_beside_a_manifest_are_left_alone_but_for_those_of_killed_runs(path: Path, inputs: list[str]) -> None:
    others = [
        path.with_name(f"{path.name}{end}") for end in (".new", ".0123.new", f".{'0' * 16}.new~", f"x.{'0' * 16}.new")
    ]
    left = path.with_name(f"{path.name}.{'0' * 16}.new")
    for file in (*others, left):
        file.write_text("x")
    write_manifest(path, made(inputs))
    assert all(other.read_text() == "x" for other in others)
    assert not left.exists()
    assert len(os.listdir(path.parent)) == len(inputs) + len(others) + 1


# -- Digests


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
    """Of every eighth, by itself, the values change a little."""
    before = model_digest(model, "auto")
    tensors = load_file(model / WEIGHTS)
    for name, tensor in list(tensors.items())[::8]:
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
