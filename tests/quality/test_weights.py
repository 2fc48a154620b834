"""Bars on the demo model's quality with quantised weights, one layer alone, a published checkpoint, and speed."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.commands import quantize
from compiled_llm.commands.report.weights import main
from compiled_llm.models.registry import family_of
from compiled_llm.quality.teacher_forcing import Model, compare, load_model
from compiled_llm.quality.weights import quantised_parts, run_with_layer
from compiled_llm.quantizing.texts import Window
from compiled_llm.step.kv_cache import allocate
from tests import families


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_text(Path(textwrap.__file__).read_text()[1000:3000])
    return path


def report(path: Path, *words: str) -> dict[str, Any]:
    """The JSON of a run in ``path``; without speed unless ``words`` say so."""
    assert main("compiled-llm report weights", ["--speed-tokens", "0", "--json", str(path), *words]) == 0
    return json.loads(path.read_text())


# About twice what these tokens gave when the bars were set: KL divergence; bytes of the linear layers of float32's.
BARS = {
    "int8": (0.0004, 0.26),
    "int8_w8a8": (0.0015, 0.26),
    "int4": (0.03, 0.20),
    "int4_w4a8": (0.03, 0.20),
    "fp8": (0.004, 0.26),
    "mxfp4": (0.1, 0.20),
}


@pytest.mark.parametrize("kinds", [("int8", "fp8", "int4"), pytest.param((*BARS,), marks=pytest.mark.battery)])
def test_quality_on_the_demo_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path, kinds: tuple[str, ...]
) -> None:
    words = ["--quantization", ",".join(kinds), "--dtype", "float32", "--text", str(text), "--no-layers"]
    result = report(tmp_path / "out.json", *words)
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == result
    for kind in kinds:
        found, (most, share) = result["kinds"][kind], BARS[kind]
        assert 0 < found["kl_mean"] < most, kind
        assert found["linear_bytes"] < share * result["linear_bytes"], kind
        assert abs(found["perplexity_change"]) < 0.06
    assert result["kinds"]["int8"]["kl_mean"] < result["kinds"]["fp8"]["kl_mean"] < result["kinds"]["int4"]["kl_mean"]


def test_layers_are_ranked(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path) -> None:
    words = ["--quantization", "int4", "--text", str(text), "--max-tokens", "128"]
    found = report(tmp_path / "out.json", *words)["kinds"]["int4"]
    assert set(found["layers"]) == {*(f"layers.{i}" for i in range(4)), "head"}
    causes = [found["layers"][name]["kl_mean"] for name in found["ranking"]]
    assert causes == sorted(causes, reverse=True)
    assert causes[-1] > 0
    assert all(0 < part["output_error"] < 0.3 for part in found["layers"].values())
    out = capsys.readouterr().out
    kept = found["worth_keeping"] or found["ranking"][:1]
    assert kept
    assert "head" not in kept
    assert " ".join(f"--quantization-skip {name}" for name in kept) in out


def test_one_layer_alone_leaves_those_before_it_as_they_are() -> None:
    own = load_model(EngineConfig(dtype="float32"))
    other = load_model(EngineConfig(dtype="float32", quantization="int4"))
    parts = {part.name: part for part in quantised_parts(own, other)}
    alone, tokens = own._replace(weights=parts["layers.2"].weights), torch.arange(100, 140, dtype=torch.int32)

    def outputs(model: Model, layer: int) -> Any:
        cache = allocate(model.config, [torch.float32] * 4, 4, 16, model.device)
        return run_with_layer(model, cache, tokens, 0, layer)

    for layer in range(4):
        (own_logits, [mine]), (logits, [theirs]) = outputs(own, layer), outputs(alone, layer)
        assert torch.equal(mine, theirs) == (layer < 2)
    assert not torch.equal(own_logits, logits)
    assert torch.equal(family_of(own.config).head(own.weights, mine, own.config), own_logits)


def test_skipped_layers_are_not_measured(tmp_path: Path, text: Path) -> None:
    words = ["--quantization", "int4", "--quantization-skip", "layers.0", "--quantization-skip", "layers.3"]
    words += ["--quantization-head", "none", "--quantization-group-size", "64", "--text", str(text)]
    words += ["--max-tokens", "64"]
    result = report(tmp_path / "out.json", *words)
    assert set(result["kinds"]["int4"]["layers"]) == {"layers.1", "layers.2"}


@pytest.mark.parametrize("name", ["gemma4", "gpt2", "gpt-neox", "qwen3-moe"])
def test_families_can_end_at_a_layer(name: str) -> None:
    common: dict[str, Any] = {"model": str(families.checkpoint(name)), "dtype": "float32"}
    own, other = load_model(EngineConfig(**common)), load_model(EngineConfig(**common, quantization="int8"))
    parts = list(quantised_parts(own, other))
    windows = [Window(torch.arange(20, dtype=torch.int32), torch.arange(1, 21, dtype=torch.int32))]
    dtypes = [torch.float32] * own.config.num_layers
    assert len([part for part in parts if part.name not in ("head", "embedding")]) == own.config.num_layers
    for part in parts:
        one = own._replace(weights=part.weights)
        assert 0 < compare(own, one, dtypes, windows, 8, run=part.run).output_errors[0] < 0.2, part.name


@pytest.mark.battery
def test_a_quantised_checkpoint_is_as_the_same_made_at_load(tmp_path: Path, text: Path) -> None:
    directory = tmp_path / "quantised"
    words = ["--method", "rtn", "--kind", "mxfp4", "--eval-max-tokens", "0", "--text", str(text)]
    assert quantize.main("compiled-llm quantize", ["--output", str(directory), *words]) == 0
    common = ["--text", str(text), "--max-tokens", "128"]
    published = report(tmp_path / "out.json", "--quantized-model", str(directory), *common)
    words = ["--quantization", "mxfp4", "--quantization-head", "none", *common]
    at_load = report(tmp_path / "out.json", *words)["kinds"]["mxfp4"]
    rounding = at_load.pop("weight_rounding")
    assert 0.05 < rounding["error"] <= rounding["worst_error"] < 0.2
    assert rounding["worst"].startswith("model.layers.")
    (found,) = published["kinds"].values()
    assert found == at_load
    assert set(found["layers"]) == {f"layers.{i}" for i in range(4)}


def test_speed_and_a_quantised_cache(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path) -> None:
    words = ["--quantization", "int8", "--text", str(text), "--kv-cache-dtype", "int8", "--enforce-eager"]
    words += ["--speed-tokens", "4", "--speed-prompt", "40", "--no-layers"]
    result = report(tmp_path / "out.json", *words)
    assert "int8, 1088 bytes a token" in result["kv_cache"]
    found = result["kinds"]["int8"]
    assert "layers" not in found
    rates = found["speed"]
    assert (rates["prompt_tokens"], rates["output_tokens"]) == (40, 4)
    assert all(rates[what][name] > 0 for what in ("prefill", "decode") for name in ("own", "quantised"))
    assert all(0.05 < rates[f"{what}_ratio"] < 20 for what in ("prefill", "decode"))
    assert "decode, times" in capsys.readouterr().out


def test_another_model_is_refused(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    words = ["--quantized-model", str(families.checkpoint("gpt2")), "--text", str(text)]
    with pytest.raises(SystemExit, match="2"):
        main("compiled-llm report weights", words)
    assert "--quantized-model must have the architecture of --model, Qwen3ForCausalLM" in capsys.readouterr().err
