"""weights_report: bars on the demo model's quality, one layer alone, a published checkpoint, speed, bad arguments."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.step.kv_cache import allocate
from tests import families

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("weights_report")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_text((SCRIPTS / "kv_report.py").read_text()[1000:3000])
    return path


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    try:
        return script.main()
    except SystemExit as ended:
        return int(ended.code or 0)


def report(script: ModuleType, monkeypatch: pytest.MonkeyPatch, path: Path, *words: str) -> dict:
    """The JSON of a run in ``path``; without speed unless ``words`` say so."""
    assert run(script, monkeypatch, "--speed-tokens", "0", "--json", str(path), *words) == 0
    return json.loads(path.read_text())


# About twice what these tokens gave when the bars were set: KL divergence; bytes of the linear layers of float32's.
BARS = {
    "int8": (0.0004, 0.26),
    "int8_w8a8": (0.0015, 0.26),
    "int4": (0.05, 0.20),
    "int4_w4a8": (0.05, 0.20),
    "fp8": (0.004, 0.26),
    "mxfp4": (0.1, 0.20),
}


def test_quality_on_the_demo_model(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path
) -> None:
    words = ["--quantization", ",".join(BARS), "--dtype", "float32", "--text", str(text), "--no-layers"]
    result = report(script, monkeypatch, tmp_path / "out.json", *words)
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == result
    for kind, (most, share) in BARS.items():
        found = result["kinds"][kind]
        assert 0 < found["kl_mean"] < most, kind
        assert found["linear_bytes"] < share * result["linear_bytes"], kind
        assert abs(found["perplexity_change"]) < 0.06
    assert result["kinds"]["int8"]["kl_mean"] < result["kinds"]["fp8"]["kl_mean"] < result["kinds"]["int4"]["kl_mean"]


def test_layers_are_ranked(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path
) -> None:
    words = ["--quantization", "int4", "--text", str(text), "--max-tokens", "128"]
    found = report(script, monkeypatch, tmp_path / "out.json", *words)["kinds"]["int4"]
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


def test_one_layer_alone_leaves_those_before_it_as_they_are(script: ModuleType) -> None:
    own = script.load_model(EngineConfig(dtype="float32"), DEMO_MODEL)
    other = script.load_model(EngineConfig(dtype="float32", quantization="int4"), DEMO_MODEL)
    parts = {part.name: part for part in script.quantised_parts(own, other)}
    alone, tokens = own._replace(weights=parts["layers.2"].weights), torch.arange(100, 140, dtype=torch.int32)

    def outputs(model, layer: int):
        cache = allocate(model.config, [torch.float32] * 4, 4, 16, model.device)
        return script.run_with_layer(model, cache, tokens, 0, layer)

    for layer in range(4):
        (own_logits, [mine]), (logits, [theirs]) = outputs(own, layer), outputs(alone, layer)
        assert torch.equal(mine, theirs) == (layer < 2)
    assert not torch.equal(own_logits, logits)
    assert torch.equal(script.family_of(own.config).head(own.weights, mine, own.config), own_logits)


def test_skipped_layers_are_not_measured(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path
) -> None:
    words = ["--quantization", "int4", "--quantization-skip", "layers.0", "--quantization-skip", "layers.3"]
    words += ["--quantization-head", "none", "--quantization-group-size", "64", "--text", str(text)]
    words += ["--max-tokens", "64"]
    result = report(script, monkeypatch, tmp_path / "out.json", *words)
    assert set(result["kinds"]["int4"]["layers"]) == {"layers.1", "layers.2"}


@pytest.mark.parametrize("name", ["gemma4", "gpt2", "gpt-neox", "qwen3-moe"])
def test_families_can_end_at_a_layer(script: ModuleType, name: str) -> None:
    directory = families.checkpoint(name)
    own = script.load_model(EngineConfig(dtype="float32"), directory)
    other = script.load_model(EngineConfig(dtype="float32", quantization="int8"), directory)
    parts = list(script.quantised_parts(own, other))
    windows = [script.Window(torch.arange(20, dtype=torch.int32), torch.arange(1, 21, dtype=torch.int32))]
    dtypes = [torch.float32] * own.config.num_layers
    assert len([part for part in parts if part.name not in ("head", "embedding")]) == own.config.num_layers
    for part in parts:
        one = own._replace(weights=part.weights)
        assert 0 < script.compare(own, one, dtypes, windows, 8, run=part.run).output_errors[0] < 0.2, part.name


def test_a_quantised_checkpoint_is_as_the_same_made_at_load(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path
) -> None:
    directory = tmp_path / "quantised"
    words = ["--method", "rtn", "--kind", "int4", "--group-size", "32", "--eval-max-tokens", "0", "--text", str(text)]
    assert run(load("quantize_model"), monkeypatch, "--output", str(directory), *words) == 0
    common = ["--text", str(text), "--max-tokens", "128"]
    published = report(script, monkeypatch, tmp_path / "out.json", "--quantized-model", str(directory), *common)
    words = ["--quantization", "int4", "--quantization-head", "none", *common]
    at_load = report(script, monkeypatch, tmp_path / "out.json", *words)["kinds"]["int4"]
    (found,) = published["kinds"].values()
    assert found == at_load
    assert set(found["layers"]) == {f"layers.{i}" for i in range(4)}


def test_speed_and_a_quantised_cache(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path
) -> None:
    words = ["--quantization", "int8", "--text", str(text), "--kv-cache-dtype", "int8", "--enforce-eager"]
    words += ["--speed-tokens", "4", "--speed-prompt", "40", "--no-layers"]
    result = report(script, monkeypatch, tmp_path / "out.json", *words)
    assert "int8, 1088 bytes a token" in result["kv_cache"]
    found = result["kinds"]["int8"]
    assert "layers" not in found
    rates = found["speed"]
    assert (rates["prompt_tokens"], rates["output_tokens"]) == (40, 4)
    assert all(rates[what][name] > 0 for what in ("prefill", "decode") for name in ("own", "quantised"))
    assert all(0.05 < rates[f"{what}_ratio"] < 20 for what in ("prefill", "decode"))
    assert "decode, times" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either --quantization"),
        (["--quantization", "int8", "--quantized-model", "x"], "give either --quantization"),
        (["--quantization", "int8,int5"], "quantization must be"),
        (["--quantization", "int8,fp8", "--quantization-group-size", "64"], "quantization_group_size must be None"),
        (["--quantization", "int4", "--quantization-group-size", "48"], "quantization_group_size must be one of"),
        (["--quantization", "int4", "--quantization-head", "int3"], "quantization_head must be"),
        (["--quantized-model", "x", "--quantization-skip", "layers.0"], "without quantization"),
        (
            ["--quantization", "int8", "--quantization-skip", "*", "--quantization-head", "none"],
            "no layer is quantised",
        ),
        (["--quantization", "int8", "--speed-tokens", "1"], "--speed-tokens must be"),
        (["--quantization", "int8", "--speed-tokens", "1024"], "--speed-tokens must be below"),
        (["--quantization", "int8", "--text", "no-such-file.txt"], "no-such-file.txt"),
        (["--quantization", "int8", "--window", "1025"], "at most the model's length, 1024"),
        (["--quantized-model", "/no/such/directory"], "/no/such/directory"),
        (["--quantization", "int8", "--kv-cache-dtype", "int4"], "kv-cache-dtype"),
        (["--quantization", "int8", "--json", "/no/such/directory/out.json"], "/no/such/directory"),
    ],
)
def test_bad_arguments_exit_with_2(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    assert run(script, monkeypatch, "--max-tokens", "8", *words) == 2
    assert message in capsys.readouterr().err


def test_another_model_is_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: Path
) -> None:
    other = str(families.checkpoint("gpt2"))
    assert run(script, monkeypatch, "--quantized-model", other, "--text", str(text)) == 2
    assert "--quantized-model must have the architecture of --model, Qwen3ForCausalLM" in capsys.readouterr().err
