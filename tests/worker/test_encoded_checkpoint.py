"""Checkpoints with encoded tensors: gpt-oss as it is published, with experts in MXFP4."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from compiled_llm.models.config_file import read_config
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.registry import family
from compiled_llm.models.weights import tensors
from compiled_llm.worker import checkpoint_reader, loader
from compiled_llm.worker.checkpoint import CheckpointError
from compiled_llm.worker.memory import growth_while
from tests import mxfp4
from tests.models.test_forward import empty_cache, step_input

CPU = torch.device("cpu")
BLOCKS, SCALES = (f"model.layers.1.mlp.experts.down_proj_{kind}" for kind in ("blocks", "scales"))


def load(directory: Path, dtype: torch.dtype = torch.float32, kind: LinearKind = Packed):
    return loader.load_weights(directory, read_config(directory), dtype, CPU, kind)


@pytest.mark.parametrize("kind", [Dense, Packed])
def test_logits_are_those_of_transformers(tmp_path: Path, kind: LinearKind) -> None:
    mxfp4.write_checkpoint(tmp_path)
    config = read_config(tmp_path)
    model = family(config.architecture)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = torch.arange(5, 26)
    step = step_input([(prompt.tolist(), 0)], [list(range(1, 7))])
    with torch.no_grad():
        expected = theirs(prompt[None]).logits[0]
        hidden = model.forward(
            load(tmp_path, kind=kind), step, empty_cache(config), config, model.layers(config), len(prompt)
        )
        logits = model.head(load(tmp_path, kind=kind), hidden, config)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [Dense, Packed])
def test_the_same_as_from_plain_tensors(
    tmp_path: Path, kind: LinearKind, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of any size, also of an odd number of rows."""
    stored = mxfp4.tensors_of(mxfp4.CONFIG)
    plain = {name: tensor for name, tensor in stored.items() if tensor.is_floating_point()}
    for name in stored:
        if name.endswith("_blocks"):
            scales = stored[name.replace("_blocks", "_scales")]
            plain[name.removesuffix("_blocks")] = convert_moe_packed_tensors(stored[name], scales)
    (tmp_path / "plain").mkdir()
    fields = {name: value for name, value in mxfp4.CONFIG.items() if name != "quantization_config"}
    (tmp_path / "plain" / "config.json").write_text(json.dumps(fields))
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    expected = tensors(load(tmp_path / "plain", dtype, kind))
    (tmp_path / "encoded").mkdir()
    mxfp4.write_checkpoint(tmp_path / "encoded")
    for piece_bytes in (1, 600, 1500, 1 << 20):
        monkeypatch.setattr(checkpoint_reader, "PIECE_BYTES", piece_bytes)
        found = tensors(load(tmp_path / "encoded", dtype, kind))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


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
        (lambda t: t[SCALES].view(-1)[7].fill_(255), [BLOCKS, SCALES, "NaN or infinite values: the file is damaged"]),
        (lambda t: t[SCALES].fill_(254), [BLOCKS, SCALES, "NaN or infinite values: the file is damaged"]),
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


def test_values_too_large_for_float16_are_told_from_damage(tmp_path: Path) -> None:
    mxfp4.write_checkpoint(tmp_path)
    stored = mxfp4.tensors_of(mxfp4.CONFIG)
    stored[SCALES].fill_(127 + 14)
    mxfp4.write(tmp_path, stored)
    load(tmp_path, torch.bfloat16)
    with pytest.raises(CheckpointError, match=f"{SCALES} hold values too large for float16: choose a wider dtype"):
        load(tmp_path, torch.float16)


@pytest.mark.parametrize("quantised", [True, False])
def test_experts_are_never_in_memory_twice(tmp_path: Path, quantised: bool) -> None:
    """All of them lie in two tensors: read as a whole they would double what is needed."""
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_local_experts": 16, "num_hidden_layers": 1}
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
