"""kv_report: bars on the demo model's quality from a measured run, what a bad scale leads to, and the report itself."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_llm.engine.engine import DEMO_MODEL
from tests.families import checkpoint

SCRIPT = Path(__file__).parents[2] / "scripts" / "kv_report.py"
NUM_TOKENS = 1024


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kv_report", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_text(SCRIPT.read_text()[:400])
    return path


def arguments(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str):
    monkeypatch.setattr(sys, "argv", ["kv_report.py", *words])
    return script.parse_arguments()


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kv_report.py", *words])
    try:
        return script.main()
    except SystemExit as bad_arguments:
        return int(bad_arguments.code or 0)


# Twice what these tokens gave when the bars were set; docs/design.md has the figures of the whole text.
BARS = {
    "int8": {"kl_mean": 1.4e-4, "kl_p99": 1e-3, "perplexity_change": 1e-3, "top1_agreement": 0.985},
    "fp8": {"kl_mean": 3.4e-3, "kl_p99": 2.4e-2, "perplexity_change": 1e-2, "top1_agreement": 0.95},
}


@pytest.mark.parametrize("kv_cache_dtype", BARS)
def test_quality_on_the_demo_model(script: ModuleType, monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str) -> None:
    words = ["--dtype", "float32", "--max-tokens", str(NUM_TOKENS), "--chunk", "100"]
    args = arguments(script, monkeypatch, "--kv-cache-dtype", kv_cache_dtype, *words)
    model, dtypes = script.load_model(args)
    try:
        text, windows = script.read_windows(args, model.config, model.device)
    except ValueError as no_text:
        pytest.skip(str(no_text))
    assert "held out" in text
    comparison = script.compare(model, dtypes, windows, args.chunk)
    figures, bars = script.summary(comparison), BARS[kv_cache_dtype]
    assert figures["tokens"] == NUM_TOKENS
    assert 0 < figures["kl_mean"] < bars["kl_mean"]
    assert figures["kl_mean"] < figures["kl_p99"] < bars["kl_p99"]
    assert figures["kl_p99"] < figures["kl_max"]
    assert abs(figures["perplexity_change"]) < bars["perplexity_change"]
    assert bars["top1_agreement"] < figures["top1_agreement"] < 1
    assert all(0 < error < 0.1 for error in comparison.output_errors)


def test_one_layer_alone_leaves_those_before_it_as_they_are(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, text: Path
) -> None:
    args = arguments(script, monkeypatch, "--kv-cache-dtype", "int8", "--text", str(text), "--dtype", "float32")
    model, _ = script.load_model(args)
    _, windows = script.read_windows(args, model.config, model.device)
    dtypes = [torch.float32, torch.float32, torch.int8, torch.float32]
    comparison = script.compare(model, dtypes, windows, chunk=32)
    assert comparison.output_errors[:2] == [0.0, 0.0]
    assert all(error > 0 for error in comparison.output_errors[2:])
    nothing = script.compare(model, [torch.float32] * 4, windows, chunk=32)
    assert not nothing.kl.any()
    assert nothing.output_errors == [0.0] * 4
    assert (nothing.losses[0], nothing.top1) == (nothing.losses[1], 1.0)
    other_chunks = script.compare(model, dtypes, windows, chunk=1000)
    assert other_chunks.kl.mean().item() == pytest.approx(comparison.kl.mean().item(), rel=0.1)


def test_the_report_ends_in_a_line_of_json(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: Path,
) -> None:
    words = ["--kv-cache-dtype", "fp8", "--skip-layers", "1", "--text", str(text), "--json", str(tmp_path / "out.json")]
    assert run(script, monkeypatch, *words) == 0
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


def test_a_scale_that_is_not_finite_is_refused(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: Path,
) -> None:
    """From end to end: the weights of a norm are so large that keys of layer 2 are infinite."""
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.2.self_attn.k_norm.weight"][:] = 3e38
    save_file(weights, model / "model.safetensors")
    assert run(script, monkeypatch, "--kv-cache-dtype", "int8", "--model", str(model), "--text", str(text)) == 1
    captured = capsys.readouterr()
    assert "refused: layer 2: the scale of the keys of token 0, KV head 0, is nan" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv-cache-dtype", "bfloat16"], "kv-cache-dtype"),
        ([], "kv-cache-dtype"),
        (["--skip-layers", "4"], "kv_cache_skip_layers must be layers of the model, 0 to 3"),
        (["--skip-layers", "1,1"], "duplicates"),
        (["--skip-layers", "0,1,2,3"], "leave a layer"),
        (["--skip-layers", "one"], "skip-layers"),
        (["--text", "no-such-file.txt"], "no-such-file.txt"),
        (["--model", "/no/such/directory"], "/no/such/directory"),
        (["--window", "1025"], "at most the model's length, 1024"),
        (["--chunk", "0"], "--chunk must be at least 1"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["--dtype", "int8"], "dtype"),
        (["--device", "tpu"], "device"),
        (["--json", "/no/such/directory/out.json"], "/no/such/directory"),
    ],
)
def test_bad_arguments_exit_with_2(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    given = words if "kv-cache-dtype" in message else ["--kv-cache-dtype", "int8", *words]
    assert run(script, monkeypatch, *given) == 2
    assert message in capsys.readouterr().err


def test_a_model_with_states_in_any_chunks(script: ModuleType) -> None:
    """Chunks change nothing but what rounding makes of a longer sum; its layers with a state have no KV cache."""
    model = script.teacher_forcing.load_model(script.EngineConfig(dtype="float32"), checkpoint("lfm2"))
    assert script.quantised_layers(model.config, ()) == [1]
    tokens = torch.randint(3, 300, (101,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    windows = script.teacher_forcing.cut_windows([tokens.tolist()], 100, None, torch.device("cpu"))
    dtypes = [torch.int8 if layer == 1 else torch.float32 for layer in range(4)]
    whole, cut = (script.compare(model, dtypes, windows, chunk) for chunk in (100, 13))
    assert cut.losses == pytest.approx(whole.losses, abs=1e-6)
    assert 0 < whole.kl.mean() < 1e-2
