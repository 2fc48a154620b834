"""Replays of known outputs: what they count is what an engine counts that serves the same requests."""

import dataclasses
import random

import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api.speculative_config import SpeculativeConfig
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.tuning.draft_replay import KnownRequest, limits_for, replay, seconds_of

_CODE = (
    "def read_rows(path, separator):\n    with open(path) as file:\n        rows = [line.split(separator) for line in"
    " file]\n    return rows\n\n\ndef read_rows(path, separator):\n    with open(path)"
)
SECONDS = {(size, size * count): 1e-2 * (1 + 0.05 * size * count) for size in (1, 2, 4) for count in (1, 2, 4, 8, 16)}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(
            {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 4},
            id="ngram",
            marks=pytest.mark.battery,
        ),
        pytest.param({"method": "suffix"}, id="suffix", marks=pytest.mark.battery),
        pytest.param(
            {"method": "suffix", "speculative_token_tree": "auto", "num_speculative_tokens": 6}, id="suffix tree"
        ),
    ],
)
def test_counts_are_those_of_an_engine(fields: dict) -> None:
    """Requests that come and go beside each other, with prompts in chunks; some end by a stop token."""
    config = SpeculativeConfig(**fields, adaptive=False)
    rng = random.Random(4)
    prompts = [_CODE[start : start + rng.randint(8, 240)] for start in range(0, 70, 10)]
    params = [SamplingParams(temperature=0, max_tokens=rng.randint(2, 30), ignore_eos=True) for _ in prompts]
    engine = CompiledEngine(
        enforce_eager=True,
        bucket_sizes=(1, 4),
        max_num_seqs=3,
        max_num_batched_tokens=48,
        enable_prefix_caching=False,
        speculative_config=config,
        progress="off",
    )
    with engine:
        plain = engine.generate(prompts, params, use_tqdm=False)
        for number in (1, 3, 4):
            tokens = plain[number].outputs[0].token_ids
            params[number] = dataclasses.replace(params[number], stop_token_ids=(tokens[len(tokens) // 2],))
        before = engine.stats()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        stats, limits = engine.stats().since(before), engine.scheduler.limits
    known = [
        KnownRequest(out.prompt_token_ids, out.outputs[0].token_ids, out.outputs[0].finish_reason == "length")
        for out in outputs
    ]
    assert {one.ends_by_length for one in known} == {True, False}
    if config.method == "suffix":  # what the first run kept is drafted in the second
        known = [KnownRequest(out.prompt_token_ids, out.outputs[0].token_ids) for out in plain]
        stats = before
    found = replay(known, limits, config)
    assert found.num_drafts == stats.num_drafts > 10
    assert found.num_draft_tokens == stats.num_draft_tokens
    assert found.num_accepted_by_position == stats.num_accepted_by_position
    assert found.num_accepted == stats.num_accepted_draft_tokens > 10
    assert found.mean_accepted_length == stats.mean_accepted_length


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_outputs_that_repeat_take_fewer_seconds(method: str, size: int) -> None:
    phrase = list(range(20, 40))
    known = [KnownRequest([*phrase, number, *phrase[:6]], phrase[6:] * 3) for number in range(6)]
    limits = limits_for(known, [n for n in (1, 2, 4) if n <= size], one_graph=True)
    plain = replay(known, limits, None, SECONDS)
    assert plain.num_decode_tokens == pytest.approx(6 * 42 - 6, abs=12), "all but those that follow prompts"
    assert (plain.num_drafts, plain.mean_accepted_length, plain.draft_seconds) == (0, 1.0, 0.0)
    if size == 1:
        assert plain.tokens_per_second == pytest.approx(1 / SECONDS[1, 1])
    drafted = replay(known, limits, SpeculativeConfig(method=method), SECONDS)
    assert drafted.decode_seconds < 0.7 * plain.decode_seconds
    assert drafted.mean_accepted_length > 2
    assert drafted.rates_by_position == sorted(drafted.rates_by_position, reverse=True)


def test_what_steps_take_is_what_was_measured_not_what_a_replay_takes() -> None:
    """By the machine's clock plain steps that rest would seem to take nothing, and then no drafts would pay."""
    phrase = list(range(20, 40))
    known = [KnownRequest([*phrase, 1, *phrase[:6]], [phrase[place % 20] for place in range(6, 1500)])]
    limits = limits_for(known, [1], one_graph=True)
    plain = replay(known, limits, None, SECONDS)
    drafted = replay(known, limits, SpeculativeConfig(method="ngram"), SECONDS)
    assert drafted.decode_seconds < 0.3 * plain.decode_seconds
    assert drafted.num_accepted > 1200


def test_new_text_has_no_drafts_and_loses_no_step() -> None:
    known = [KnownRequest([1, 2, 3], range(10, 60)), KnownRequest([4], range(100, 150), ends_by_length=False)]
    limits = limits_for(known, [1, 2], one_graph=False)
    plain = replay(known, limits, None, SECONDS)
    drafted = replay(known, limits, SpeculativeConfig(method="ngram"), SECONDS)
    assert (drafted.num_drafts, drafted.num_decode_tokens) == (0, plain.num_decode_tokens)
    assert drafted.decode_seconds == plain.decode_seconds > 0


def test_of_one_graph_steps_without_drafts_take_as_long_as_those_of_an_engine_without() -> None:
    """Those of three requests are between sizes that were measured with drafts and without."""
    known = [KnownRequest([number], range(100 * number, 100 * number + 40)) for number in (1, 2, 3)]
    seconds = {(1, 1): 1.0, (1, 2): 1.0, (1, 4): 1.0, (4, 4): 2.0, (4, 8): 3.0, (4, 16): 5.0}
    limits = limits_for(known, [1, 4], one_graph=True)
    plain = replay(known, limits, None, seconds)
    drafted = replay(known, limits, SpeculativeConfig(method="ngram", num_speculative_tokens=3), seconds)
    assert (drafted.num_drafts, drafted.num_decode_tokens) == (0, plain.num_decode_tokens)
    assert drafted.decode_seconds == plain.decode_seconds == 39.0


def test_an_output_ends_where_it_ended() -> None:
    """By a text or a grammar, say: its last token was among those before, and what was drafted goes on."""
    known = [KnownRequest([7, 8, 9, 7, 8], [9, 7, 8, 9, 7, 8, 9], ends_by_length=False)]
    config = SpeculativeConfig(method="ngram", prompt_lookup_max=2, adaptive=False, num_speculative_tokens=15)
    found = replay(known, limits_for(known, [1], one_graph=True), config)
    assert (found.num_drafts, found.num_accepted, found.num_draft_tokens) == (2, 5, 9), "3 and 6 drafts"


def test_seconds_between_and_beyond() -> None:
    seconds = {(2, 2): 1.0, (2, 8): 4.0}
    assert [seconds_of(Bucket("decode", tokens, 2), seconds) for tokens in (2, 4, 8, 16)] == [1.0, 2.0, 4.0, 8.0]
    with pytest.raises(ValueError, match="step_seconds must have decode_4, given none"):
        seconds_of(Bucket("decode", 4, 4), seconds)
