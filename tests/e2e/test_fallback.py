"""Engines of models through transformers' modelling code: one graph, and the same tokens in any company."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm import CompiledEngine, SamplingParams
from tests.compiling.test_function import ENGINE, TWO_BUCKETS, check_one_graph, copies, engine_and_codes
from tests.models.fallback.test_architectures import save

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SIZES: dict[str, Any] = {"bucket_sizes": (1, 8), "token_bucket_sizes": (32,), "max_model_len": 304, "progress": "off"}
COMPILED = ("vaultgemma", "olmo", "cohere2", "gpt_bigcode", "glm4_moe_lite", "olmoe", "opt")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def prompts_and_tokens(model_type: str, directory: Path, longest: int = 90) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of 1 to ``longest`` tokens, and what transformers generates greedily."""
    model = save(model_type, directory)
    torch.manual_seed(1)
    prompts = [
        torch.randint(3, model.config.vocab_size, (length,)).tolist()
        for length in (1, 5, 16, 33, 64, 90)
        if length <= longest
    ]
    expected = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(NUM_TOKENS):
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
            expected.append(tokens[len(prompt) :])
    return prompts, expected


def tokens_of(engine: CompiledEngine, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(prompts, GREEDY, use_tqdm=False)]


def test_one_graph(tmp_path: Path) -> None:
    """Of a model with windows, soft caps, and a tied embedding that it scales."""
    prompts, expected = prompts_and_tokens("vaultgemma", tmp_path, longest=33)
    arguments = {**ENGINE, "enforce_eager": True, "bucket_sizes": (4,), "token_bucket_sizes": (8,)}
    with CompiledEngine(str(tmp_path), **arguments) as engine:
        assert tokens_of(engine, prompts) == expected
        check_one_graph(engine)
        described = engine.report(measure_limits=False)
    assert described.model_code.startswith("transformers' modelling code (VaultGemmaForCausalLM, transformers ")
    assert "Model: transformers" in described.page()
    assert described.exact.startswith("no (norms and the like of transformers' modelling code")


@pytest.mark.battery
def test_no_breaks_no_recompiles_no_copy_of_the_cache(tmp_path: Path) -> None:
    prompts, expected = prompts_and_tokens("vaultgemma", tmp_path, longest=33)
    engine, codes = engine_and_codes(tmp_path, TWO_BUCKETS, False)
    assert tokens_of(engine, prompts) == expected
    (step, *_) = engine.compile_report().reports
    assert (step.name, step.graphs, step.graph_breaks, step.recompiles) == ("step", 1, 0, 0)
    assert len(codes) == 1
    assert not copies(codes, engine.runner.steps.kv_cache[0].k)
    engine.close()


@pytest.mark.battery
@pytest.mark.parametrize("model_type", COMPILED)
def test_one_graph_and_transformers_tokens_in_any_batch(model_type: str, tmp_path: Path) -> None:
    prompts, expected = prompts_and_tokens(model_type, tmp_path)
    with CompiledEngine(str(tmp_path), **SIZES, num_kv_blocks=64, check_invariants=True) as engine:
        assert tokens_of(engine, prompts) == expected
        assert tokens_of(engine, prompts[2:3]) == expected[2:3]
        report = engine.compile_report()
        assert (report.graph_breaks, report.recompiles) == (0, 0)
        assert all(r.graphs == 1 for r in report.reports)


def test_chunks_preemption_and_other_blocks(tmp_path: Path) -> None:
    prompts, expected = prompts_and_tokens("exaone4", tmp_path, longest=33)
    sizes: dict[str, Any] = {**SIZES, "enforce_eager": True, "check_invariants": True}
    with CompiledEngine(str(tmp_path), **sizes, max_num_batched_tokens=16, num_kv_blocks=9) as engine:
        assert tokens_of(engine, prompts) == expected
        assert engine.stats().num_preemptions > 0
    with CompiledEngine(str(tmp_path), **sizes, block_size=8, num_kv_blocks=128, enable_prefix_caching=False) as engine:
        assert tokens_of(engine, prompts) == expected


@pytest.mark.parametrize("model_type", ["olmo", pytest.param("minicpm3", marks=pytest.mark.battery)])
def test_a_quantised_cache(model_type: str, tmp_path: Path) -> None:
    prompts, expected = prompts_and_tokens(model_type, tmp_path, longest=33)
    sizes: dict[str, Any] = {**SIZES, "enforce_eager": True}
    with CompiledEngine(str(tmp_path), **sizes, kv_cache_dtype="int8", num_kv_blocks=64) as engine:
        found = tokens_of(engine, prompts)
        assert set(engine.runner.cache_dtypes) == {torch.int8}
    same = [a == b for ours, theirs in zip(found, expected, strict=True) for a, b in zip(ours, theirs, strict=True)]
    assert sum(same) > 0.6 * len(same)


def test_exact_is_refused_and_dummy_weights_serve(tmp_path: Path) -> None:
    save("gpt_bigcode", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    arguments: dict[str, Any] = {**SIZES, "enforce_eager": True, "load_format": "dummy"}
    with pytest.raises(ValueError, match="exact must be False here, given True: norms and the like of transformers'"):
        CompiledEngine(str(tmp_path), **arguments, exact=True)
    with CompiledEngine(str(tmp_path), **arguments, num_kv_blocks=64) as engine:
        (tokens,) = tokens_of(engine, [[5, 6, 7]])
    assert len(set(tokens)) > 1
