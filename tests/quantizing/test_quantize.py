"""A quantised checkpoint as transformers and an engine load it, equal bytes, bars, and what no method can do."""

import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from compiled_llm import CompiledEngine
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.commands.quantize import main
from compiled_llm.ops.linear.quantized_weight import dequantize, quantize
from compiled_llm.quantizing.blocks import BlockModel
from compiled_llm.quantizing.model_quantizer import Windows
from compiled_llm.quantizing.quantize import quality_of
from compiled_llm.quantizing.schemes import make_scheme
from compiled_llm.quantizing.texts import Window, held_out_texts
from compiled_llm.text.tokenizer import Tokenizer
from tests.families import CONFIGS


def run(tmp_path: Path, method: str, kind: str, *words: str, name: str = "out") -> dict:
    """The JSON of a run with a small text, whose checkpoint is in ``name-method``."""
    text = tmp_path / "calibration.txt"
    text.write_text(Path(textwrap.__file__).read_text()[:8000])
    flags = ["--text", str(text), "--window", "256", "--max-tokens", "1024", "--eval-max-tokens", "1024"]
    flags += ["--json", str(tmp_path / "out.json")]
    output = str(tmp_path / f"{name}-{method}")
    assert main("compiled-llm quantize", ["--output", output, "--method", method, "--kind", kind, *flags, *words]) == 0
    return json.loads((tmp_path / "out.json").read_text())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("int4", ("--group-size", "32", "--zeros")),
        pytest.param("int4", ("--group-size", "32"), marks=pytest.mark.battery),
        pytest.param("int8", (), marks=pytest.mark.battery),
        pytest.param("fp8", (), marks=pytest.mark.battery),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of the library
def test_transformers_load_what_rounding_gives(tmp_path: Path, kind: str, words: tuple[str, ...]) -> None:
    pytest.importorskip("compressed_tensors")
    run(tmp_path, "rtn", kind, *words, "--eval-max-tokens", "0", "--skip", "layers.0", "down_proj")
    form = make_scheme(kind, 32 if words else None, "--zeros" in words, torch.bfloat16).form
    expected = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    for name, module in expected.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.startswith("0.") and "down_proj" not in name:
            module.weight.data = dequantize(quantize(module.weight.data, form), form)
    # Packed zero points the library reads in this way alone, which rounds the weights to bfloat16.
    reading = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if form.zeros else {}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out-rtn", dtype=torch.float32, **reading)
    ids = torch.arange(64)[None] + 100
    with torch.no_grad():
        wanted = expected(ids).logits
        assert (loaded(ids).logits - wanted).norm() < (0.01 if form.zeros else 1e-4) * wanted.norm()


@pytest.mark.battery
def test_calibrated_int4_is_better_than_rounding_and_the_same_each_time(tmp_path: Path) -> None:
    found = {m: run(tmp_path, m, "int4", "--group-size", "32") for m in ("rtn", "awq", "gptq")}
    assert found["gptq"]["kl_mean"] < found["awq"]["kl_mean"] < found["rtn"]["kl_mean"]
    assert found["gptq"]["perplexity_change"] < 0.03
    assert all(layer["error"] < layer["rtn_error"] for layer in found["gptq"]["layers"])
    again = tmp_path / "again-gptq"
    run(tmp_path, "gptq", "int4", "--group-size", "32", name="again")
    assert (again / "model.safetensors").read_bytes() == (tmp_path / "out-gptq" / "model.safetensors").read_bytes()
    assert "model.layers.0.mlp.up_proj.weight_packed" in load_file(again / "model.safetensors")


@pytest.mark.battery
def test_smoothquant_keeps_the_perplexity(tmp_path: Path) -> None:
    found = run(tmp_path, "smoothquant", "int8_w8a8", "--alpha", "0.5")
    assert abs(found["perplexity_change"]) < 0.005
    config = json.loads((tmp_path / "out-smoothquant" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "int-quantized"
    assert config["ignore"] == ["lm_head"]


def test_the_report_names_experts_that_saw_few_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "experts"
    fields = {**CONFIGS["qwen3-moe"][1], "vocab_size": 8192, "num_hidden_layers": 2, "moe_intermediate_size": 80}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields)).save_pretrained(source)
    for path in DEMO_MODEL.glob("tokenizer*.json"):
        shutil.copyfile(path, source / path.name)
    words = ("--group-size", "16", "--model", str(source), "--max-tokens", "200", "--least-tokens", "90")
    found = run(tmp_path, "gptq", "int4", *words)
    tokens = {layer["name"]: layer["tokens"] for layer in found["layers"] if ".experts." in layer["name"]}
    assert len(tokens) == 7 * 3
    assert found["rounded"] == [name for name, count in tokens.items() if count < 90]
    assert "model.layers.0.mlp.gate" in found["ignored"]
    shown = capsys.readouterr()
    assert f"{len(found['rounded'])} layers of experts that saw fewer than 90 tokens" in shown.out
    assert "of experts with few tokens rounded to nearest" in shown.err
    assert "model.layers.0.mlp.experts.*.down_proj" in shown.out


@pytest.mark.parametrize(
    "words",
    [
        ("rtn", "int4", "--group-size", "32", "--eval-max-tokens", "200"),
        *(
            pytest.param(words, marks=pytest.mark.battery)
            for words in (
                ("rtn", "int4", "--group-size", "32"),
                ("gptq", "int4", "--group-size", "32"),
                ("rtn", "int8"),
                ("smoothquant", "int8_w8a8"),
                ("awq", "int4", "--group-size", "128", "--zeros"),
                ("rtn", "int4_w4a8", "--group-size", "32"),
                ("rtn", "fp8"),
                ("rtn", "mxfp4"),
            )
        ),
    ],
)
def test_an_engine_of_the_written_checkpoint_has_the_perplexity_that_was_measured(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """What the script measures before it writes, in float32, is what an engine computes from the files."""
    found = run(tmp_path, *words)
    tokenizer, ids = Tokenizer(DEMO_MODEL), []
    for text in held_out_texts().values():
        document = tokenizer.encode(text)
        starts = range(0, len(document) - 1, 255)
        ids += [document[start : start + 256] for start in starts]
    left, windows = found["tokens"], []
    while left:
        windows.append(ids.pop(0)[: left + 1])
        left -= len(windows[-1]) - 1
    # A rounding of float32 can turn one of an activation to int8.
    tolerance = 1e-3 if words[1].endswith("a8") else 2e-4
    common = {"dtype": "float32", "enforce_eager": True, "bucket_sizes": (1, 8), "progress": "off"}
    for model, expected in ((DEMO_MODEL, "perplexity"), (tmp_path / f"out-{words[0]}", "perplexity_quantised")):
        engine = CompiledEngine(str(model), **common)
        scores = engine.score([w[:1] for w in windows], [w[1:] for w in windows], use_tqdm=False, raise_on_error=True)
        engine.close()
        logprobs = [logprob for score in scores for logprob in score.logprobs]
        assert len(logprobs) == found["tokens"]
        assert math.exp(-math.fsum(logprobs) / len(logprobs)) == pytest.approx(found[expected], rel=tolerance)


def test_what_is_put_before_a_text_is_not_scored() -> None:
    model, ids = BlockModel(DEMO_MODEL), torch.arange(100, 112, dtype=torch.int32)
    hidden, calls = model.embed([ids])
    found = quality_of(model, [Window(ids[:-1], ids[1:], 3)], Windows(hidden, calls), Windows([-hidden[0]], calls))
    wanted, losses = ids[4:].long(), []
    for x in (hidden[0], -hidden[0]):
        log_probs = model.logits(x)[3:-1].double().log_softmax(-1)
        losses.append(-log_probs[torch.arange(8), wanted].mean().item())
    assert found["tokens"] == 8
    assert [math.log(found[name]) for name in ("perplexity", "perplexity_quantised")] == pytest.approx(losses)


def test_logits_are_computed_of_what_is_evaluated_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary's may take longer than all blocks."""
    model = BlockModel(DEMO_MODEL)

    def refuse(*args: object) -> None:
        raise RuntimeError("logits")

    monkeypatch.setattr(model.model.lm_head, "forward", refuse)
    hidden, _ = model.embed([torch.arange(100, 112)])
    with pytest.raises(RuntimeError, match="logits"):
        model.logits(hidden[0])


def test_threads_do_not_spin_while_they_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads that when it is imported; a process that has imported it keeps its environment."""
    words = ["--output", str(tmp_path / "out"), "--method", "gptq", "--kind", "int4", "--model", str(tmp_path / "none")]
    code = (
        "import importlib.abc, os, sys\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch': sys.exit(os.environ.get('OMP_WAIT_POLICY', 'not set'))\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from compiled_llm.commands.quantize import main\n"
        f"main('compiled-llm quantize', {words!r})"
    )
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False)
    assert ended.stderr.splitlines()[-1] == "passive"
    with pytest.raises(SystemExit, match="2"):
        main("compiled-llm quantize", words)
    assert "OMP_WAIT_POLICY" not in os.environ
