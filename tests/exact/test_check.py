"""All settings of the matrix are equal, on the demo model and on odd ones, and nothing is left out in silence."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.checkpoint.shapes import SHAPES
from compiled_llm.exact import matrix
from compiled_llm.exact.check import Plan, check, result_of
from tests.exact.plans import FEW_GRAPHS, keep, kernels, plan_of, uncompiled
from tests.families import EVERY_CONFIG, checkpoint, strengthened

# Of CONFIGS: windows, soft caps and heads of 24 elements; biases and one KV head for each query head.
IN_CI = {"gemma2": "fp8", "llama-biases": "int8"}
ALL_SIZES = tuple(matrix.SIZES)


def check_equal(plan: Plan, requests: int, comparisons: int) -> None:
    """All settings are equal, nothing was left out, and at least so much was compared."""
    outcomes, first = check(plan, disable_bar=True)
    assert first is None, str(first)
    assert [outcome.missing for outcome in outcomes if outcome.missing] == []
    assert len(outcomes) == len(plan.settings) - len({setting.kv_cache for setting in plan.settings})
    assert sum(outcome.requests for outcome in outcomes) >= requests
    assert sum(outcome.compared["logits"] for outcome in outcomes) >= comparisons


@pytest.mark.battery
def test_the_demo_model_compiled() -> None:
    """With the default buckets."""
    check_equal(keep(plan_of(caches=["auto"], sizes=["default"]), lambda setting: setting.compiled), 80, 800)


def test_the_demo_model_uncompiled() -> None:
    """With a quantised cache."""
    check_equal(uncompiled(plan_of(caches=["int8"], num_requests=6, num_tokens=4)), 25, 100)


@pytest.mark.battery
@pytest.mark.parametrize(("name", "compiled"), [("gemma2", False), *((name, True) for name in IN_CI)])
def test_odd_models(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few buckets, and compared with many uncompiled ones."""
    monkeypatch.setitem(matrix.SIZES, "few", FEW_GRAPHS)
    plan = uncompiled(
        plan_of(checkpoint(name), caches=[IN_CI[name]], sizes=ALL_SIZES[:-1], num_requests=5, num_tokens=5)
    )
    settings = matrix.settings_of([IN_CI[name]], ["few"], [compiled]) + plan.settings
    check_equal(dataclasses.replace(plan, settings=settings), 100, 500)


@pytest.mark.battery
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["demo", *EVERY_CONFIG])
def test_every_family_in_full(name: str, dtype: str) -> None:
    model = DEMO_MODEL if name == "demo" else checkpoint(name)
    check_equal(plan_of(model, dtype, sizes=ALL_SIZES, num_requests=20, num_tokens=32), 500, 5000)


def shape(name: str, directory: Path) -> Path:
    """A directory with the config alone of a shape, for random weights."""
    (directory / "config.json").write_text(json.dumps(SHAPES[name]))
    return directory


@pytest.mark.battery
def test_qwen3_of_600_million(tmp_path: Path) -> None:
    check_equal(plan_of(shape("qwen3-0.6b", tmp_path), num_requests=16, load_format="dummy"), 500, 5000)


# Layers wide enough for groups of int4 weights: three of Gemma 3 270M, and such as Qwen3-30B-A3B's, of a quarter of the
# width and 16 of 128 experts.
_WIDE: dict[str, Any] = {
    "vocab_size": 4096, "max_position_embeddings": 2048, "initializer_range": 0.1, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 3,
}  # fmt: skip
WIDE_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3ForCausalLM", {
        **_WIDE, "hidden_size": 640, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "sliding_window": 512, "query_pre_attn_scalar": 256,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {
        **_WIDE, "hidden_size": 512, "intermediate_size": 1536, "moe_intermediate_size": 256, "head_dim": 128,
        "num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 4,
        "norm_topk_prob": True, "mlp_only_layers": [1],
    }),
}  # fmt: skip


def save_wide(name: str, directory: Path) -> None:
    """The model, with seeded random weights in bfloat16."""
    class_name, fields = WIDE_CONFIGS[name]
    model = getattr(transformers, class_name)
    torch.manual_seed(0)
    strengthened(model(model.config_class(**fields)).eval()).to(torch.bfloat16).save_pretrained(directory)


@pytest.mark.battery
@pytest.mark.parametrize("quantization", [None, "int8", "int4_w4a8"])
@pytest.mark.parametrize("name", WIDE_CONFIGS)
def test_rounded_weights_of_wide_layers(name: str, quantization: str | None, tmp_path: Path) -> None:
    save_wide(name, tmp_path)
    check_equal(plan_of(tmp_path, num_requests=12, num_tokens=16, quantization=quantization), 350, 6000)


@pytest.mark.battery
@pytest.mark.parametrize(
    ("isa", "name"),
    [
        *itertools.product(["avx512_bf16", "avx512", "avx2", "portable"], ["demo", "gemma2"]),
        *itertools.product(["avx512_bf16", "portable"], ["qwen3-0.6b"]),  # the last one takes an hour
    ],
)
def test_every_instruction_set(isa: str, name: str, tmp_path: Path) -> None:
    """The C++ kernels limited to it, and torch's own code without any; read once, so in a process of its own."""
    if isa not in kernels("linear_cpu").supported_isas():
        pytest.skip("not of this CPU")
    command = [sys.executable, "-m", "compiled_llm", "exact", "--quick", "--dtype", "bfloat16", "--requests", "16"]
    if name == "qwen3-0.6b":
        command += ["--model", str(shape(name, tmp_path)), "--load-format", "dummy", "--tokens", "10"]
    else:
        command += ["--model", str(DEMO_MODEL if name == "demo" else checkpoint(name))]
    environment = (
        os.environ | {"COMPILED_LLM_ISA": isa} | ({"ATEN_CPU_CAPABILITY": "default"} if isa == "portable" else {})
    )
    command += ["--json", str(tmp_path / "result.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["verdict"], result["machine"]["isa"]) == ("equal", isa)
    assert result["requests"] >= 500
    assert result["logits"] >= 5000


# name -> what is unlike ``bucket_sizes=(1, 8)`` and chunks of 64 tokens
CASE: dict[str, dict[str, Any]] = {
    "as it is": {},
    "40 KV blocks": {"num_kv_blocks": 40},
    "one bucket of 1": {"bucket_sizes": (1,)},
    "chunks of 512": {"token_bucket_sizes": (512,)},
    "eager": {"enforce_eager": True},
}


@pytest.mark.parametrize("kv_cache_dtype", [pytest.param("auto", marks=pytest.mark.battery), "fp8"])
@pytest.mark.parametrize("is_eager", [True, pytest.param(False, marks=pytest.mark.battery)])
def test_prompts_of_700_characters(kv_cache_dtype: str, is_eager: bool) -> None:
    """Once, compiled buckets gave some of these other tokens."""
    count, num_tokens = (4, 12) if is_eager else (20, 24)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [text for path in files if len(text := path.read_text(errors="replace")) > 8000][:count]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=3)
    records = {}
    for name, arguments in CASE.items():
        sizes = {"bucket_sizes": (1, 8), "token_bucket_sizes": (64,), "num_kv_blocks": 400, "enforce_eager": is_eager}
        with CompiledEngine(kv_cache_dtype=kv_cache_dtype, **sizes | arguments) as engine:
            assert engine.tokenizer is not None
            requests = [matrix.Request(engine.tokenizer.encode(text[4000:4700]), params) for text in texts]
            recorder = matrix.StepRecorder(engine)
            outputs = matrix.serve(engine, requests, range(len(requests)))
            records[name] = {index: recorder.finish(output) for index, output in outputs.items()}
        compared, differing = matrix.compare(records["as it is"], records[name])
        assert differing == {}, name
        assert compared["logits"] >= count * num_tokens


def test_a_setting_that_did_not_come_about_is_no_proof() -> None:
    plan = uncompiled(plan_of(checkpoint("llama-biases"), caches=["auto"], num_requests=1, num_tokens=2))
    outcomes, first = check(plan, disable_bar=True)
    assert {outcome.missing for outcome in outcomes} >= {None, "nothing was preempted"}
    assert result_of(outcomes, first)["verdict"] == "not proven"
