"""The same model as vLLM reads it quantised: its numbers mean what the quantised weights mean; nothing half done."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compiled_llm.api.config import EngineConfig
from compiled_llm.bench.peers import checkpoints
from compiled_llm.bench.peers.precisions import precision
from compiled_llm.ops.linear.quantized_weight import WeightFormat, dequantize, quantize

QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    checkpoints.write_checkpoint("tiny", tmp_path / "tiny")
    return tmp_path / "tiny"


def test_eight_bits(tiny: Path, tmp_path: Path) -> None:
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


def test_four_bits_are_eight_to_a_word(tiny: Path, tmp_path: Path) -> None:
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


def test_what_is_there_is_kept_and_what_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(("name", "group_size"), [("bf16", 32), ("int8", 32), ("int4", 32), ("int4", 128)])
def test_precisions(name: str, group_size: int) -> None:
    of = precision(name, group_size)
    assert next(iter(of.engines)) == "engine"
    for options in of.engines.values():
        EngineConfig(**options)
    for engine in (*of.engines, "vllm", "openvino", "openvino-stateful", "llama.cpp"):
        facts = of.facts(engine)
        assert all(facts.values())
        assert ("bfloat16" in facts["weights"] or "float16" in facts["weights"]) == (name == "bf16")
    assert of.facts("openvino-stateful") == of.facts("openvino")
    assert of.facts("openvino")["kv_cache"] == of.facts("llama.cpp")["kv_cache"] == "float16"
    if name == "int4":
        assert of.openvino[of.openvino.index("--group-size") + 1] == str(group_size)
        assert str(group_size) in of.facts("vllm")["weights"]
