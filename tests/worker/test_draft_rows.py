"""Steps with drafted tokens: a row for each token of a request, which samples what plain decoding samples there."""

from collections.abc import Sequence

import pytest

from compiled_llm import EngineConfig, SamplingParams
from compiled_llm.models.config_file import read_config
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, StartedRequest
from compiled_llm.scheduling.worker import StepResult
from compiled_llm.system.progress import StartProgress
from compiled_llm.worker.runner import ModelRunner
from tests.families import checkpoint

NUM_DRAFTS = 2
PROMPTS = {"a": [5, 6, 7, 8, 9], "b": [11, 12], "c": [21, 22, 23]}
PARAMS = {
    "a": SamplingParams(temperature=1.0, seed=1, logprobs=2),
    "b": SamplingParams(temperature=0, logprobs=2),
    "c": SamplingParams(temperature=0.7, top_k=30, seed=2, logprobs=2),
}
BLOCKS = {"a": (1, 2, 3, 4), "b": (5, 6, 7, 8), "c": (9, 10, 11, 12)}


def make_runner(num_draft_tokens: int) -> ModelRunner:
    config = EngineConfig(
        enforce_eager=True,
        bucket_sizes=(1, 4),
        token_bucket_sizes=(16,),
        max_model_len=32,
        block_size=8,
        num_kv_blocks=12,
    )
    directory = checkpoint("llama")
    return ModelRunner(config, read_config(directory), directory, StartProgress("off"), num_draft_tokens)


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[list[int], list[float]]]:
    """The tokens of each request and their log-probabilities, a token a step."""
    runner, tokens, logprobs = make_runner(0), {name: [] for name in PROMPTS}, {name: [] for name in PROMPTS}
    result = run(runner, PROMPTS, dict.fromkeys(PROMPTS, 0), admits=True)
    for _ in range(7):
        assert result.logprobs is not None
        for index, name in enumerate(PROMPTS):
            tokens[name].append(result.sampled_token_ids[index])
            logprobs[name].append(result.logprobs.logprobs[index])
        lengths = {name: len(prompt) + len(tokens[name]) - 1 for name, prompt in PROMPTS.items()}
        result = run(runner, {name: tokens[name][-1:] for name in PROMPTS}, lengths)
        assert result.bucket.name == "decode_4"
    runner.close()
    return {name: (tokens[name], logprobs[name]) for name in PROMPTS}


@pytest.fixture(scope="module")
def drafting() -> ModelRunner:
    return make_runner(NUM_DRAFTS)


def run(
    runner: ModelRunner,
    tokens: dict[str, list[int]],
    computed: dict[str, int],
    *,
    samples: dict[str, int] | None = None,
    feedback: Sequence[int] | None = None,
    admits: bool = False,
) -> StepResult:
    """A step of these tokens. ``samples``: 1 where it does not say otherwise."""
    requests = tuple(tokens)
    seeds = {name: PARAMS[name].seed or 0 for name in requests}
    output = SchedulerOutput(
        request_ids=requests,
        num_scheduled_tokens=tuple(len(tokens[name]) for name in requests),
        num_computed_tokens=tuple(computed[name] for name in requests),
        num_samples=tuple((samples or {}).get(name, 1) for name in requests),
        feedback=tuple(feedback or [-1] * len(requests)),
        token_ids=tuple(token for name in requests for token in tokens[name]),
        resets=admits,
        admissions=tuple(StartedRequest(name, PARAMS[name], seeds[name], (), ()) for name in requests if admits),
        table_updates=tuple((name, 0, BLOCKS[name]) for name in requests if admits),
    )
    return runner.collect(runner.launch(output))


def test_right_drafts_give_the_tokens_of_plain_steps_at_once(drafting: ModelRunner, plain: dict) -> None:
    """Three tokens of ``a``, one of ``b`` and two of ``c`` in a step, then three of ``b`` alone."""
    tokens = {name: found for name, (found, _) in plain.items()}
    first = run(drafting, PROMPTS, dict.fromkeys(PROMPTS, 0), admits=True)
    assert first.bucket.name == "tokens_16"
    assert first.sampled_token_ids == tuple(tokens[name][0] for name in PROMPTS)

    computed = {name: len(prompt) for name, prompt in PROMPTS.items()}
    counts = {"a": 3, "b": 1, "c": 2}
    step = {name: tokens[name][:count] for name, count in counts.items()}
    result = run(drafting, step, computed, samples=counts)
    assert result.bucket.name == "decode_4x2"
    expected = [(name, place) for name, count in counts.items() for place in range(1, 1 + count)]
    assert result.sampled_token_ids == tuple(tokens[name][place] for name, place in expected)
    assert result.logprobs is not None
    assert result.logprobs.logprobs == pytest.approx([plain[name][1][place] for name, place in expected], abs=1e-4)
    assert len(result.logprobs.top_ids) == len(expected)

    result = run(drafting, {"b": tokens["b"][1:4]}, {"b": computed["b"] + 1}, samples={"b": 3})
    assert result.bucket.name == "decode_1x3"
    assert result.sampled_token_ids == tuple(tokens["b"][2:5])
    result = run(drafting, {"b": tokens["b"][4:6]}, {"b": computed["b"] + 4}, samples={"b": 2})
    assert (result.bucket.name, result.sampled_token_ids) == ("decode_1x2", tuple(tokens["b"][5:7]))


def test_rows_before_a_wrong_draft_count_and_its_slot_is_written_again(drafting: ModelRunner, plain: dict) -> None:
    tokens = {name: found for name, (found, _) in plain.items()}
    run(drafting, PROMPTS, dict.fromkeys(PROMPTS, 0), admits=True)
    known, length = tokens["a"], len(PROMPTS["a"])
    wrong = (known[1] + 1) % drafting.model_config.vocab_size
    result = run(drafting, {"a": [known[0], wrong, 3]}, {"a": length}, samples={"a": 3})
    assert result.sampled_token_ids[0] == known[1]
    result = run(drafting, {"a": known[1:4]}, {"a": length + 1}, samples={"a": 3})
    assert result.sampled_token_ids == tuple(known[2:5])


def test_drafts_beside_a_chunk_of_a_prompt_and_a_token_fed_back(drafting: ModelRunner, plain: dict) -> None:
    """The last row of ``a`` in one step samples the token that the next step takes, without the host."""
    tokens = {name: found for name, (found, _) in plain.items()}
    chunk = {"a": PROMPTS["a"], "b": PROMPTS["b"], "c": PROMPTS["c"][:1]}
    run(drafting, chunk, dict.fromkeys(PROMPTS, 0), samples={"c": 0}, admits=True)
    length = len(PROMPTS["a"])
    step = {"c": PROMPTS["c"][1:], "a": tokens["a"][:3]}
    result = run(drafting, step, {"c": 1, "a": length}, samples={"a": 3})
    assert result.sampled_token_ids == (tokens["c"][0], *tokens["a"][1:4])
    result = run(drafting, {"a": [0]}, {"a": length + 3}, feedback=[3])
    assert result.sampled_token_ids == (tokens["a"][4],)


def test_a_step_without_drafts_runs_in_the_bucket_of_an_engine_without_a_drafter(drafting: ModelRunner) -> None:
    plain = make_runner(0)
    assert [bucket.num_rows for bucket in plain.steps.buckets] == [1, 4, 4]
    assert [bucket.num_rows for bucket in drafting.steps.buckets] == [1, 2, 3, 4, 8, 12, 4]
    assert plain.steps.last_tokens.shape == (4,)
    assert drafting.steps.last_tokens.shape == (12,)
    names = [bucket.name for bucket in drafting.steps.buckets]
    assert names == ["decode_1", "decode_1x2", "decode_1x3", "decode_4", "decode_4x2", "decode_4x3", "tokens_16"]
    assert plain.facts.limits.num_draft_tokens == 0
    assert drafting.facts.limits.num_draft_tokens == NUM_DRAFTS
    plain.close()
