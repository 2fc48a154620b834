"""A layer of the model's own checkpoint that drafts: outputs are those without it, and it drafts what it should."""

import dataclasses
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.worker.memory import num_bytes
from tests.drafting_networks import Drafted, record_drafts
from tests.e2e.test_draft_model import SMALL, SWAP, Work, facts, random_work, serve
from tests.mtp_checkpoints import FAMILIES, expected_drafts, guessing_checkpoint

CONFIG: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
ENGINES: dict[str, dict[str, Any]] = {
    "swap": {**SWAP, "num_kv_blocks": 24},
    "overlap": {**SWAP, "async_scheduling": True, "num_kv_blocks": 24},
    "other process": {**SWAP, "model_process": True},
    "int8 cache": {**SWAP, "kv_cache_dtype": "int8", "num_kv_blocks": 24},
    "bfloat16": {"dtype": "bfloat16", "preemption_mode": "recompute", "num_kv_blocks": 24},
    "int8 weights": {**SWAP, "quantization": "int8", "num_kv_blocks": 24},
    "compiled": {**SWAP, "enforce_eager": False, "num_kv_blocks": 24},
}


def plain(work: Work) -> Work:
    return [(prompt, dataclasses.replace(params, num_speculative_tokens=None)) for prompt, params in work]


def goes_on_alone(one: Drafted, sequences: Iterable[list[int]], block_size: int = 4) -> bool:
    """Whether no other request has a block of its own and goes on differently: the last computed has a block's row."""
    known = list(one.token_ids)
    ends = range(block_size, len(known), block_size)
    return not any(
        other[:end] == known[:end] and other[end] != known[end]
        for other in sequences
        for end in ends
        if len(other) > end
    )


def case(name: str, engine: str, count: int = 80, *, battery: bool = True) -> Any:
    return pytest.param(name, engine, count, id=f"{name}-{engine}", marks=pytest.mark.battery if battery else ())


@pytest.mark.filterwarnings("ignore:.*the language model has no such parts")  # without drafts
@pytest.mark.parametrize(
    ("name", "engine", "count"),
    [
        case("qwen3-next", "swap", 16, battery=False),
        *(case(name, "swap") for name in FAMILIES),
        *(case(name, engine) for engine in list(ENGINES)[1:] for name in ("deepseek-v3", "qwen3-next")),
    ],
)
def test_outputs_are_those_without_it_and_it_drafts_what_it_should(
    name: str, engine: str, count: int, tmp_path: Path
) -> None:
    arguments = SMALL | ENGINES[engine]
    model = str(guessing_checkpoint(name, tmp_path / "model", 0.02))
    work, aborted = random_work(random.Random(7), count), frozenset(range(5, count, 11))
    with CompiledEngine(model, **arguments) as without:
        wanted = serve(without, plain(work), aborted)
    with CompiledEngine(model, **arguments, speculative_config=CONFIG) as drafting:
        found = record_drafts(drafting)
        drafted, stats = serve(drafting, work, aborted), drafting.stats()
        reports = drafting.compile_report().reports
        if arguments.get("kv_cache_dtype", "auto") == "auto" and not arguments.get("model_process"):
            sequences = [
                list(output.prompt_token_ids) + list(completion.token_ids)
                for output in drafted.values()
                for completion in output.outputs
            ]
            alone = [one for one in found if goes_on_alone(one, sequences)]
            assert len(alone) > 10
            for one in alone[:: 1 + len(alone) // 25]:
                assert expected_drafts(drafting, one) == one.drafts, f"after {len(one.token_ids)} tokens"
    assert wanted.keys() == drafted.keys()
    for number, output in wanted.items():
        assert facts(drafted[number]) == facts(output), f"request {number}: {work[int(number)]}"
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.num_accepted_by_position[2]
    assert stats.prefix_hit_tokens
    if not arguments["enforce_eager"]:
        assert {(report.graphs, report.graph_breaks, report.recompiles) for report in reports} == {(1, 0, 0)}
        assert {"draft", "draft_prompt"} < {report.name for report in reports}


@pytest.mark.parametrize("name", ["glm4-moe", "qwen3-next"])
def test_a_layer_that_must_be_right_is(name: str, tmp_path: Path) -> None:
    """No layer adds anything: what follows depends on the last token alone, whose embedding the layer passes on."""
    model = str(guessing_checkpoint(name, tmp_path / "model", 0.0))
    # Where eps counts beside the embeddings, the layer's logits are the model's but for a factor.
    temperature = 0.0 if name == "qwen3-next" else 0.8
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(4)]
    prompts = [[3 + seed, 50, 7 * seed + 9] for seed in range(4)]
    with CompiledEngine(model, **SMALL | {"num_kv_blocks": 60}, speculative_config=CONFIG) as engine:
        engine.generate(prompts, params, use_tqdm=False)
        stats = engine.stats()
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens >= 4 * 12


def test_what_others_computed_without_it_is_caught_up_with(tmp_path: Path) -> None:
    """A prefix that was found, of more tokens than a step takes, and an output that began without drafts."""
    model = str(guessing_checkpoint("glm4-moe", tmp_path / "model", 0.15))
    prompt = [7 * place % 300 for place in range(3, 43)]
    params = SamplingParams(temperature=0.5, seed=3, max_tokens=16, ignore_eos=True, detokenize=False)
    without = dataclasses.replace(params, num_speculative_tokens=0)
    with CompiledEngine(model, **SMALL | {"num_kv_blocks": 60}, speculative_config=CONFIG) as engine:
        found = record_drafts(engine)
        wanted = engine.generate([prompt, prompt[:30]], without, use_tqdm=False)
        assert not found
        again = engine.generate([prompt, prompt[:30]], params, use_tqdm=False)
        assert [output.outputs for output in again] == [output.outputs for output in wanted]
        assert engine.stats().prefix_hit_tokens > 60
        # The same blocks, of which the last goes on with another token.
        engine.generate([*prompt[:32], 5], params, use_tqdm=False)
        assert engine.stats().prefix_hit_tokens > 90
        assert len(found) > 10
        for one in found:
            assert expected_drafts(engine, one) == one.drafts


def test_its_memory_is_in_the_ledger_and_embedding_and_head_are_the_models(tmp_path: Path) -> None:
    model = str(guessing_checkpoint("glm4-moe", tmp_path / "model", 0.15))
    with CompiledEngine(model, **SMALL, speculative_config=CONFIG) as engine:
        ledger, runner = engine.memory_report(), engine.own_runner
        drafting = runner.steps.drafting
        assert drafting is not None
        own, whole = drafting.network.weights, runner.steps.weights
        assert own.embedding is whole.embedding
        assert own.head is whole.head
        tensors = [tensor for cache in drafting.kv_cache for tensor in cache if tensor is not None]
    # A layer of three, two of which are as large, and the projection of 2 * 112 to 112 elements.
    (layer,) = own.layers
    size = num_bytes(layer) + num_bytes(own.projection) + 3 * 112 * 4
    assert ledger.bytes_of("drafter's weights") == size
    assert ledger.bytes_of("drafter's KV pool") == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.battery
@pytest.mark.parametrize("name", FAMILIES)
def test_each_function_is_one_graph(name: str, tmp_path: Path) -> None:
    """As Dynamo explains them, which traces a function and compiles nothing."""
    model = str(guessing_checkpoint(name, tmp_path / "model", 0.02))
    with CompiledEngine(model, **SMALL | {"num_kv_blocks": 24}, speculative_config=CONFIG) as engine:
        drafting = engine.own_runner.steps.drafting
        assert drafting is not None
        parts = list({part.name: part for part in drafting._parts()}.values())
        assert {part.name for part in parts} == {"draft_prompt", "draft"}
        for part in parts:
            explained = torch._dynamo.explain(part.recipe())(*part.arguments())
            assert (explained.graph_count, explained.graph_break_count) == (1, 0), explained.break_reasons
