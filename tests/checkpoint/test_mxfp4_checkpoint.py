"""gpt-oss as it is published, with experts in MXFP4: these are kept in four bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from compiled_llm.checkpoint import loader, reader
from compiled_llm.checkpoint.quantization import published
from compiled_llm.checkpoint.stored_tensors import CheckpointError
from compiled_llm.models.config_file import read_config
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.linears.quantized import QuantizedExperts
from compiled_llm.models.weights import tensors
from compiled_llm.ops.linear.quantized_layouts import unpack_quantized_rows
from compiled_llm.ops.linear.quantized_weight import dequantize
from compiled_llm.worker.memory import growth_while
from tests import mxfp4
from tests.models.steps import empty_cache, step_input, step_logits

CPU = torch.device("cpu")
PROMPT = list(range(5, 26))
DOWN = "model.layers.1.mlp.experts.down_proj"
BLOCKS, SCALES = (f"{DOWN}_{kind}" for kind in ("blocks", "scales"))


def load(directory: Path, dtype: torch.dtype = torch.float32, kind: LinearKind = Packed) -> Any:
    config = read_config(directory)
    return loader.load_weights(directory, config, dtype, CPU, published(config, kind))


def logits(directory: Path, dtype: torch.dtype = torch.float32, kind: LinearKind = Packed) -> Tensor:
    config = read_config(directory)
    step = step_input([(PROMPT, 0)], [list(range(1, 7))])
    return step_logits(config, load(directory, dtype, kind), step, empty_cache(config, dtype)).float()


def of_transformers(directory: Path, dtype: torch.dtype) -> Tensor:
    """Its dequantised forward."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    with torch.no_grad():
        return theirs(torch.tensor([PROMPT])).logits[0].float()


@pytest.mark.parametrize("kind", [Dense, Packed])
def test_logits_are_those_of_transformers(tmp_path: Path, kind: LinearKind) -> None:
    mxfp4.write_checkpoint(tmp_path)
    expected = of_transformers(tmp_path, torch.float32)
    torch.testing.assert_close(logits(tmp_path, kind=kind), expected, atol=1e-4, rtol=1e-4)


def test_in_bfloat16_they_are_as_near_as_those_of_transformers(tmp_path: Path) -> None:
    mxfp4.write_checkpoint(tmp_path)
    exact, theirs = (of_transformers(tmp_path, dtype) for dtype in (torch.float32, torch.bfloat16))
    found = logits(tmp_path, torch.bfloat16)
    assert (found - exact).abs().median() < 1.3 * (theirs - exact).abs().median()
    assert (found - exact).abs().median() < 0.03 * exact.std()


@pytest.mark.parametrize("kind", [Dense, Packed])
def test_codes_are_those_of_the_file(tmp_path: Path, kind: LinearKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of any size, those of gate and up in turn."""
    mxfp4.write_checkpoint(tmp_path)
    stored = mxfp4.tensors_of(mxfp4.CONFIG)
    for piece_bytes in (1, 3200, 1 << 20):
        monkeypatch.setattr(reader, "PIECE_BYTES", piece_bytes)
        for number, layer in enumerate(load(tmp_path, torch.bfloat16, kind).layers):
            for name, experts in (("gate_up_proj", layer.mlp.gate_up), ("down_proj", layer.mlp.down)):
                assert isinstance(experts, QuantizedExperts)
                form, ids = experts.scheme.form, torch.arange(experts.out_features)
                name = f"model.layers.{number}.mlp.experts.{name}"
                blocks, scales = (stored[f"{name}_{which}"] for which in ("blocks", "scales"))
                expected = convert_moe_packed_tensors(blocks, scales).transpose(1, 2).float()
                bias = stored[f"{name}_bias"]
                if "gate_up" in name:
                    expected = torch.cat([expected[:, ::2], expected[:, 1::2]], 1)
                    bias = torch.cat([bias[:, ::2], bias[:, 1::2]], 1)
                for expert in range(experts.num_experts):
                    rows = unpack_quantized_rows(experts.weight.expert(expert), ids, form, experts.in_features)
                    assert torch.equal(dequantize(rows, form), expected[expert])
                assert torch.equal(experts.bias, bias)
                assert experts.nbytes == expected.numel() * 9 // 16 + bias.nbytes  # 4 bits, and 16 for each 32 of them


def test_dummy_weights_are_of_the_checkpoints_kind(tmp_path: Path) -> None:
    mxfp4.write_checkpoint(tmp_path)
    config, read = read_config(tmp_path), tensors(load(tmp_path, torch.bfloat16))
    kind = published(config, Packed)
    made = [tensors(loader.dummy_weights(config, torch.bfloat16, CPU, seed, kind)) for seed in (0, 0, 1)]
    for given in made:
        assert [(t.shape, t.dtype) for t in given] == [(t.shape, t.dtype) for t in read]
    assert all(torch.equal(a, b) for a, b in zip(made[0], made[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(made[0], made[2], strict=True))


def test_layers_that_are_not_converted_are_read_plain(tmp_path: Path) -> None:
    patterns = [*mxfp4.QUANTIZATION["modules_to_not_convert"], "model.layers.1.mlp"]
    fields = {**mxfp4.CONFIG, "quantization_config": {**mxfp4.QUANTIZATION, "modules_to_not_convert": patterns}}
    mxfp4.write_checkpoint(tmp_path, fields)
    stored = mxfp4.tensors_of(fields)
    assert BLOCKS not in stored
    layer = load(tmp_path, kind=Dense).layers[1].mlp
    assert torch.equal(layer.down.weight, stored[BLOCKS.removesuffix("_blocks")].float().transpose(1, 2))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop(SCALES), ["missing", SCALES]),
        (lambda t: t.pop(BLOCKS), ["missing", BLOCKS]),
        (lambda t: t.update({SCALES: t[SCALES][:, :, :1].clone()}), [SCALES, "(5, 96, 1)", "(5, 96, 2)"]),
        (lambda t: t.update({BLOCKS: t[BLOCKS].flatten(2)}), [BLOCKS, "(5, 96, 32)", "(5, 96, 2, 16)"]),
        (lambda t: t.update({BLOCKS: t[BLOCKS].to(torch.int8)}), [BLOCKS, "I8; allowed: U8"]),
        (lambda t: t.update({SCALES: t[SCALES].bfloat16()}), [SCALES, "BF16; allowed: U8"]),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.uint8)}),
            ["model.norm.weight", "U8; allowed: F32, F16, BF16"],
        ),
        (lambda t: t.update({BLOCKS.removesuffix("_blocks"): torch.zeros(2)}), ["not part of GptOss", "down_proj ("]),
        (lambda t: t[SCALES].view(-1)[7].fill_(255), [f"{DOWN}, number 0: scales must be", "found 255", "is damaged"]),
        (lambda t: t[SCALES][3].fill_(254), [f"{DOWN}, number 3: scales must be", "found 254", "is damaged"]),
    ],
    ids=lambda value: "" if callable(value) else " ".join(value).replace("model.layers.1.mlp.experts.", "")[:60],
)
def test_errors_name_file_and_tensor(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], object], words: list[str]
) -> None:
    mxfp4.write_checkpoint(tmp_path)
    stored = mxfp4.tensors_of(mxfp4.CONFIG)
    edit(stored)
    mxfp4.write(tmp_path, stored)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    for word in [*words, *(["safetensors"] if "missing" not in words else [])]:
        assert word in str(error.value)


def test_float16_has_the_same_codes(tmp_path: Path) -> None:
    """Weights beyond what float16 holds are none of its numbers: scales stay in bfloat16."""
    mxfp4.write_checkpoint(tmp_path)
    stored = mxfp4.tensors_of(mxfp4.CONFIG)
    stored[SCALES].fill_(127 + 14)
    mxfp4.write(tmp_path, stored)
    half, other = (load(tmp_path, dtype).layers[1].mlp.down for dtype in (torch.float16, torch.bfloat16))
    assert torch.equal(half.weight.codes, other.weight.codes)
    assert torch.equal(half.weight.scales, other.weight.scales)


@pytest.mark.parametrize("quantised", [True, False])
def test_experts_are_never_in_memory_twice(tmp_path: Path, quantised: bool) -> None:
    """All of them lie in two tensors: read as a whole they would double what is needed."""
    count = 60 if quantised else 16
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_local_experts": count, "num_hidden_layers": 1}
    fields = {**mxfp4.CONFIG, **sizes, "layer_types": ["sliding_attention"]}
    if not quantised:
        del fields["quantization_config"]
    mxfp4.write_checkpoint(tmp_path, fields)
    loaded = []
    growth = growth_while(lambda: loaded.append(load(tmp_path, torch.bfloat16)))
    if growth is None:
        pytest.skip("the system does not tell")
    size = sum(tensor.nbytes for tensor in tensors(loaded[0]))
    assert size > 90 << 20
    assert growth < 1.1 * size + (16 << 20)  # and buffers, a stack for each thread, the library that packs
