"""BeamGroup alone, on a made-up model, against a search over whole tables and against all continuations."""

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from compiled_llm.api.outputs import RequestOutput
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.engine.admission import PreparedRequest
from compiled_llm.engine.beam_search import BeamGroup, check_beam_search, continuations
from compiled_llm.text.prompts import EncodedPrompt

PROMPT = [3, 1, 4]


class Model:
    """Log-probabilities of the next token, which depend on all tokens before it."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size, self.seed = vocab_size, seed

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        rng = random.Random(f"{self.seed} {list(token_ids)}")
        weights = [rng.expovariate(1.0) ** 2 + 1e-6 for _ in range(self.vocab_size)]
        return [math.log(weight / sum(weights)) for weight in weights]

    def best(self, token_ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        logprobs = self.logprobs(token_ids)
        best = sorted(range(self.vocab_size), key=lambda token_id: -logprobs[token_id])[:count]
        return best, [logprobs[token_id] for token_id in best]


def make_group(
    width: int, max_tokens: int, penalty: float, eos: Sequence[int], prompt: Sequence[int] = PROMPT
) -> BeamGroup:
    encoded = EncodedPrompt(None, list(prompt), "salt")
    prepared = PreparedRequest(encoded, SamplingParams(), frozenset(), len(prompt) + max_tokens, [], [])
    return BeamGroup("name", prepared, width, penalty, eos)


def search(model: Model, width: int, max_tokens: int, penalty: float, eos: Sequence[int]) -> RequestOutput:
    """What the engine does, but the beams' results come in any order."""
    rng = random.Random(model.seed)
    group = make_group(width, max_tokens, penalty, eos)
    group.start()
    for _ in range(max_tokens):
        requests = list(group.requests)
        assert len({request.request_id for request in requests}) == len(requests) <= width
        for request in rng.sample(requests, len(requests)):
            assert not group.has_all
            group.take(request, *model.best(request.prompt_token_ids, group.count + 3))
        assert group.has_all
        pairs = group.advance()
        assert [child for _, child in pairs] == group.requests
        for parent, child in pairs:
            assert parent in requests
            assert child.prompt_token_ids[:-1] == parent.prompt_token_ids
            assert child.request_id not in {request.request_id for request in requests}
        if not pairs:
            return group.output(None)
    raise AssertionError("the search went on after max_tokens")


def results(output: RequestOutput) -> list[tuple[list[int], float, str | None]]:
    return [(out.token_ids, out.cumulative_logprob or 0.0, out.finish_reason) for out in output.outputs]


def by_tables(model: Model, width: int, max_tokens: int, penalty: float, eos: Sequence[int]) -> list[tuple]:
    """The same search as transformers writes it: a fixed number of beams, some of which stand for nothing."""
    none = -1.0e9
    running: list[tuple[list[int], float]] = [([], 0.0)] + [([], none)] * (width - 1)
    ended: list[tuple[float, list[int], float]] = [(none, [], 0.0)] * width
    for length in range(1, max_tokens + 1):
        table = [
            ([*tokens, token_id], total + logprob)
            for tokens, total in running
            for token_id, logprob in enumerate(model.logprobs(PROMPT + tokens))
        ]
        table = sorted(table, key=lambda entry: -entry[1])[: max(2, 1 + len(eos)) * width]
        over = [tokens[-1] in eos or length == max_tokens for tokens, _ in table]
        alive = sorted(zip(table, over, strict=True), key=lambda pair: -(pair[0][1] + none * pair[1]))
        running = [entry for entry, _ in alive[:width]]
        for place, ((tokens, total), is_over) in enumerate(zip(table, over, strict=True)):
            if is_over and place < width:
                ended.append((total / length**penalty, tokens, total))
        ended = sorted(ended, key=lambda entry: -entry[0])[:width]
        going = [total for (_, total), is_over in alive[:width] if not is_over]
        if not going or going[0] / length**penalty <= ended[-1][0]:
            break
    return [
        (tokens, total, "stop" if tokens[-1] in eos else "length") for score, tokens, total in ended if score > none
    ]


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("eos", [(), (2,), (0, 5)], ids=str)
def test_equal_to_a_search_over_tables(penalty: float, eos: tuple[int, ...]) -> None:
    num_stops = num_lengths = 0
    for seed, width, max_tokens in itertools.product(range(4), (1, 2, 3, 5, 10), (1, 2, 6)):
        model = Model(vocab_size=31, seed=seed)
        found = results(search(model, width, max_tokens, penalty, eos))
        expected = by_tables(model, width, max_tokens, penalty, eos)
        assert [(tokens, reason) for tokens, _, reason in found] == [(tokens, reason) for tokens, _, reason in expected]
        assert [total for _, total, _ in found] == pytest.approx([total for _, total, _ in expected])
        num_stops += sum(reason == "stop" for *_, reason in found)
        num_lengths += sum(reason == "length" for *_, reason in found)
    assert bool(num_stops) == bool(eos)
    assert num_lengths > 0


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_as_wide_as_all_continuations_it_finds_the_best_of_all(penalty: float) -> None:
    model, max_tokens = Model(vocab_size=4, seed=7), 4
    everything = []
    for tokens in itertools.product(range(4), repeat=max_tokens):
        total = sum(model.logprobs([*PROMPT, *tokens[:n]])[tokens[n]] for n in range(max_tokens))
        everything.append((total / max_tokens**penalty, list(tokens)))
    best = sorted(everything, reverse=True)
    output = search(model, 256, max_tokens, penalty, ())
    assert [out.token_ids for out in output.outputs] == [tokens for _, tokens in best]
    assert len(output.outputs) == 256
    narrow = search(model, 1, max_tokens, penalty, ())
    greedy: list[int] = []
    for _ in range(max_tokens):
        greedy += model.best(PROMPT + greedy, 1)[0]
    assert narrow.outputs[0].token_ids == greedy


class Table:
    """A model of which one test says all: the tokens so far -> probabilities of tokens 0 to 3; else all alike."""

    vocab_size, seed = 4, 0

    def __init__(self, probabilities: dict[tuple[int, ...], list[float]]) -> None:
        self.probabilities = probabilities

    def best(self, token_ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        row = self.probabilities.get(tuple(token_ids[len(PROMPT) :]), [0.25] * 4)
        best = sorted(range(4), key=lambda token_id: -row[token_id])[:count]
        return best, [math.log(row[token_id]) for token_id in best]


EOS = 3
# Greedy takes token 0; but what follows token 1 is surer.
TRAP = {(): [0.5, 0.4, 0.05, 0.05], (0,): [0.3, 0.3, 0.2, 0.2], (1,): [0.02, 0.94, 0.02, 0.02]}


def test_a_likely_continuation_overtakes_a_likely_beginning() -> None:
    model: Any = Table(TRAP)
    assert search(model, 1, 2, 1.0, ()).outputs[0].token_ids[0] == 0
    output = search(model, 2, 2, 1.0, ())
    assert output.outputs[0].token_ids == [1, 1]
    assert output.outputs[0].cumulative_logprob == pytest.approx(math.log(0.4 * 0.94))
    assert [out.index for out in output.outputs] == [0, 1]


@pytest.mark.parametrize(("penalty", "first"), [(0.0, [EOS]), (2.0, [0, EOS])])
def test_the_penalty_decides_between_short_and_long(penalty: float, first: list[int]) -> None:
    model: Any = Table({(): [0.45, 0.05, 0.05, 0.45], (0,): [0.05, 0.05, 0.05, 0.85]})
    outputs = search(model, 2, 3, penalty, (EOS,)).outputs
    assert outputs[0].token_ids == first
    assert {out.finish_reason for out in outputs} == {"stop"}
    assert sorted(len(out.token_ids) for out in outputs) == [1, 2]


def test_an_end_of_text_outside_of_the_likeliest_ends_nothing() -> None:
    """Of four looked at, the third is one; it neither ends nor goes on, and two others do."""
    model: Any = Table({(): [0.4, 0.3, 0.1, 0.2]})
    output = search(model, 2, 1, 1.0, (EOS,))
    assert [out.token_ids for out in output.outputs] == [[0], [1]]
    group = make_group(2, 5, 1.0, (EOS,))
    group.take(group.start(), *model.best(PROMPT, 4))
    assert [child.prompt_token_ids[-1] for _, child in group.advance()] == [0, 1]


def test_it_is_over_when_no_beam_can_come_in_among_the_best() -> None:
    model: Any = Table({(): [0.05, 0.03, 0.02, 0.9]})
    group = make_group(1, 50, 1.0, (EOS,))
    group.take(group.start(), *model.best(PROMPT, 4))
    assert group.advance() == []
    assert results(group.output(None)) == [([EOS], pytest.approx(math.log(0.9)), "stop")]


def test_its_requests_are_of_one_token_and_keep_their_blocks() -> None:
    group = make_group(3, 5, 1.0, (EOS,))
    request = group.start()
    assert group.count == 6
    assert (request.prompt_token_ids, request.max_num_tokens) == (PROMPT, len(PROMPT) + 1)
    assert request.keeps_blocks
    assert request.stop_token_ids == frozenset(), "an end-of-text token is for the group to see"
    assert request.cache_salt == "salt"
    assert request.sampling_params.greedy
    assert request.sampling_params.logprobs == group.count


def test_a_failure_is_its_only_output() -> None:
    group = make_group(3, 5, 1.0, ())
    group.start()
    group.failure = "the reason"
    output = group.output(None)
    assert output.finished
    (completion,) = output.outputs
    assert (completion.finish_reason, completion.stop_reason, completion.token_ids) == ("error", "the reason", [])


def test_how_many_are_looked_at() -> None:
    assert [continuations(5, eos) for eos in ((), (1,), (1, 2), (1, 2, 3))] == [10, 10, 15, 20]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"beam_width": 0}, "beam_width must be an integer from 1 to 10 .*given 0: raise max_logprobs"),
        ({"beam_width": 11}, "from 1 to 10 .*max_logprobs, 20, over 2 continuations.*given 11"),
        ({"beam_width": 7, "eos_token_ids": (1, 2)}, "from 1 to 6 .*over 3 continuations.*given 7"),
        ({"beam_width": 1, "max_logprobs": 1}, "from 1 to 0 "),
        ({"beam_width": True}, "beam_width .*given True"),
        ({"beam_width": 2.0}, "beam_width .*given 2.0"),
        ({"beam_width": None}, "beam_width .*given None"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, or None, given 0"),
        ({"max_tokens": True}, "max_tokens .*given True"),
        ({"max_tokens": 1.5}, "max_tokens .*given 1.5"),
        ({"length_penalty": "1"}, "length_penalty must be a number from -10 to 10, given '1'"),
        ({"length_penalty": math.nan}, "length_penalty .*given nan"),
        ({"length_penalty": math.inf}, "length_penalty .*given inf"),
        ({"length_penalty": -10.5}, "length_penalty .*given -10.5"),
        ({"length_penalty": False}, "length_penalty .*given False"),
    ],
)
def test_refusals(arguments: dict[str, Any], words: str) -> None:
    fine = {"beam_width": 4, "max_tokens": 8, "length_penalty": 1, "eos_token_ids": (0,), "max_logprobs": 20}
    check_beam_search(**fine)
    with pytest.raises(ValueError, match=words):
        check_beam_search(**{**fine, **arguments})


def test_what_is_allowed_at_the_ends() -> None:
    for width, penalty, max_tokens in ((1, -10, 1), (10, 10.0, 2**31)):
        check_beam_search(width, max_tokens, penalty, (0,), 20)
