"""Logits that are no numbers: the request that has them ends with an error that says so, and no other does."""

from collections.abc import Iterator

import pytest
import torch

from compiled_llm import CompiledEngine, RequestsFailedWarning, SamplingParams
from tests.families import checkpoint

DAMAGED = 200  # a token whose embedding is damaged
PROMPTS = [[5, 6, 7], [7, DAMAGED, 9], [11, 12], [3, 4, 5, 6]]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, seed=1, max_tokens=6, ignore_eos=True),
    "changed": SamplingParams(temperature=0.8, seed=1, max_tokens=6, ignore_eos=True, presence_penalty=0.5, n=2),
    "logprobs": SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1),
}


@pytest.fixture(scope="module", params=[False, True], ids=["in turns", "overlapping"])
def engine(request: pytest.FixtureRequest) -> Iterator[CompiledEngine]:
    sizes = {"bucket_sizes": (4,), "token_bucket_sizes": (16,), "num_kv_blocks": 64, "max_model_len": 64}
    with CompiledEngine(
        str(checkpoint("llama")), enforce_eager=True, check_invariants=True, async_scheduling=request.param, **sizes
    ) as engine:
        yield engine


def damage(engine: CompiledEngine, value: float) -> None:
    with torch.no_grad():
        engine.runner.steps.weights.embedding.weight[DAMAGED] = value
    engine.reset_prefix_cache()


@pytest.mark.parametrize("kind", PARAMS)
def test_only_the_request_that_has_them_ends(engine: CompiledEngine, kind: str) -> None:
    damage(engine, 0.1)
    params = PARAMS[kind]
    expected = engine.generate(PROMPTS, params, use_tqdm=False)
    damage(engine, torch.nan)
    found = engine.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output, wanted in zip(PROMPTS, found, expected, strict=True):
        for completion, other in zip(output.outputs, wanted.outputs, strict=True):
            if DAMAGED in prompt:
                assert (completion.finish_reason, completion.token_ids, completion.text) == ("error", [], "")
                assert "logits are not finite" in str(completion.stop_reason)
            else:
                assert completion.token_ids == other.token_ids
                assert completion.finish_reason == "length"
    assert engine.stats().used_blocks == 0


def test_a_request_that_loses_them_on_its_way_keeps_what_it_has(engine: CompiledEngine) -> None:
    """The first token is good, and then it is the one that is damaged."""
    damage(engine, 0.1)
    params = SamplingParams(temperature=0, max_tokens=6, logit_bias={DAMAGED: 100.0})
    damage(engine, torch.nan)
    with pytest.warns(RequestsFailedWarning, match="logits are not finite"):
        (output,) = engine.generate([[5, 6, 7]], params, use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("error", [DAMAGED])


def test_beams(engine: CompiledEngine) -> None:
    damage(engine, torch.nan)
    failed, good = engine.beam_search([PROMPTS[1], PROMPTS[0]], beam_width=2, max_tokens=4)
    assert "logits are not finite" in str(failed.outputs[0].stop_reason)
    assert [len(beam.token_ids) for beam in good.outputs] == [4, 4]
    assert engine.stats().used_blocks == 0
