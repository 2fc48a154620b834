"""check() agrees on models that are right, says so of each way, and finds models that are not."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from compiled_llm import CompiledEngine
from compiled_llm.engine import check
from compiled_llm.worker.compiled_steps import CompiledSteps
from tests.families import COMPILED_SIZES, checkpoint

PROMPTS = [[5, 6, 7], list(range(3, 60))]
SIZES = {"bucket_sizes": (2,), "token_bucket_sizes": (16,), "max_model_len": 128, "num_kv_blocks": 40}


@pytest.fixture
def engine() -> Iterator[CompiledEngine]:
    with CompiledEngine(str(checkpoint("qwen3-untied")), enforce_eager=True, **SIZES) as engine:
        yield engine


def test_compiled_uncompiled_and_transformers_agree() -> None:
    with CompiledEngine(num_kv_blocks=200, **COMPILED_SIZES) as engine:
        before = engine.generate([PROMPTS[0]], use_tqdm=False)[0].outputs[0].token_ids
        report = engine.check(max_tokens=4)
        assert report.agrees
        assert report.is_compiled
        assert report.exact
        assert len(report.rows) == 4
        for row in report.rows:
            assert row.uncompiled.largest == 0
            assert row.transformers is not None
            assert 0 < row.transformers.mean < 0.02
            assert (row.num_tokens, row.likeliest) == (4, 4)
        assert report.rows[-1].num_prompt_tokens > 200, "a prompt of several chunks"
        assert len(str(report).splitlines()) == 1 + 1 + 4 + 2
        assert engine.compile_report().recompiles == 0
        assert len(engine.generate([PROMPTS[0]], use_tqdm=False)[0].outputs[0].token_ids) == len(before)


def test_a_model_that_was_read_wrongly_differs_from_transformers(engine: CompiledEngine) -> None:
    assert engine.check(PROMPTS, max_tokens=4).agrees
    engine.runner.steps.weights.layers[1].mlp_norm.mul_(1.2)
    report = engine.check(PROMPTS, max_tokens=4)
    assert not report.agrees
    assert all(row.uncompiled.largest == 0 for row in report.rows), "both are wrong alike"
    assert str(report).count("DIFFERS") == 2


def test_steps_that_were_compiled_wrongly_differ_from_uncompiled_ones(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CompiledSteps.uncompiled

    def other(self: CompiledSteps, cache_dtypes: list[torch.dtype]) -> CompiledSteps:
        steps = right(self, cache_dtypes)
        layers = list(steps.weights.layers)
        layers[0] = layers[0]._replace(mlp_norm=layers[0].mlp_norm * 1.0001)
        steps.weights = steps.weights._replace(layers=tuple(layers))
        return steps

    monkeypatch.setattr(CompiledSteps, "uncompiled", other)
    compiled = engine.runner.steps
    report = engine.check(PROMPTS, max_tokens=4)
    assert not report.agrees
    assert all(0 < row.uncompiled.largest < 0.1 for row in report.rows)
    assert dataclasses.replace(report, exact=False).agrees, "within the tolerance, which is what a GPU has to meet"
    assert engine.runner.steps is compiled


def test_without_a_checkpoint_or_memory_transformers_does_not_run(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "free_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(engine.runner, "weight_bytes", 5 << 30)
    report = engine.check(max_tokens=2)
    assert report.without == "it needs 5632 MiB for a copy of the weights, and 1 are free on cpu"
    assert "transformers did not run: it needs 5632 MiB" in str(report)
    assert [row.num_prompt_tokens for row in report.rows] == [3, 17, 64, 126], "as long as max_model_len allows"
    assert report.agrees
    assert all(row.transformers is None for row in report.rows)
    with CompiledEngine(str(checkpoint("llama")), enforce_eager=True, load_format="dummy", **SIZES) as dummy:
        assert "dummy" in str(dummy.check(PROMPTS, max_tokens=2).without)


def test_arguments(engine: CompiledEngine) -> None:
    with pytest.raises(ValueError, match="prompts must not be empty"):
        engine.check([])
    with pytest.raises(ValueError, match="max_tokens must be an integer from 1 to 127"):
        engine.check(max_tokens=128)
    with pytest.raises(ValueError, match="max_model_len"):
        engine.check([[1] * 128])
    engine.add_request("a", [1, 2])
    with pytest.raises(RuntimeError, match="check\\(\\) while requests are unfinished"):
        engine.check()
