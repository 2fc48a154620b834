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

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.checkpoint.shapes import SHAPES
from compiled_llm.exact import matrix
from compiled_llm.exact.check import Plan, check, result_of
from tests.exact.plans import FEW_GRAPHS, keep, kernels, plan_of, uncompiled
from tests.families import EVERY_CONFIG, checkpoint

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
