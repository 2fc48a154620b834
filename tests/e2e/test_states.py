"""Models with states: the numbers of a request do not depend on hits, chunks, company, preemptions, drafts or forks."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.models.inputs import StateCache
from tests.battery import sized
from tests.compiling.test_function import compiled_steps_alone
from tests.families import HYBRID_CONFIGS, checkpoint, logits_of, transformers_model

NUM_TOKENS, BLOCK_SIZE = 600, 16
PROMPT = [random.Random(1).randrange(3, 300) for _ in range(NUM_TOKENS)]
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
ENGINE: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "check_invariants": True, "bucket_sizes": (4,),
    "max_model_len": NUM_TOKENS + 24, "num_kv_blocks": 200, "progress": "off",
}  # fmt: skip

OF_64 = {"max_num_batched_tokens": 64}

Bits = list[dict[int, float]]
NAMES = [name if name == "lfm2" else pytest.param(name, marks=pytest.mark.battery) for name in HYBRID_CONFIGS]


def engine_of(name: str, **arguments: Any) -> CompiledEngine:
    return CompiledEngine(str(checkpoint(name)), **ENGINE | arguments)


def serve(engine: CompiledEngine, prompts: list[list[int]], params: SamplingParams = PARAMS) -> list[tuple[Bits, int]]:
    """Of each request, the log-probabilities of its tokens and of their rivals, and how many tokens it found."""
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return [
        (
            [{token: entry.logprob for token, entry in choices.items()} for choices in output.outputs[0].logprobs],
            output.num_cached_tokens,
        )
        for output in outputs
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_position_of_a_long_prompt(name: str) -> None:
    """Log-probabilities of 600 tokens against transformers: whole, and to the bit the same in odd chunks."""
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    logits = logits_of(transformers_model(name), torch.tensor([PROMPT]))[0].log_softmax(-1)
    expected = logits[range(NUM_TOKENS - 1), PROMPT[1:]].tolist()
    found = []
    for sizes in ({"max_num_batched_tokens": 640}, {"max_num_batched_tokens": 37}, {"max_num_batched_tokens": 101}):
        with engine_of(name, **sizes) as engine:
            (output,) = engine.generate([PROMPT], scored, use_tqdm=False)
        entries = zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
        found.append([choices[token].logprob for choices, token in entries])
    assert found[0] == pytest.approx(expected, abs=1e-4)
    assert found[1:] == found[:1] * 2


@sized("every", 9, 1)
@pytest.mark.parametrize("name", NAMES)
def test_hits_at_the_ends_of_blocks(name: str, every: int) -> None:
    """Each engine's first request leaves a snapshot where its last full block ends, and the next begins there."""
    with engine_of(name, enable_prefix_caching=False) as engine:
        ((whole, _),) = serve(engine, [PROMPT])
    with engine_of(name) as engine:
        for num_blocks in range(1, NUM_TOKENS // BLOCK_SIZE + 1, every):
            engine.reset_prefix_cache()
            engine.generate([PROMPT[: num_blocks * BLOCK_SIZE + 1]], PARAMS, use_tqdm=False)
            assert serve(engine, [PROMPT]) == [(whole, num_blocks * BLOCK_SIZE)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["swap", pytest.param("recompute", marks=pytest.mark.battery)])
def test_company_and_preemptions_change_no_bit(name: str, mode: str) -> None:
    rng = random.Random(2)
    prompts = [PROMPT[: rng.randrange(1, 90)] + [rng.randrange(3, 300) for _ in range(20)] for _ in range(12)]
    params = SamplingParams(temperature=1, seed=3, max_tokens=24, logprobs=3, ignore_eos=True)
    with engine_of(name, enable_prefix_caching=False) as engine:
        alone = [serve(engine, [prompt], params)[0][0] for prompt in prompts]
    arguments: dict[str, Any] = {"num_kv_blocks": 14, "max_model_len": 160, "max_num_batched_tokens": 40}
    swap = {"preemption_mode": mode, "swap_space_bytes": 2**22 if mode == "swap" else 0, "async_scheduling": True}
    with engine_of(name, num_state_slots=9, **arguments, **swap) as engine:
        assert [bits for bits, _ in serve(engine, prompts, params)] == alone
        stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swap_preemptions > 0) == (mode == "swap")
    assert stats.prefix_hit_tokens > 0


@pytest.mark.battery
def test_one_graph_without_breaks_and_recompiles() -> None:
    with engine_of("lfm2", enable_prefix_caching=False) as eager:
        expected = serve(eager, [PROMPT[:n] for n in (1, 40, 333)])
    with compiled_steps_alone():
        engine = engine_of("lfm2", enforce_eager=False, bucket_sizes=(1, 4), token_bucket_sizes=(64,))
    with engine:
        found = serve(engine, [PROMPT[:n] for n in (1, 40, 333)])
        report = engine.compile_report()
    assert [bits for bits, _ in found] == [bits for bits, _ in expected]
    assert (report.graph_breaks, report.recompiles) == (0, 0)


class Drafter:
    """Knows what plain decoding gives, and makes one in ``wrong`` of its guesses wrong; 0: none."""

    num_tokens = 3

    def __init__(self, answers: list[list[int]], wrong: int) -> None:
        self.answers, self.wrong = answers, wrong

    def propose(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        known = list(token_ids)
        answer = next(answer for answer in self.answers if answer[: len(known)] == known)
        drafts = enumerate(answer[len(known) : len(known) + self.num_tokens], len(known))
        return [3 if self.wrong and place % self.wrong == 0 else token for place, token in drafts]


def test_drafts() -> None:
    """The state goes on from the last token that was accepted."""
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=3, ignore_eos=True)
    prompts = [PROMPT[:n] for n in (5, 16, 77, 200)]
    with engine_of("lfm2") as engine:
        plain = engine.generate(prompts, params, use_tqdm=False)
    answers = [output.prompt_token_ids + output.outputs[0].token_ids for output in plain]
    for wrong in (0, 1, 3):
        with engine_of("lfm2", drafter=Drafter(answers, wrong)) as engine:
            drafted = engine.generate(prompts, params, use_tqdm=False)
            stats = engine.stats()
        assert stats.num_draft_tokens > 0
        assert (stats.num_accepted_draft_tokens > 0) == (wrong != 1)
        for one, other in zip(drafted, plain, strict=True):
            assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_continuations_and_beams() -> None:
    """With the state at the prompt's end as with a prompt of their own: no step of 64 tokens leaves that state."""
    params = SamplingParams(n=3, temperature=1, seed=5, max_tokens=12, ignore_eos=True)
    found = []
    for arguments in ({}, {"enable_prefix_caching": False}, {"enable_prefix_caching": False, **OF_64}):
        with engine_of("lfm2", **arguments) as engine:
            sampled = engine.generate([PROMPT[:65]], params, use_tqdm=False)
            searched = engine.beam_search([PROMPT[:33]], beam_width=3, max_tokens=10)
            found.append([[completion.token_ids for completion in output.outputs] for output in (*sampled, *searched)])
    assert found[:2] == found[2:] * 2


def test_a_pool_of_few_blocks_has_all_its_slots() -> None:
    """The smallest pool is no larger than that of the trial at the start."""
    with engine_of("lfm2", num_kv_blocks=2, max_model_len=32) as engine:
        found = serve(engine, [PROMPT[:n] for n in (5, 9, 17)])
        slots = {len(cache.convolution) for cache in engine.runner.steps.kv_cache if isinstance(cache, StateCache)}
    assert slots == {1 + 3 * 4 + 1}
    with engine_of("lfm2", enable_prefix_caching=False) as engine:
        assert [bits for bits, _ in found] == [bits for bits, _ in serve(engine, [PROMPT[:n] for n in (5, 9, 17)])]


def test_slots_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_state_slots must be at least 5 \(max_num_seqs and one\), given 4"):
        engine_of("lfm2", num_state_slots=4)
    with pytest.raises(ValueError, match=r"num_state_slots must be None for Qwen3ForCausalLM, .* given 9"):
        engine_of("qwen3", num_state_slots=9, max_model_len=64)


def test_a_model_without_any_attention_is_refused(tmp_path: Path) -> None:
    config = json.loads((checkpoint("lfm2") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": ["conv"] * 4}))
    with pytest.raises(ValueError, match="Lfm2ForCausalLM must have a layer with attention, given none"):
        CompiledEngine(str(tmp_path), load_format="dummy", **ENGINE)


def test_a_profile_leaves_the_states_as_they_were() -> None:
    """It runs a step once more, which goes on from what the step itself has left."""
    prompts = [PROMPT[:n] for n in (5, 40, 100)]
    with engine_of("lfm2", enable_prefix_caching=False) as engine:
        expected = serve(engine, prompts)
        engine.reset_report(profile_steps=3)
        assert serve(engine, prompts) == expected
        assert engine.runner.profiler is not None
        assert engine.runner.profiler.num_steps == {"tokens_256": 1, "decode_4": 2}
