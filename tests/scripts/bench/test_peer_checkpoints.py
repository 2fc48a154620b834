"""The same model as vLLM reads it quantised: its numbers mean what the quantised weights mean; nothing half done."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from compiled_llm.ops.linear.quantized_weight import WeightFormat, dequantize, quantize

SCRIPTS = Path(__file__).parents[3] / "scripts" / "bench"
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("peer_checkpoints")


@pytest.fixture
def tiny(checkpoints: ModuleType, tmp_path: Path) -> Path:
    checkpoints.write_checkpoint("tiny", tmp_path / "tiny")
    return tmp_path / "tiny"


def test_eight_bits(checkpoints: ModuleType, tiny: Path, tmp_path: Path) -> None:
    checkpoints.write_compressed(tiny, tmp_path / "w8", 8, 0)
    before, after = load_file(tiny / "model.safetensors"), load_file(tmp_path / "w8" / "model.safetensors")
    assert after[f"{QUERY}.weight"].dtype == torch.int8
    expected = quantize(before[f"{QUERY}.weight"], WeightFormat("int8", 0, scale_dtype="bfloat16"))
    assert torch.equal(after[f"{QUERY}.weight"], expected.codes)
    assert torch.equal(after[f"{QUERY}.weight_scale"].float(), expected.scales)
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    config = json.loads((tmp_path / "w8" / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert (config["format"], group["input_activations"]["strategy"]) == ("int-quantized", "token")


def test_four_bits_are_eight_to_a_word(checkpoints: ModuleType, tiny: Path, tmp_path: Path) -> None:
    checkpoints.write_compressed(tiny, tmp_path / "w4", 4, 32)
    before, after = load_file(tiny / "model.safetensors"), load_file(tmp_path / "w4" / "model.safetensors")
    assert f"{QUERY}.weight" not in after
    assert after[f"{QUERY}.weight_shape"].tolist() == list(before[f"{QUERY}.weight"].shape)
    packed, scales = after[f"{QUERY}.weight_packed"], after[f"{QUERY}.weight_scale"].float()
    codes = torch.stack([packed >> 4 * place & 15 for place in range(8)], 2).view(len(packed), -1) - 8
    form = WeightFormat("int4", 32, scale_dtype="bfloat16")
    expected = quantize(before[f"{QUERY}.weight"], form)
    assert torch.equal(codes, expected.codes.int())
    values = codes.view(len(codes), -1, 32) * scales[..., None]
    torch.testing.assert_close(values.view_as(codes).float(), dequantize(expected, form).float())


def test_what_is_there_is_kept_and_what_fails_leaves_nothing(
    checkpoints: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    tool = tmp_path / "bad.py"
    tool.write_text("import sys; sys.exit('no room')")
    monkeypatch.setattr(checkpoints, "GGUF", tool)
    with pytest.raises(checkpoints.ConversionFailed, match=r"llama.cpp: its export ended with status 1; .*\nno room"):
        checkpoints.write_gguf(sys.executable, tmp_path, file, "Q4_0", "Q8_0")
    assert not file.exists()
    tool.write_text("import sys; open(sys.argv[2], 'w').write(' '.join(sys.argv[3:]))")
    checkpoints.write_gguf(sys.executable, tmp_path, file, "Q4_0", "Q8_0")
    assert file.read_text() == "Q4_0 Q8_0"
    checkpoints.write_gguf(sys.executable, tmp_path, file, "BF16", "BF16")
    assert file.read_text() == "Q4_0 Q8_0", "what is there is kept"
