"""Tensors are read in pieces, each to its place, on several threads; a model is never in memory twice."""

import dataclasses
import json
import os
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from compiled_llm.checkpoint import loader
from compiled_llm.checkpoint import reader as checkpoint_reader
from compiled_llm.checkpoint.reader import CheckpointReader
from compiled_llm.checkpoint.stored_tensors import CheckpointError, StoredTensor, stored_tensors
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_file import read_config
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.reader import Wanted
from compiled_llm.models.registry import family
from compiled_llm.models.weights import tensors as tensors_of
from compiled_llm.worker.memory import growth_while
from tests.families import checkpoint

CPU = torch.device("cpu")


def wanted(name: str, tensor: Tensor) -> Wanted:
    return Wanted(name, tuple(tensor.shape), 0.0, 0.0)


def save(directory: Path, tensors: dict[str, Tensor]) -> dict[str, StoredTensor]:
    save_file(tensors, directory / "x.safetensors")
    return stored_tensors(directory / "x.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_several_tensors_come_one_below_the_other(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_reader, "PIECE_BYTES", 300)
    tensors = {"a": torch.randn(50, 7), "b": torch.randn(1, 7), "c": torch.randn(33, 7)}
    done: Counter[str] = Counter()
    got, lock, seen = torch.full((84, 7), float("nan"), dtype=dtype), threading.Lock(), []

    def put(start: int, rows: Tensor) -> None:
        with lock:
            seen.append((start, len(rows)))
            got[start : start + len(rows)] = rows

    with CheckpointReader(
        save(tmp_path, tensors), dtype, CPU, lambda name, count: done.update({name: count})
    ) as reader:
        reader.rows([wanted(name, tensor) for name, tensor in tensors.items()], put)
        assert torch.equal(reader.tensor(wanted("c", tensors["c"])), tensors["c"].to(dtype))
    assert torch.equal(got, torch.cat(list(tensors.values())).to(dtype))
    assert len(seen) > 5
    assert done["a"] == 50 * 7 * dtype.itemsize, "bytes of the model, not of the file"


def test_tensors_of_any_number_of_dimensions(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(()), "b": torch.randn(5), "c": torch.randn(3, 4, 5)}
    with CheckpointReader(save(tmp_path, tensors), torch.float32, CPU, lambda name, count: None) as reader:
        for name, tensor in tensors.items():
            assert torch.equal(reader.tensor(wanted(name, tensor)), tensor)


def test_the_first_error_of_any_piece_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_reader, "PIECE_BYTES", 64)
    tensors = {"a": torch.ones(400, 4), "b": torch.ones(40, 4)}
    tensors["a"][333, 3] = float("inf")
    stored = save(tmp_path, tensors)
    num_threads = torch.get_num_threads()
    with CheckpointReader(stored, torch.float32, CPU, lambda name, count: None) as reader:
        with pytest.raises(CheckpointError, match=r"x\.safetensors: a holds NaN or infinite values"):
            reader.tensor(wanted("a", tensors["a"]))
        os.truncate(tmp_path / "x.safetensors", stored["b"].offset + 100)
        with pytest.raises(CheckpointError, match=r"x\.safetensors: cut off within b"):
            reader.tensor(wanted("b", tensors["b"]))
    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_is_never_in_memory_twice(tmp_path: Path, dtype: torch.dtype) -> None:
    """Most of it in one tensor, in the file in bfloat16: read as a whole it would double what is needed."""
    fields = json.loads((checkpoint("qwen3") / "config.json").read_text())
    fields |= {"vocab_size": 300_000, "dtype": "bfloat16", "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config: ModelConfig = dataclasses.replace(read_config(tmp_path))
    shapes = family(config.architecture).describe(config).taken
    save_file(
        {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}, tmp_path / "x.safetensors"
    )
    loaded = []
    growth = growth_while(lambda: loaded.append(loader.load_weights(tmp_path, config, dtype, CPU, Packed)))
    if growth is None:
        pytest.skip("the system does not tell")
    size = sum(tensor.nbytes for tensor in tensors_of(loaded[0]))
    assert size > 60 << 20
    assert growth < 1.2 * size + (8 << 20)  # and buffers, a stack for each thread, the library that packs
