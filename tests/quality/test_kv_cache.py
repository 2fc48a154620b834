"""Bars on the demo model's quality with quantised caches, from a measured run, and what a bad scale leads to."""

import json
import shutil
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.commands.report.kv_cache import main
from compiled_llm.quality import kv_cache, teacher_forcing
from compiled_llm.quantizing.texts import Text, cut_windows
from tests.drawn import marked
from tests.families import checkpoint

NUM_TOKENS = 1024


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_text(Path(textwrap.__file__).read_text()[1000:1400])
    return path


# Twice what these tokens gave when the bars were set; docs/design.md has the figures of the whole text.
BARS = {
    "int8": {"kl_mean": 1.4e-4, "kl_p99": 1e-3, "perplexity_change": 1e-3, "top1_agreement": 0.985},
    "fp8": {"kl_mean": 3.4e-3, "kl_p99": 2.4e-2, "perplexity_change": 1e-2, "top1_agreement": 0.95},
}


@pytest.mark.parametrize("kv_cache_dtype", marked(BARS, ["int8"]))
def test_quality_on_the_demo_model(kv_cache_dtype: str) -> None:
    engine, text = EngineConfig(dtype="float32", kv_cache_dtype=kv_cache_dtype), Text(None, NUM_TOKENS)
    model = teacher_forcing.load_model(engine)
    try:
        windows = text.windows(engine, model.config, model.device)
    except ValueError as no_text:
        pytest.skip(str(no_text))
    assert "held out" in text.name
    comparison = kv_cache.compare(model, teacher_forcing.cache_dtypes(model, engine), windows, chunk=100)
    figures, bars = teacher_forcing.summary(comparison), BARS[kv_cache_dtype]
    assert figures["tokens"] == NUM_TOKENS
    assert 0 < figures["kl_mean"] < bars["kl_mean"]
    assert figures["kl_mean"] < figures["kl_p99"] < bars["kl_p99"]
    assert figures["kl_p99"] < figures["kl_max"]
    assert abs(figures["perplexity_change"]) < bars["perplexity_change"]
    assert bars["top1_agreement"] < figures["top1_agreement"] < 1
    assert all(0 < error < 0.1 for error in comparison.output_errors)


def test_one_layer_alone_leaves_those_before_it_as_they_are(text: Path) -> None:
    engine = EngineConfig(dtype="float32")
    model = teacher_forcing.load_model(engine)
    windows = Text(text).windows(engine, model.config, model.device)
    dtypes = [torch.float32, torch.float32, torch.int8, torch.float32]
    comparison = kv_cache.compare(model, dtypes, windows, chunk=32)
    assert comparison.output_errors[:2] == [0.0, 0.0]
    assert all(error > 0 for error in comparison.output_errors[2:])
    nothing = kv_cache.compare(model, [torch.float32] * 4, windows, chunk=32)
    assert not nothing.kl.any()
    assert nothing.output_errors == [0.0] * 4
    assert (nothing.losses[0], nothing.top1) == (nothing.losses[1], 1.0)
    other_chunks = kv_cache.compare(model, dtypes, windows, chunk=1000)
    assert other_chunks.kl.mean().item() == pytest.approx(comparison.kl.mean().item(), rel=0.1)


def test_the_report_ends_in_a_line_of_json(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path) -> None:
    words = ["--kv-cache-dtype", "fp8", "--kv-cache-skip-layers", "1", "--text", str(text)]
    assert main("compiled-llm report kv-cache", [*words, "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "fp8 (bfloat16 in layers 1), 1328 bytes a token, 64.8% of bfloat16's 2048" in out
    line = out.splitlines()[-1]
    assert (tmp_path / "out.json").read_text() == line + "\n"
    result = json.loads(line)
    assert (result["bytes_per_token"], result["bytes_per_token_unquantised"]) == (1328, 2048)
    assert set(result["layers"]) == {"0", "2", "3"}
    assert sorted(result["ranking"]) == [0, 2, 3]
    assert f"--kv-cache-skip-layers {result['ranking'][0]}" in out
    assert "command" in result["machine"]


def test_a_scale_that_is_not_finite_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path) -> None:
    """From end to end: the weights of a norm are so large that keys of layer 2 are infinite."""
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.2.self_attn.k_norm.weight"][:] = 3e38
    save_file(weights, model / "model.safetensors")
    words = ["--kv-cache-dtype", "int8", "--model", str(model), "--text", str(text)]
    with pytest.raises(SystemExit, match="1"):
        main("compiled-llm report kv-cache", words)
    captured = capsys.readouterr()
    assert "error: layer 2: the scale of the keys of token 0, KV head 0, is nan" in captured.err
    assert captured.out == ""


def test_a_model_with_states_in_any_chunks() -> None:
    """Chunks change nothing but what rounding makes of a longer sum; its layers with a state have no KV cache."""
    model = teacher_forcing.load_model(EngineConfig(model=str(checkpoint("lfm2")), dtype="float32"))
    assert kv_cache.quantised_layers(model.config, ()) == [1]
    tokens = torch.randint(3, 300, (101,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    windows = cut_windows([tokens.tolist()], 100, None, torch.device("cpu"))
    dtypes = [torch.int8 if layer == 1 else torch.float32 for layer in range(4)]
    whole, cut = (kv_cache.compare(model, dtypes, windows, chunk) for chunk in (100, 13))
    assert cut.losses == pytest.approx(whole.losses, abs=1e-6)
    assert 0 < whole.kl.mean() < 1e-2
