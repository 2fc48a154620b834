"""check_exact: the matrix is equal on the demo model and odd ones, and planted differences are found and named."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.ops import native
from tests.families import CONFIGS, checkpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"
# Of CONFIGS: windows, soft caps and heads of 24 elements; biases and one KV head for each query head.
IN_CI = {"gemma2": "fp8", "llama-biases": "int8"}
FEW_GRAPHS = {"bucket_sizes": (8,), "token_bucket_sizes": (64,)}


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        import check_exact

        yield check_exact


def plan_of(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["check_exact.py", *words])
    return script.make_plan(script.parse_arguments())


def keep(plan: Any, wanted: Callable[[Any], bool]) -> Any:
    """The plan with some of its settings."""
    return dataclasses.replace(plan, settings=[setting for setting in plan.settings if wanted(setting)])


def check_equal(script: ModuleType, plan: Any, requests: int, comparisons: int) -> None:
    """All settings are equal, nothing was left out, and at least so much was compared."""
    outcomes, first = script.check(plan, disable_bar=True)
    assert first is None, str(first)
    assert [outcome.missing for outcome in outcomes if outcome.missing] == []
    assert len(outcomes) == len(plan.settings) - len({setting.kv_cache for setting in plan.settings})
    assert sum(outcome.requests for outcome in outcomes) >= requests
    assert sum(outcome.compared["logits"] for outcome in outcomes) >= comparisons


# -- Equal


def test_the_demo_model(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled with the default buckets, whose graphs other tests have, too; the quantised caches uncompiled."""
    words = ["--requests", "9", "--tokens", "10"]
    plan = plan_of(script, monkeypatch, *words)
    compiled = keep(plan, lambda s: s.sizes == "default" and s.kv_cache == "auto")
    check_equal(script, compiled, 80, 800)
    eager = keep(plan_of(script, monkeypatch, *words, "--quick"), lambda s: not s.compiled and s.kv_cache != "auto")
    check_equal(script, eager, 80, 800)


@pytest.mark.parametrize("name", IN_CI)
def test_odd_models(name: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled with few buckets, and compared with many uncompiled ones."""
    monkeypatch.setitem(sys.modules["exact_matrix"].SIZES, "few", FEW_GRAPHS)
    words = ["--dtype", "bfloat16", "--kv-cache-dtypes", IN_CI[name], "--requests", "9", "--tokens", "10"]
    plan = plan_of(script, monkeypatch, "--model", str(checkpoint(name)), *words)
    settings = sys.modules["exact_matrix"].settings_of([IN_CI[name]], ["few"], [True])
    settings += keep(plan, lambda setting: not setting.compiled and setting.sizes != "default").settings
    check_equal(script, dataclasses.replace(plan, settings=settings), 150, 1500)


@pytest.mark.battery
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["demo", *CONFIGS])
def test_every_family_in_full(name: str, dtype: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(DEMO_MODEL if name == "demo" else checkpoint(name))
    check_equal(script, plan_of(script, monkeypatch, "--model", model, "--dtype", dtype), 500, 5000)


@pytest.mark.battery
def test_qwen3_of_600_million(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        from bench.workloads import SHAPES
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
    words = ["--quick", "--model", str(tmp_path), "--load-format", "dummy", "--dtype", "bfloat16"]
    check_equal(script, plan_of(script, monkeypatch, *words, "--requests", "12", "--tokens", "12"), 500, 5000)


# -- Planted differences


@contextlib.contextmanager
def replaced(op: str, implementation: Callable) -> Iterator[None]:
    """An op with another implementation on CPUs, for compiled code too."""
    for name in ("attention_cpu", "linear_cpu", "rowwise_cpu"):  # whose own must be there, to be replaced
        kernels(name)
    with torch.library._scoped_library("compiled_llm", "IMPL") as library:
        library.impl(op, implementation, "CPU", allow_override=True)
        yield


def kernels(name: str) -> Any:
    module = native.load(name)
    if module is None:
        pytest.skip("needs a C++ compiler")
    return module


def _truncated(x: Tensor) -> Tensor:
    """bfloat16 without its last bit."""
    return (x.view(torch.int16) & -2).view(torch.bfloat16)


def rounded_in_chunks(*args: Any) -> Tensor:
    """Attention of layers without a window that rounds otherwise where a request has several tokens in a step."""
    max_query_len, window = args[-3:-1]
    attended = kernels("attention_cpu").paged_attention(*args)
    return _truncated(attended) if max_query_len > 1 and window == 0 else attended


def summed_otherwise_for_many_rows(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """A linear layer of 160 inputs that adds two halves up, each rounded, where there are more than 8 rows."""
    if x.shape[0] <= 8 or x.shape[1] != 160:
        return kernels("linear_cpu").packed_linear(x, packed, bias, out_features)
    weight = packed.transpose(1, 2).reshape(-1, 160)[:out_features]
    halves = [(x[:, part].float() @ weight[:, part].float().T).to(x.dtype) for part in (slice(80), slice(80, 160))]
    return halves[0] + halves[1] if bias is None else halves[0] + halves[1] + bias


def summed_in_halves_for_a_row(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A norm that adds its squares up in two halves, the first of them rounded, in a step of a single row."""
    if x.shape[0] > 1:
        return kernels("rowwise_cpu").rms_norm(x, weight, eps)
    first, second = x.float().square().chunk(2, dim=-1)
    total = first.sum(-1, keepdim=True).to(x.dtype) + second.sum(-1, keepdim=True)
    y = x.float() * torch.rsqrt(total / x.shape[-1] + eps)
    return weight * y.to(x.dtype) if weight.dtype == x.dtype else (y * weight).to(x.dtype)


# name -> (op, what takes its place, where the settings part)
PLANTED: dict[str, tuple[str, Callable, str]] = {
    "a rounding in chunks": ("paged_attention", rounded_in_chunks, "layers.1.attention"),
    "an order of sums by rows": ("packed_linear", summed_otherwise_for_many_rows, "layers.0.mlp.down"),
    "a reduction by bucket": ("rms_norm", summed_in_halves_for_a_row, "layers.0.input_norm"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found_and_named(
    name: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    op, implementation, where = PLANTED[name]
    words = [
        "--quick",
        "--model",
        str(checkpoint("gemma2")),
        "--dtype",
        "bfloat16",
        "--requests",
        "9",
        "--tokens",
        "10",
    ]
    words += ["--kv-cache-dtypes", "auto", "--json", str(tmp_path / "result.json")]
    plan = plan_of(script, monkeypatch, *words)
    eager = keep(plan, lambda setting: not setting.compiled)
    monkeypatch.setattr(script, "make_plan", lambda args: eager)
    with replaced(op, implementation):
        assert script.main() == 1
    result = json.loads((tmp_path / "result.json").read_text())
    begins = result["first_difference"]["begins"]
    assert (result["verdict"], begins["where"], begins["op"]) == ("different", where, f"compiled_llm::{op}")
    assert begins["is_result"]
    assert begins["only_compiled"] is None
    assert begins["position"] <= result["first_difference"]["position"]
    assert "elements differ, the most by" in begins["difference"]
    said = capsys.readouterr().out
    assert f"{where}: compiled_llm::{op}: its result differs, and all that goes into it is equal" in said
    assert "DIFFERENT" in said
