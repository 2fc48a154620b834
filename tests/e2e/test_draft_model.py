"""A draft model: outputs are those without it, and what it drafts is what it would say itself, however it got there."""

import dataclasses
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from compiled_llm import CompiledEngine, RequestOutput, SamplingParams
from compiled_llm.api.outputs import EngineStats
from compiled_llm.compiling.report import CompileReport
from compiled_llm.worker.memory import MemoryLedger
from tests.drafting_networks import Drafted, check_drafts, inexact_copy, record_drafts
from tests.families import checkpoint

NUM_TOKENS = 3
SMALL: dict[str, Any] = {
    "enforce_eager": True, "bucket_sizes": (1, 4), "token_bucket_sizes": (8, 24), "block_size": 4,
    "max_model_len": 64, "num_kv_blocks": 18, "check_invariants": True, "progress": "off",
}  # fmt: skip
SWAP: dict[str, Any] = {"preemption_mode": "swap", "swap_space_bytes": 2**20}
ENGINES: dict[str, dict[str, Any]] = {
    "swap": SWAP,
    "recompute": {"preemption_mode": "recompute"},
    "overlap": {**SWAP, "async_scheduling": True},
    "no prefix cache, blocks of 1": {**SWAP, "enable_prefix_caching": False, "block_size": 1, "num_kv_blocks": 72},
    "no chunks": {"enable_chunked_prefill": False, "token_bucket_sizes": (64,), "max_num_batched_tokens": 64},
    "int8 cache": {**SWAP, "kv_cache_dtype": "int8"},
    "bfloat16": {**SWAP, "dtype": "bfloat16"},
    "other process": {**SWAP, "model_process": True},
    "compiled": {**SWAP, "enforce_eager": False},
    "compiled, bfloat16": {**SWAP, "enforce_eager": False, "dtype": "bfloat16", "async_scheduling": True},
}
Work = list[tuple[list[int], SamplingParams]]


def random_work(rng: random.Random, count: int) -> Work:
    """Requests of every kind that share prefixes: greedy, seeded, filtered, of penalties, with stops, of several."""
    prefixes = [[rng.randrange(3, 300) for _ in range(rng.choice((4, 9, 20)))] for _ in range(4)]
    work: Work = []
    for _ in range(count):
        prompt = rng.choice(prefixes) + [rng.randrange(3, 300) for _ in range(rng.randrange(1, 12))]
        kind = rng.random()
        fields: dict[str, Any] = {"temperature": 0.0} if kind < 0.4 else {"temperature": rng.choice((0.3, 0.7, 1.0))}
        fields |= {"seed": rng.randrange(1000), "max_tokens": rng.choice((1, 3, 12, 20, 24)), "logprobs": 2}
        fields["ignore_eos"] = rng.random() < 0.5
        if fields["temperature"] and rng.random() < 0.5:
            fields |= {"top_k": rng.choice((5, 40)), "top_p": 0.9, "min_p": 0.01}
        if kind > 0.9:
            fields["presence_penalty"] = 0.5
        elif kind > 0.8:
            fields["n"] = 3
        elif kind > 0.7:
            fields["stop_token_ids"] = [rng.randrange(3, 300) for _ in range(60)]
        elif kind > 0.65:
            fields["prompt_logprobs"] = 1
        elif kind > 0.6:
            fields["num_speculative_tokens"] = rng.choice((0, 1, 2))
        work.append((prompt, SamplingParams(**fields, detokenize=False)))
    return work


def serve(engine: CompiledEngine, work: Work, aborted: frozenset[int] = frozenset()) -> dict[str, RequestOutput]:
    """The last output of each request by its number. They come a few a step; some are aborted on the way."""
    outputs: dict[str, RequestOutput] = {}
    waiting, step = list(enumerate(work)), 0
    while waiting or engine.has_unfinished_requests():
        for number, (prompt, params) in waiting[:2]:
            engine.add_request(str(number), prompt, params)
        del waiting[:2]
        outputs |= {output.request_id: output for output in engine.step()}
        step += 1
        for number in aborted:
            name = str(number)
            if name in outputs and not outputs[name].finished:
                engine.abort(name)
                del outputs[name]
    return {name: output for name, output in outputs.items() if int(name) not in aborted}


def facts(output: RequestOutput) -> tuple:
    return output.prompt_token_ids, output.prompt_logprobs, list(output.outputs)


class Compared(NamedTuple):
    """What a run with drafts did: those of the worker, figures, what was compiled, memory without drafts and with."""

    found: list[Drafted]
    stats: EngineStats
    report: CompileReport
    plain_memory: MemoryLedger
    memory: MemoryLedger


def drafted_as_plain(
    target: str, arguments: dict[str, Any], config: dict[str, Any], work: Work, aborted: frozenset[int] = frozenset()
) -> Compared:
    """Serve ``work`` without drafts and with those of ``config``: the same outputs, and each function is one graph."""
    with CompiledEngine(target, **arguments) as engine:
        without = [(prompt, dataclasses.replace(params, num_speculative_tokens=None)) for prompt, params in work]
        plain, plain_memory = serve(engine, without, aborted), engine.memory_report()
    with CompiledEngine(target, **arguments, speculative_config=config) as engine:
        found = record_drafts(engine)
        drafted = serve(engine, work, aborted)
        made = Compared(found, engine.stats(), engine.compile_report(), plain_memory, engine.memory_report())
    assert plain.keys() == drafted.keys()
    for number, output in plain.items():
        assert facts(drafted[number]) == facts(output), f"request {number}: {work[int(number)]}"
    if not arguments["enforce_eager"]:
        assert {(r.graphs, r.graph_breaks, r.recompiles) for r in made.report.reports} == {(1, 0, 0)}
    return made


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("swap", 30, id="small"),
        *(pytest.param(name, 300, id=f"full-{name}", marks=pytest.mark.battery) for name in ENGINES),
    ],
)
def test_outputs_are_those_without_it_and_it_drafts_what_it_would_say(name: str, count: int, tmp_path: Path) -> None:
    arguments, target = SMALL | ENGINES[name], str(checkpoint("llama"))
    draft_model = inexact_copy("llama", tmp_path / "draft")
    work, aborted = random_work(random.Random(7), count), frozenset(range(5, count, 11))
    config = {"method": "draft_model", "model": draft_model, "num_speculative_tokens": NUM_TOKENS, "adaptive": False}
    found, stats, report, *_ = drafted_as_plain(target, arguments, config, work, aborted)
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.num_preemptions or name in ("no chunks",)
    assert arguments["enforce_eager"] or {"draft", "draft_prompt"} < {r.name for r in report.reports}
    of_draft_model = {key: arguments[key] for key in ("dtype", "kv_cache_dtype", "block_size") if key in arguments}
    check_drafts(found, draft_model, **of_draft_model, max_model_len=128)


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    target = str(checkpoint("llama"))
    work = [
        (prompt, dataclasses.replace(params, presence_penalty=0.0, stop_token_ids=None, ignore_eos=True))
        for prompt, params in random_work(random.Random(3), 12)
    ]
    config = {"method": "draft_model", "model": target, "num_speculative_tokens": NUM_TOKENS, "adaptive": False}
    with CompiledEngine(target, **SMALL | {"num_kv_blocks": 60}, speculative_config=config) as engine:
        serve(engine, work)
        stats = engine.stats()
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 50


def test_what_others_computed_without_it_is_caught_up_with(tmp_path: Path) -> None:
    """A prefix that was found, of more tokens than a step takes, and an output that began without drafts."""
    target, draft_model = str(checkpoint("llama")), inexact_copy("llama", tmp_path / "draft")
    arguments = SMALL | {"num_kv_blocks": 60}
    config = {"method": "draft_model", "model": draft_model, "num_speculative_tokens": NUM_TOKENS, "adaptive": False}
    prompt = [7 * place % 300 for place in range(3, 43)]
    params = SamplingParams(temperature=0.5, seed=3, max_tokens=16, ignore_eos=True, detokenize=False)
    without = dataclasses.replace(params, num_speculative_tokens=0)
    with CompiledEngine(target, **arguments) as engine:
        plain = engine.generate([prompt, prompt[:30]], params, use_tqdm=False)
    with CompiledEngine(target, **arguments, speculative_config=config) as engine:
        found = record_drafts(engine)
        assert engine.generate(prompt, without, use_tqdm=False)[0].outputs == plain[0].outputs
        assert not found
        again = engine.generate([prompt, prompt[:30]], params, use_tqdm=False)
        stats = engine.stats()
    assert [output.outputs for output in again] == [output.outputs for output in plain]
    assert stats.prefix_hit_tokens > 60
    assert len(found) > 5
    check_drafts(found, draft_model, block_size=4, max_model_len=128)


@pytest.mark.parametrize("model_process", [False, pytest.param(True, marks=pytest.mark.battery)])
def test_a_request_is_drafted_for_again_after_steps_in_flight(model_process: bool, tmp_path: Path) -> None:
    """Tokens that the device alone knew when their steps began are known to the drafter when it goes on."""
    draft_model = inexact_copy("llama", tmp_path / "draft")
    config = {"method": "draft_model", "model": draft_model, "num_speculative_tokens": NUM_TOKENS, "adaptive": False}
    params = SamplingParams(temperature=0.5, seed=3, max_tokens=40, ignore_eos=True, detokenize=False)
    arguments = SMALL | {"num_kv_blocks": 60, "async_scheduling": True, "model_process": model_process}
    with CompiledEngine(str(checkpoint("llama")), **arguments, speculative_config=config) as engine:
        found, counts, was_in_flight = record_drafts(engine), list[int](), False
        for name in ("0", "1"):
            engine.add_request(name, [int(name) + 5] * 7, params)
        for step in range(60):
            engine.step()
            if step in (5, 12):  # as where drafts do not pay for a while
                counts.append(len(found))
                for request in engine.scheduler.running:
                    request.takes_drafts = request.waits_for_tokens = step > 5
            was_in_flight |= any(request.num_in_flight > 1 for request in engine.scheduler.running)
        counts.append(len(found))
    assert was_in_flight
    assert counts[1] <= counts[0] + 2
    assert counts[2] > counts[1] + 4
    check_drafts(found, draft_model, block_size=4, max_model_len=128)


def test_its_memory_is_in_the_ledger_and_its_blocks_are_those_of_the_model(tmp_path: Path) -> None:
    target, draft_model = str(checkpoint("llama")), inexact_copy("llama", tmp_path / "draft")
    config = {"method": "draft_model", "model": draft_model}
    with CompiledEngine(target, **SMALL) as engine:
        plain = engine.memory_report()
    with CompiledEngine(target, **SMALL, speculative_config=config) as engine:
        ledger, drafting = engine.memory_report(), engine.own_runner.steps.drafting
        assert drafting is not None
        tensors = [tensor for cache in drafting.kv_cache for tensor in cache if tensor is not None]
        assert {len(tensor) for tensor in tensors} == {engine.stats().num_kv_blocks + 1}
    names = [row.name for row in ledger.rows]
    assert names.index("drafter's weights") == names.index("KV pool") + 1
    # The same model with noise: what it takes is what the model takes.
    assert ledger.bytes_of("drafter's weights") == ledger.bytes_of("weights") == plain.bytes_of("weights")
    assert ledger.bytes_of("drafter's KV pool") == ledger.bytes_of("KV pool") == plain.bytes_of("KV pool")
    assert ledger.bytes_of("drafter's KV pool") == sum(tensor.nbytes for tensor in tensors)
    assert ledger.bytes_of("step buffers") > plain.bytes_of("step buffers")
    assert sum(row.bytes for row in ledger.rows if row.where == ledger.where) == ledger.total
