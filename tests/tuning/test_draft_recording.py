"""What a model does for drafts is seen once: replays with that count what an engine counts that drafts by a model."""

import contextlib
import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api.speculative_config import SpeculativeConfig
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.request import RequestId
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.worker import StepResult
from compiled_llm.tuning import draft_recording
from compiled_llm.tuning.draft_recording import _Recording
from compiled_llm.tuning.draft_replay import (
    KnownDrafts,
    KnownRequest,
    Served,
    known_tokens,
    limits_for,
    replay,
    wrong_drafts,
)
from tests.mtp_checkpoints import guessing_checkpoint

_CODE = (
    "def read_rows(path, separator):\n    with open(path) as file:\n        rows = [line.split(separator) for line in"
    " file]\n    return rows\n\n\ndef read_rows(path, separator):\n    with open(path)"
)
_DRAFTERS = DEMO_MODEL.parent / "demo_drafters"


def engine_of(config: Mapping[str, Any], **others: Any) -> CompiledEngine:
    values: dict[str, Any] = {"bucket_sizes": (1, 4), "max_num_seqs": 3, "max_num_batched_tokens": 48, **others}
    return CompiledEngine(
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config={**config, "adaptive": False},
        progress="off",
        **values,
    )


def config_of(method: str, **fields: Any) -> dict[str, Any]:
    model = {"model": str(_DRAFTERS / method)} if (_DRAFTERS / method).is_dir() else {}
    return {"method": method, **model, **fields}


@pytest.mark.parametrize(
    "config",
    [
        config_of("lookahead", num_speculative_tokens=5),
        config_of("eagle3"),
        *(
            pytest.param(config, marks=pytest.mark.battery)
            for config in (
                config_of("draft_model"),
                config_of("medusa"),
                config_of("layer_skip"),
                config_of("draft_model", speculative_token_tree="auto", num_speculative_tokens=7),
                config_of("medusa", speculative_token_tree="auto", num_speculative_tokens=7),
            )
        ),
    ],
    ids=lambda config: config["method"] + " tree" * ("speculative_token_tree" in config),
)
def test_counts_are_those_of_an_engine(config: Mapping[str, Any]) -> None:
    """Greedy requests and others that come and go beside each other, with prompts in chunks; one ends by a stop."""
    rng = random.Random(4)
    check_counts(config, [_CODE[start : start + rng.randint(8, 240)] for start in range(0, 70, 10)])


@pytest.mark.battery
def test_counts_of_the_layer_that_a_checkpoint_guesses_with(tmp_path: Path) -> None:
    model = guessing_checkpoint("deepseek-v3", tmp_path, 0.02)
    rng = random.Random(5)
    prompts = [[rng.randrange(1, 90) for _ in range(rng.randint(3, 60))] for _ in range(7)]
    check_counts(config_of("mtp", num_speculative_tokens=3), prompts, model=str(model), dtype="float32")


def check_counts(config: Mapping[str, Any], prompts: Sequence[Any], **arguments: Any) -> None:
    wanted = SpeculativeConfig(**{**config, "adaptive": False})
    rng = random.Random(6)
    params = [
        SamplingParams(temperature=0.4 * (number % 3), max_tokens=rng.randint(2, 30), ignore_eos=True, seed=number)
        for number in range(len(prompts))
    ]
    with engine_of(config, **arguments) as engine:
        plain = engine.generate(prompts, params, use_tqdm=False)
        tokens = plain[1].outputs[0].token_ids
        params[1] = dataclasses.replace(params[1], stop_token_ids=(tokens[len(tokens) // 2],))
        before = engine.stats()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        stats, limits = engine.stats().since(before), engine.scheduler.limits
        if wanted.has_trees:  # which nodes are chosen depends on what was right before
            outputs, stats = plain, before
        requests = [
            KnownRequest(out.prompt_token_ids, one.token_ids, one.finish_reason == "length", own, own.seed or 0)
            for out, own in zip(outputs, params, strict=True)
            for one in out.outputs
        ]
        known = draft_recording.record(engine, wanted, requests)
    assert known.num_again == known.num_tokens == sum(len(one.output_token_ids) for one in requests)
    known = dataclasses.replace(known, seconds={1: 0.001}, reading_seconds=0.0001)
    found = replay(requests, limits, wanted, None, known)
    assert found.num_drafts == stats.num_drafts > 10
    assert found.num_draft_tokens == stats.num_draft_tokens
    assert found.num_accepted_by_position == stats.num_accepted_by_position
    assert found.num_accepted == stats.num_accepted_draft_tokens > 3
    if wanted.method != "lookahead":
        places = {
            (number, len(one.prompt_token_ids) + count)
            for number, one in enumerate(requests)
            for count in range(1, len(one.output_token_ids) - 1)
        }
        assert places <= known.drafts.keys(), "behind each token, whatever was right before"
        num_read = sum(len(one.prompt_token_ids) for one in requests)
        assert found.draft_seconds > 0.001 * 10 + 0.0001 * num_read


def test_a_network_drafts_behind_tokens_that_the_model_would_not_have_sampled() -> None:
    """What a draft model drafts is what it says by itself behind the prompt and the outputs of the trace."""
    rng = random.Random(2)
    requests = [
        KnownRequest(
            [rng.randrange(300, 4000) for _ in range(length)],
            [rng.randrange(300, 4000) for _ in range(5)],
            sampling_params=SamplingParams(temperature=0),
        )
        for length in (20, 3)
    ]
    config = config_of("draft_model", num_speculative_tokens=3) | {"quantization": "none"}  # as below
    with engine_of(config) as engine:
        known = draft_recording.record(engine, SpeculativeConfig.of(config), requests)
    assert (known.num_tokens, known.num_again) == (10, 0)
    places = [(number, len(one.prompt_token_ids) + more) for number, one in enumerate(requests) for more in (1, 2, 4)]
    prompts = [[*requests[number].prompt_token_ids, *requests[number].output_token_ids][:end] for number, end in places]
    with CompiledEngine(config["model"], enforce_eager=True, bucket_sizes=(8,), progress="off") as drafter:
        outputs = drafter.generate(
            prompts, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False
        )
    assert [known.drafts[place] for place in places] == [tuple(out.outputs[0].token_ids) for out in outputs]


def test_what_drafting_takes_is_measured_for_so_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one token each there is no step to draft for; of those that have more, the longest are served."""
    config = config_of("medusa", num_speculative_tokens=1)
    requests = [KnownRequest([number, 7, 8], [9] * (1 + 11 * (number > 0)), number == 2) for number in range(3)]
    wanted = SpeculativeConfig.of(config)
    with engine_of(config) as engine:
        exchanges = []
        launch = engine.own_runner.launch
        monkeypatch.setattr(
            engine.own_runner, "launch", lambda out: exchanges.append(engine.own_runner.exchange) or launch(out)
        )
        with pytest.warns(UserWarning, match="not measured for 3 requests at once.*it is taken to last as for 1, 2"):
            known = draft_recording.with_seconds(KnownDrafts(), engine, wanted, requests, [1, 2, 3])
        assert set(exchanges) == {None}, "no copy of tokens counts as drafting"
        with pytest.raises(ValueError, match="must have more than one token"):
            draft_recording.with_seconds(KnownDrafts(), engine, wanted, requests[:1], [1])
        long = KnownRequest(range(5), [1] * engine.scheduler.request_capacity)
        with pytest.raises(ValueError, match="a request of the trace has 1029 tokens with its output"):
            draft_recording.record(engine, wanted, [long])
        assert engine.own_runner.exchange is None
    assert set(known.seconds) == {1, 2}
    assert min(known.seconds.values()) > 0


def test_nothing_is_put_in_the_place_of_tokens_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("lookahead", num_speculative_tokens=2)
    with engine_of(config) as engine:
        monkeypatch.setattr(type(engine.own_runner), "collect", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            draft_recording.record(engine, SpeculativeConfig.of(config), [KnownRequest([1, 2], [3, 4])])
        assert engine.own_runner.exchange is None


def test_a_token_is_counted_where_it_is_sampled() -> None:
    """Not where it is computed again, in parts, after its request had to leave."""
    recording = _Recording(SimpleNamespace(own_runner=None))  # type: ignore[arg-type]
    output = SchedulerOutput(
        request_ids=(RequestId("0"), RequestId("1")),
        num_scheduled_tokens=(4, 1),
        num_computed_tokens=(0, 1),
        num_samples=(0, 1),
        token_ids=(7, 8, 10, 11, 9),
    )
    running = [Served(KnownRequest([7, 8], [10, 11, 12]), 0), Served(KnownRequest([7, 9], [13, 14]), 1)]
    tokens = known_tokens(output, running)
    assert tokens == (12, 13), "the first is not sampled"
    result = StepResult(Bucket("tokens", 8, 2), (12, 99))
    assert recording._entered(output, running, tokens, result).sampled_token_ids == tokens
    assert (recording.num_tokens, recording.num_again) == (1, 0)


def test_the_samples_of_each_number_of_drafts_count_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(engine: Any, config: SpeculativeConfig, requests: Any) -> KnownDrafts:
        return KnownDrafts(samples={(0, config.num_tokens, (1,)): 5}, num_again=config.num_tokens)

    monkeypatch.setattr(draft_recording, "record", record)
    configs = [{"method": "ngram"}, *(config_of("lookahead", num_speculative_tokens=count) for count in (3, 7))]
    found = draft_recording.of_lookahead(None, [], configs)  # type: ignore[arg-type]
    samples = {(0, 3, (1,)): 5, (0, 7, (1,)): 5}
    assert found == {place: KnownDrafts(samples=samples, num_again=count) for place, count in ((1, 3), (2, 7))}


def test_what_stands_before_a_wrong_draft_does_not_depend_on_the_step() -> None:
    """One that begins earlier, with a right draft, samples behind the same two wrong ones."""
    known = KnownRequest([7, 8, 9], [10, 11, 12, 13])
    found = []
    for start, drafts in ((2, (10, 20, 21)), (3, (20, 21)), (3, (11, 12))):
        output = SchedulerOutput(
            request_ids=(RequestId("5"),),
            num_scheduled_tokens=(1 + len(drafts),),
            num_computed_tokens=(start,),
            num_samples=(1 + len(drafts),),
            token_ids=(0, *drafts),
        )
        found.append(list(wrong_drafts(output, [Served(known, 5)])))
    wrong = [(5, 4, (20,)), (5, 4, (20, 21))]
    assert found == [list(zip((2, 3), wrong, strict=True)), list(zip((1, 2), wrong, strict=True)), []]


def test_seconds_of_drafting_between_those_that_were_measured() -> None:
    known = KnownDrafts(seconds={1: 1.0, 4: 4.0, 16: 10.0})
    assert [known.drafting_seconds(size) for size in (1, 3, 4, 10, 16, 20)] == [1.0, 3.0, 4.0, 7.0, 10.0, 10.0]


def test_drafting_counts_behind_each_step_and_each_token_of_prompts_once() -> None:
    requests = [KnownRequest([1] * 5, [2, 3, 4, 5]), KnownRequest([6] * 7, [7, 8, 9, 10])]
    config = SpeculativeConfig(method="layer_skip", num_speculative_tokens=1, adaptive=False)
    of_both = KnownDrafts(seconds={1: 4.0, 2: 8.0}, reading_seconds=0.25)
    right = dataclasses.replace(of_both, drafts={(number, 5 + 2 * number + 1): (3 + 5 * number,) for number in (0, 1)})
    found = []
    for size in (1, 2):
        limits = limits_for(requests, [1, 2][:size], one_graph=True)
        found.append([replay(requests, limits, config, None, known).draft_seconds for known in (of_both, right)])
    # Behind each of four steps, or of three where one gives the second and the third token.
    reading = 0.25 * (5 + 7)
    alone, beside = [2 * 4 * 4.0 + reading, 2 * 3 * 4.0 + reading], [4 * 8.0 + reading, 3 * 8.0 + reading]
    assert found == [pytest.approx(alone, abs=0.01), pytest.approx(beside, abs=0.01)], "and what looking takes here"


def test_a_prompt_is_read_once_for_all_its_continuations() -> None:
    requests = [KnownRequest([1] * 8, [2, number]) for number in (3, 4)] + [KnownRequest([1] * 4, [2, 3])]
    config = SpeculativeConfig(method="layer_skip", num_speculative_tokens=1, adaptive=False)
    known = KnownDrafts(seconds={1: 0.0}, reading_seconds=1.0)
    for sizes in ([1], [1, 3]):
        found = replay(requests, limits_for(requests, sizes, one_graph=True), config, None, known)
        assert found.draft_seconds == pytest.approx(8 + 4, abs=0.01)


def test_the_longest_chain_is_recorded_once_and_each_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, measured, started = list[int](), list[int](), list[int]()

    def record(engine: Any, config: SpeculativeConfig, requests: Any) -> KnownDrafts:
        recorded.append(config.num_tokens)
        return KnownDrafts(num_tokens=config.num_tokens)

    def with_seconds(known: KnownDrafts, engine: Any, config: SpeculativeConfig, *others: Any) -> KnownDrafts:
        measured.append(config.num_tokens)
        return dataclasses.replace(known, seconds={1: float(config.num_tokens)})

    def start(config: Mapping[str, Any]) -> Any:
        started.append(config["num_speculative_tokens"])
        return None if config["num_speculative_tokens"] == 9 else contextlib.nullcontext()

    monkeypatch.setattr(draft_recording, "record", record)
    monkeypatch.setattr(draft_recording, "with_seconds", with_seconds)
    tree = config_of("medusa", num_speculative_tokens=7, speculative_token_tree="auto")
    configs = [{"method": "ngram", "num_speculative_tokens": 15}, config_of("medusa", num_speculative_tokens=2)]
    configs += [config_of("medusa", num_speculative_tokens=4), tree, config_of("eagle3", num_speculative_tokens=1)]
    configs.append(config_of("eagle3", num_speculative_tokens=9))
    found = dict(draft_recording.of_networks(start, [], configs, [1]))
    assert started == [9, 1, 4, 2, 7], "the chains of a method one after the other"
    assert measured == [1, 4, 2, 7]
    assert recorded == [1, 4, 7]
    assert found.pop(5) is None, "its engine could not start"
    assert {place: (known.num_tokens, known.seconds[1]) for place, known in found.items() if known is not None} == {
        1: (4, 2.0),
        2: (4, 4.0),
        3: (7, 7.0),
        4: (1, 1.0),
    }
