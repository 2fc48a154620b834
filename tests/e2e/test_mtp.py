"""A layer of the model's own checkpoint that drafts: outputs are those without it, and it drafts what it should."""

import dataclasses
import itertools
import pickle
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.scheduling.host_blocks import MoveCosts
from compiled_llm.worker.head_stage import HeadStage, LastLayerStage
from compiled_llm.worker.memory import num_bytes
from compiled_llm.worker.started_model import StartedModel
from tests.drafting_networks import Drafted, record_drafts
from tests.e2e.test_draft_model import SMALL, SWAP, Work, facts, random_work, serve
from tests.e2e.test_last_rows import rows_of
from tests.e2e.test_tiers import prompts_of, tokens
from tests.mtp_checkpoints import FAMILIES, expected_drafts, guessing_checkpoint

PROMPT = [3, 50, 7, 9, 11, 70, 2]
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
        *(case(name, engine) for engine in list(ENGINES)[1:] for name in ("deepseek-v3", "qwen3-next", "qwen3.5")),
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


LAST_LAYER: dict[str, dict[str, Any]] = {
    "swap": {**ENGINES["swap"], "dtype": "float32"},
    "bfloat16, recompute": ENGINES["bfloat16"],
    "int8 cache": {**ENGINES["int8 cache"], "dtype": "bfloat16"},
    "fp8 cache": {**ENGINES["int8 cache"], "kv_cache_dtype": "fp8", "dtype": "float32"},
    "int8 weights": ENGINES["int8 weights"],
    "overlap": ENGINES["overlap"],
    "compiled": ENGINES["compiled"],
}


def rest_in_turns(engine: CompiledEngine) -> None:
    """From now on nothing is drafted behind six of each twelve steps, as where it does not pay for a while.

    Not where steps overlap: one may be planned then.
    """
    step, number = engine.step, itertools.count()

    def stepping() -> Any:
        pays = next(number) % 12 >= 6
        for request in engine.scheduler.running:
            takes = pays and request.sampling_params.num_speculative_tokens != 0
            request.takes_drafts = request.waits_for_tokens = takes
            request.next_look = 0
        return step()

    engine.step = stepping  # type: ignore[method-assign]


@pytest.mark.filterwarnings("ignore:.*the language model has no such parts")
@pytest.mark.parametrize(
    ("engine", "count"),
    [
        pytest.param("swap", 24, id="swap"),
        pytest.param("int8 cache", 24, id="int8 cache"),
        *(pytest.param(engine, 80, id=f"{engine}, full", marks=pytest.mark.battery) for engine in LAST_LAYER),
    ],
)
def test_drafts_are_those_of_steps_that_compute_the_last_layer_of_all_tokens(
    engine: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, prefix hits, preemption, scored prompts, and tokens that came while nothing was drafted: to the bit."""
    model, arguments = str(guessing_checkpoint("qwen3.5", tmp_path / "model", 0.3, 20.0)), SMALL | LAST_LAYER[engine]
    work, aborted = random_work(random.Random(11), count), frozenset(range(5, count, 11))
    scored = {number: dataclasses.replace(work[number][1], prompt_logprobs=1) for number in range(0, count, 3)}
    work = [(prompt, scored.get(number, params)) for number, (prompt, params) in enumerate(work)]
    results = []
    for waits in (True, False):
        if not waits:
            monkeypatch.setattr(StartedModel, "_last_layer", lambda *_: None)
        with CompiledEngine(model, **arguments, speculative_config=CONFIG) as drafting:
            assert isinstance(drafting.own_runner.steps.drafting, LastLayerStage) == waits
            found = record_drafts(drafting)
            if engine != "overlap":
                rest_in_turns(drafting)
            outputs, stats = serve(drafting, work, aborted), drafting.stats()
        facts_of = {number: facts(output) for number, output in outputs.items()}
        results.append((found, stats.num_accepted_by_position, facts_of))
        assert stats.prefix_hit_tokens
        assert stats.num_preemptions
        assert len(found) > 2 * count
        assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert results[0] == results[1]


@pytest.mark.filterwarnings("ignore:.*the language model has no such parts")
def test_a_prompts_last_layer_computes_one_row_beside_it(tmp_path: Path) -> None:
    """As without it, unless the prompt is scored."""
    model = str(guessing_checkpoint("qwen3.5", tmp_path / "model", 0.15))
    plain = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    found = []
    for config in (CONFIG, None):
        with CompiledEngine(model, **SMALL | {"num_kv_blocks": 60}, speculative_config=config) as engine:
            found.append(
                [rows_of(engine, one, PROMPT) for one in (plain, dataclasses.replace(plain, prompt_logprobs=0))]
            )
    assert found[0] == found[1]
    (of_plain, of_scored), of_all = found[0], len(PROMPT)
    assert of_plain[1] > of_scored[1]
    assert of_plain[of_all] == of_scored[of_all] - 3, "the last layer's output, and both of its MLP"


@pytest.mark.filterwarnings("ignore:.*the language model has no such parts")
def test_files_have_what_goes_into_the_last_layer_or_what_it_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose weights are mapped from a file keeps the latter, and none reads files of the other kind."""
    monkeypatch.setattr(MoveCosts, "pays", lambda *_: True)
    model = str(guessing_checkpoint("qwen3.5", tmp_path / "model", 0.3, 20.0))
    tiers = {"kv_host_bytes": 2**21, "kv_disk_path": str(tmp_path / "kv"), "num_kv_blocks": 40, "dtype": "float32"}
    mapped, prompts = {"weights_path": str(tmp_path / "weights")}, prompts_of(2, 42)
    results, hits = [], []
    for arguments in ({}, mapped, {}, mapped):
        with CompiledEngine(model, **SMALL | tiers | arguments, speculative_config=CONFIG) as engine:
            assert isinstance(engine.own_runner.steps.drafting, LastLayerStage) == (not arguments)
            found = record_drafts(engine)
            results.append((tokens(engine, prompts), {one.token_ids: one.drafts for one in found}))
            hits.append(engine.stats().disk_hit_tokens)
    first, again = results[0][1], results[2][1]
    assert results[:2] == [results[0]] * 2
    assert results[2:] == [results[2]] * 2
    assert results[2][0] == results[0][0]
    # What is read from files takes other steps, but what is guessed behind the same tokens is the same.
    assert len(both := first.keys() & again.keys()) > 2
    assert all(first[known] == again[known] for known in both)
    assert [bool(one) for one in hits] == [False, False, True, True]
    assert len(list((tmp_path / "kv").iterdir())) == 2


@pytest.mark.filterwarnings("ignore:.*the language model has no such parts")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("glm4-moe", {}), ("qwen3.5", {"tensor_parallel_exact": True}), ("qwen3.5", {"enable_lora": True})],
)
def test_experts_shards_and_adapters_leave_the_last_layer_in_the_step(
    name: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    model = str(guessing_checkpoint(name, tmp_path / "model", 0.15))
    with CompiledEngine(model, **SMALL | arguments | {"num_kv_blocks": 60}, speculative_config=CONFIG) as engine:
        drafting = engine.own_runner.steps.drafting
        assert isinstance(drafting, HeadStage)
        assert not isinstance(drafting, LastLayerStage)
        assert drafting.network.taps == ()


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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen3.5" else pytest.mark.battery) for name in FAMILIES]
)
def test_each_function_is_one_graph_that_can_be_kept(name: str, tmp_path: Path) -> None:
    """As Dynamo explains them, which traces a function and compiles nothing; and what one closes over is written."""
    model = str(guessing_checkpoint(name, tmp_path / "model", 0.02))
    with CompiledEngine(model, **SMALL | {"num_kv_blocks": 24}, speculative_config=CONFIG) as engine:
        drafting = engine.own_runner.steps.drafting
        assert drafting is not None
        parts = list({part.name: part for part in drafting._parts()}.values())
        assert {part.name for part in parts} == {"draft_prompt", "draft"}
        for part in parts:
            function = part.recipe()
            explained = torch._dynamo.explain(function)(*part.arguments())
            assert (explained.graph_count, explained.graph_break_count) == (1, 0), explained.break_reasons
            assert pickle.dumps([cell.cell_contents for cell in function.__closure__])
