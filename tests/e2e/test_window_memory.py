"""Layers that see a window of keys keep little more than the window, and nothing else changes by that."""

from typing import Any

import pytest

from compiled_llm import CompiledEngine, SamplingParams
from tests.families import checkpoint

SIZES: dict[str, Any] = {
    "bucket_sizes": (4,), "max_num_batched_tokens": 16, "max_model_len": 160, "block_size": 4, "dtype": "float32",
    "device": "cpu", "enforce_eager": True, "check_invariants": True,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FAMILIES = [
    "gemma4",
    "gpt-oss",
    pytest.param("mistral", marks=pytest.mark.battery),
]  # windows in some layers, of other head sizes; in all; in some, with sinks


def prompts(shift: int = 0) -> list[list[int]]:
    """Longer than the windows, and three of them begin alike."""
    shared = [(7 * i + shift) % 199 for i in range(90)]
    return [[*shared, 1, 2, 3], [*shared, 4], shared[:50] + [5] * 9, [(11 * i + shift) % 211 for i in range(70)], [8]]


def tokens(engine: CompiledEngine, sent: list[list[int]]) -> list[list[int]]:
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in sent], GREEDY)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest) -> str:
    return str(checkpoint(request.param))


@pytest.fixture(scope="module")
def alone(directory: str) -> list[list[int]]:
    """Each prompt by itself, in an engine that finds no prefixes."""
    with CompiledEngine(model=directory, **SIZES, enable_prefix_caching=False) as engine:
        return [tokens(engine, [ids])[0] for ids in prompts()]


def test_a_window_has_a_pool_of_its_own_that_is_smaller(directory: str) -> None:
    with CompiledEngine(model=directory, **SIZES) as engine:
        runner = engine.runner
        ((window, places),) = runner.facts.window_places
        assert window < 16
        assert places < runner.facts.num_blocks
        blocks = {len(cache.k) for cache in runner.steps.kv_cache}
        assert places + 1 in blocks
        assert blocks <= {places + 1, runner.facts.num_blocks + 1}
        assert runner.kv_cache_bytes == sum(t.nbytes for group in runner.steps.cache_groups() for t in group)
        ledger = engine.memory_report()
        assert ledger.bytes_of("KV pool") == runner.kv_cache_bytes


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, marks=pytest.mark.battery),
        pytest.param({"num_kv_blocks": 40}, marks=pytest.mark.battery),
        {"num_kv_blocks": 44, "swap_space_bytes": 2**22, "preemption_mode": "swap"},
        pytest.param({"async_scheduling": True}, marks=pytest.mark.battery),
    ],
    ids=["roomy", "recomputed", "swapped", "overlapping"],
)
def test_tokens_are_the_same_in_company_after_hits_and_preemptions(
    directory: str, alone: list[list[int]], arguments: dict[str, Any]
) -> None:
    with CompiledEngine(model=directory, **SIZES, **arguments) as engine:
        assert tokens(engine, prompts()) == alone
        assert tokens(engine, prompts()) == alone  # behind hits
        stats = engine.stats()
        assert stats.prefix_hit_tokens > 0
        assert bool(stats.num_preemptions) == ("num_kv_blocks" in arguments)
        tokens(engine, prompts(shift=5))  # which takes places from cached blocks
        assert tokens(engine, prompts()) == alone


def test_a_long_request_needs_no_more_places_than_its_window(directory: str) -> None:
    sizes = {**SIZES, "bucket_sizes": (1,)}
    with CompiledEngine(model=directory, **sizes, enable_prefix_caching=False) as engine:
        (window,) = engine.scheduler.pool.windows
        stream = engine.stream([3] * 100, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
        used = [window.num_used for _ in stream]
        assert len(used) == 50
        assert max(used[4:]) <= (window.window - 1) // 4 + 2
