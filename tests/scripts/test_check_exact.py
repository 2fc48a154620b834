"""check_exact: the matrix is equal on the demo model and odd ones, and planted differences are found and named."""

import contextlib
import dataclasses
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.ops import native
from tests.families import CONFIGS, checkpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"
IN_CI = ("gemma2", "llama-biases")  # of CONFIGS: windows, soft caps and odd heads; biases and another head size


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
    model = str(checkpoint(name))
    words = ["--quick", "--model", model, "--dtype", "bfloat16", "--requests", "9", "--tokens", "10"]
    check_equal(script, keep(plan_of(script, monkeypatch, *words), lambda s: s.kv_cache == "int8"), 80, 800)


@pytest.mark.battery
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["demo", *CONFIGS])
def test_every_family_in_full(
    name: str, dtype: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
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
