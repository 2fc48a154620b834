"""Tensors are read in pieces, each to its place, on several threads; a model is never in memory twice."""

import dataclasses
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiled_llm.checkpoint import loader
from compiled_llm.checkpoint import reader as checkpoint_reader
from compiled_llm.checkpoint.quantization import published
from compiled_llm.checkpoint.reader import CheckpointReader
from compiled_llm.checkpoint.stored_tensors import CheckpointError, StoredTensor, stored_tensors
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_file import read_config
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.protocol import Region
from compiled_llm.models.reader import Wanted
from compiled_llm.models.registry import family
from compiled_llm.models.weights import tensors as tensors_of
from compiled_llm.worker.memory import growth_while
from tests import families
from tests.families import checkpoint
from tests.models.quantized import test_compressed_tensors as ct
from tests.models.quantized import test_gptq as gptq
from tests.models.steps import step_input, step_logits

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


@pytest.mark.parametrize(
    ("region", "nbytes"),
    [
        (Region(5, 20, 0, 3000), 15 * 12000),
        (Region(0, 40, 1500, 3000), 40 * 6000),  # of each row a half
        (Region(0, 40, 10, 20), 40 * 12000),  # less than a page of each row: all of it
        (Region(0, 0, 0, 3000), 0),
    ],
)
def test_a_region_alone_is_read(tmp_path: Path, region: Region, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_reader, "PIECE_BYTES", 100_000)
    read_into, read = StoredTensor.read_into, []

    def counted(self: StoredTensor, content: Any, start: int, file: int) -> None:
        read.append(content.size)
        read_into(self, content, start, file)

    monkeypatch.setattr(StoredTensor, "read_into", counted)
    tensors = {"a": torch.randn(3, 3000), "b": torch.randn(40, 3000)}
    stored = save(tmp_path, tensors)
    first, end, left, right = region
    got = torch.zeros(43, right - left)

    def put(start: int, rows: Tensor) -> None:
        got[start : start + len(rows)] = rows

    with CheckpointReader(stored, torch.float32, CPU, lambda name, count: None) as reader:
        whole = wanted("a", tensors["a"])._replace(region=Region(0, 3, left, right))
        reader.rows([whole, wanted("b", tensors["b"])._replace(region=region)], put)
    assert torch.equal(got[:3], tensors["a"][:, left:right])
    assert torch.equal(got[3 + first : 3 + end], tensors["b"][first:end, left:right])
    assert sum(read) == nbytes + 3 * (12000 if right - left < 1024 else 4 * (right - left))


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


# -- Quantised layers


CPU = torch.device("cpu")
LAYER = "model.layers.0.mlp.down_proj"


def load(directory: Path) -> Any:
    config = read_config(directory)
    return loader.load_weights(directory, config, torch.float32, CPU, published(config, Packed))


def logits(directory: Path) -> Tensor:
    config = read_config(directory)
    return step_logits(config, load(directory), step_input([(list(range(5, 26)), 0)], [list(range(1, 7))]))


def write(
    directory: Path,
    source: Path,
    quantised: Callable[[Tensor], dict[str, Tensor]],
    fields: dict[str, Any],
    skip: tuple[str, ...] = ("gate",),
) -> None:
    """A checkpoint twice: with the quantised linear layers of its blocks, and with what they stand for.

    ``skip``: ends of the names of layers that are left as they are.
    """
    tensors, plain = load_file(source / "model.safetensors"), {}
    config = json.loads((source / "config.json").read_text())
    for each in list(tensors):
        matrix = tensors[each]
        if ".layers." not in each or matrix.ndim != 2 or each.removesuffix(".weight").endswith(skip):
            plain[each] = matrix
            continue
        made = quantised(matrix)
        plain[each] = made.pop("dequantised")
        del tensors[each]
        tensors |= {f"{each.removesuffix('weight')}{which}": one.contiguous() for which, one in made.items()}
    for folder, held, more in (("quantised", tensors, {"quantization_config": fields}), ("plain", plain, {})):
        (directory / folder).mkdir()
        (directory / folder / "config.json").write_text(json.dumps({**config, **more}))
        save_file(held, directory / folder / "model.safetensors")


def rounded(matrix: Tensor, size: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[N, K]`` from 0 on, zero points and scales ``[N, G]``."""
    values = matrix.view(len(matrix), -1, size)
    low, high = values.amin(2), values.amax(2)
    scales = ((high - low) / (2**bits - 1)).half().float() + 1e-4
    zeros = torch.round(-low / scales).clamp(1, 2**bits - 1)
    codes = torch.round(values / scales[:, :, None] + zeros[:, :, None]).clamp(0, 2**bits - 1)
    return codes.flatten(1).long(), zeros.long(), scales


def as_gptq(matrix: Tensor) -> dict[str, Tensor]:
    size = matrix.shape[1]  # a group of all
    codes, zeros, scales = rounded(matrix, size, 4)
    order = torch.zeros(size, dtype=torch.int32)
    return {
        "qweight": gptq.packed_down(codes.t(), 4),
        "qzeros": gptq.packed_down(zeros - 1, 4).t(),
        "scales": scales.half().t(),
        "g_idx": order,
        "dequantised": (codes - zeros) * scales.half().float(),
    }


def as_gptq_in_order(matrix: Tensor) -> dict[str, Tensor]:
    """Symmetric, in groups of 16, whose inputs are spread over the row."""
    codes, _, scales = rounded(matrix, 16, 4)
    groups = matrix.shape[1] // 16
    return {
        "qweight": gptq.packed_down(codes.t(), 4),
        "qzeros": gptq.packed_down(torch.full((len(matrix), groups), 7), 4).t(),
        "scales": scales.half().t(),
        "g_idx": torch.arange(matrix.shape[1], dtype=torch.int32) % groups,
        "dequantised": matrix,
    }


def as_awq(matrix: Tensor) -> dict[str, Tensor]:
    codes, zeros, scales = rounded(matrix, 16, 4)
    return {
        "qweight": gptq.packed_awq(codes.t()),
        "qzeros": gptq.packed_awq(zeros.t()),
        "scales": scales.half().t(),
        "dequantised": matrix,
    }


def as_int8(matrix: Tensor) -> dict[str, Tensor]:
    scale = matrix.abs().amax(1, keepdim=True) / 127
    codes = torch.round(matrix / scale).to(torch.int8)
    return {"weight": codes, "weight_scale": scale, "dequantised": codes * scale}


def as_fp8(matrix: Tensor) -> dict[str, Tensor]:
    scale = matrix.abs().amax() / 448
    codes = (matrix / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "dequantised": codes.float() * scale}


CASES: dict[str, tuple[Callable[[Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "gptq": (as_gptq, {**gptq.GPTQ, "group_size": -1, "sym": False}),
    "int8": (as_int8, ct.config("int-quantized", ct.W8)["quantization_config"]),
    "fp8": (as_fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
}


@pytest.mark.parametrize("family_name", ["qwen3", "llama"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_dequantised_model(tmp_path: Path, case: str, family_name: str) -> None:
    write(tmp_path, families.checkpoint(family_name), *CASES[case])
    torch.testing.assert_close(logits(tmp_path / "quantised"), logits(tmp_path / "plain"), atol=1e-3, rtol=1e-3)


def test_scales_of_a_cache_are_left(tmp_path: Path) -> None:
    write(tmp_path, families.checkpoint("qwen3"), *CASES["int8"])
    path = tmp_path / "quantised" / "model.safetensors"
    scales = {f"model.layers.0.self_attn.{x}_scale": torch.ones(1) for x in "kv"}
    save_file(load_file(path) | scales, path)
    with pytest.warns(UserWarning, match=r"left, .*: scales of a KV cache \(2 tensors\)"):
        load(tmp_path / "quantised")


@pytest.mark.parametrize(
    ("case", "edit", "words"),
    [
        ("int8", lambda t: t.pop(f"{LAYER}.weight_scale"), ["missing", f"{LAYER}.weight_scale"]),
        ("int8", lambda t: t[f"{LAYER}.weight_scale"].fill_(torch.nan), [LAYER, "weight_scale must hold finite"]),
        ("int8", lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"].float()}), ["F32; allowed: I8"]),
        ("int8", lambda t: t.update({f"{LAYER}.g_idx": torch.zeros(3)}), ["not part of", "g_idx"]),
        ("gptq", lambda t: t[f"{LAYER}.g_idx"].fill_(1), [LAYER, "g_idx must place"]),
        ("gptq", lambda t: t.update({f"{LAYER}.qweight": t[f"{LAYER}.qweight"][:-1].clone()}), ["qweight", "implies"]),
        ("gptq", lambda t: t.update({f"{LAYER}.weight": torch.zeros(3)}), ["not part of", f"{LAYER}.weight"]),
        ("fp8", lambda t: t[f"{LAYER}.weight"].view(torch.uint8).fill_(127), [LAYER, "the weights hold NaN"]),
        ("fp8", lambda t: t.update({f"{LAYER}.weight_scale": torch.zeros(2)}), ["weight_scale", "(2,)"]),
    ],
)
def test_errors_name_the_layer(
    tmp_path: Path, case: str, edit: Callable[[dict[str, Tensor]], object], words: list[str]
) -> None:
    write(tmp_path, families.checkpoint("qwen3"), *CASES[case])
    path = tmp_path / "quantised" / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "quantised")
    for word in words:
        assert word in str(error.value)
