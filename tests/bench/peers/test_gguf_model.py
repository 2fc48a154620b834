"""GGUF files for llama.cpp, read back with ``gguf``, where that is installed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from compiled_llm.bench.peers import checkpoints

gguf = pytest.importorskip("gguf")


@pytest.fixture
def writer() -> Any:
    from compiled_llm.bench.peers import gguf_model

    return gguf_model


def test_a_tiny_model_is_read_back(writer: Any, tmp_path: Path) -> None:
    checkpoints.write_checkpoint("tiny", tmp_path / "tiny")
    writer.write_gguf(tmp_path / "tiny", tmp_path / "tiny.gguf", "Q4_0", "Q8_0")
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    assert reader.get_field("qwen3.attention.key_length").contents() == 128
    assert reader.get_field("qwen3.vocab_size").contents() == 1000
    assert reader.get_field("qwen3.rope.freq_base").contents() == 1e6
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    stored = load_file(tmp_path / "tiny" / "model.safetensors")
    assert {writer.gguf_name(name) for name in stored} == tensors.keys()
    for name, tensor in stored.items():
        written = tensors[writer.gguf_name(name)]
        values = gguf.dequantize(written.data, written.tensor_type).reshape(tensor.shape)
        expected = tensor.float().numpy()
        if tensor.ndim == 1:
            assert np.array_equal(values, expected)
            continue
        kind = "Q8_0" if "embed_tokens" in name else "Q4_0"
        assert written.tensor_type.name == kind
        steps = {"Q8_0": 127, "Q4_0": 8}[kind]
        largest = np.abs(expected).reshape(len(expected), -1, 32).max(2).repeat(32, 1).reshape(expected.shape)
        assert (np.abs(values - expected) <= 1.02 * largest / steps).all()


@pytest.mark.parametrize("name", ["model.layers.0.mlp.router.weight", "vision.proj.weight"])
def test_other_models_are_refused(writer: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a tensor of a dense Qwen3 model"):
        writer.gguf_name(name)
