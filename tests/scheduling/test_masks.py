"""Masks and scores of prompts: the scheduler puts them into the step that samples, or computes, those tokens."""

from collections.abc import Sequence

import numpy as np
import pytest

from compiled_llm.scheduling.request import Request
from tests.fake_engine import (
    FakeEngine,
    add,
    both_loops,
    check_result,
    drafters,
    make_engine,
    make_request,
    make_scheduler,
    names_of,
)


class FakeMask:
    """Notes what it is asked, and answers with the number of tokens; None or an error after ``most`` of them."""

    def __init__(self, most: int = 100, error: Exception | None = None) -> None:
        self.most, self.error = most, error
        self.asked: list[tuple[int, int]] = []

    def words(self, output_token_ids: Sequence[int], num_output_tokens: int) -> np.ndarray | None:
        self.asked.append((len(output_token_ids), num_output_tokens))
        if num_output_tokens < self.most:
            return np.full(3, num_output_tokens, np.int32)
        if self.error is not None:
            raise self.error
        return None


class DraftedMask(FakeMask):
    """It forbids every fifth token."""

    def after_drafts(self, output_token_ids: Sequence[int], drafts: Sequence[int]) -> list[np.ndarray]:
        start = len(output_token_ids)
        allowed = [start + place for place in range(len(drafts))]
        until = next((number for number, place in enumerate(allowed) if place % 5 == 4), len(drafts))
        return [np.full(3, place + 1, np.int32) for place in allowed[:until]]


def masked(name: str, prompt: int, mask: FakeMask, *, waits: bool) -> Request:
    request = make_request(name, prompt, 6)
    request.mask, request.waits_for_tokens = mask, waits
    return request


@both_loops
@pytest.mark.parametrize("waits", [False, True])
def test_each_token_of_a_request_is_sampled_under_its_own_mask(waits: bool, overlap: bool) -> None:
    """Also of a prompt in chunks, of which only the last samples; and beside requests without a mask."""
    scheduler, engine = make_engine(60, overlap=overlap)
    short, long = FakeMask(), FakeMask()
    plain = make_request("plain", 3, 9)
    requests = add(scheduler, plain, masked("short", 5, short, waits=waits), masked("long", 40, long, waits=waits))
    engine.run()
    for mask in (short, long):
        assert [count for _, count in mask.asked] == list(range(6))
        assert not waits or all(known == count for known, count in mask.asked)
    for output in engine.outputs:
        expected = [
            index for index, name in enumerate(names_of(output)) if name != "plain" and output.num_samples[index]
        ]
        assert [index for index, _, _ in output.masks] == expected
    for request in requests:
        check_result(request)


@both_loops
def test_each_token_after_drafts_is_sampled_under_its_own_mask(overlap: bool) -> None:
    scheduler = make_scheduler(60, drafter=drafters(3)["right"])
    engine = FakeEngine(scheduler, overlap=overlap)
    request = make_request("masked", 5, 20)
    request.mask, request.waits_for_tokens = DraftedMask(), True
    add(scheduler, make_request("plain", 3, 20), request)
    engine.run()
    check_result(request)
    num_drafts = 0
    for output in engine.outputs:
        if "masked" not in names_of(output):
            continue
        index = names_of(output).index("masked")
        samples, computed = output.num_samples[index], output.num_computed_tokens[index]
        first = computed + output.num_scheduled_tokens[index] - samples + 1 - len(request.prompt_token_ids)
        told = [(place, int(words[0])) for number, place, words in output.masks if number == index]
        assert told == [(place, first + place) for place in range(samples)]
        assert all((first + place) % 5 != 4 for place in range(samples - 1)), "a draft that its mask forbids"
        num_drafts += max(0, samples - 1)
    assert num_drafts > 5


@both_loops
def test_a_mask_that_fails_is_said_and_leaves_the_others_alone(overlap: bool) -> None:
    scheduler, engine = make_engine(60, overlap=overlap)
    none, broken = (
        masked(name, 3, FakeMask(2, error), waits=True) for name, error in (("none", None), ("broken", OSError("x")))
    )
    other = make_request("other", 3, 6)
    add(scheduler, none, broken, other)
    while none.pending_error is None or broken.pending_error is None:
        engine.step()
    assert none.pending_error == "bad_words and allowed_token_ids leave no token to go on with"
    assert broken.pending_error == "OSError: x"
    for request in (none, broken):
        scheduler.end(request, "error", request.pending_error)
    engine.run()
    check_result(other)


@both_loops
def test_tokens_of_a_prompt_are_scored_by_the_step_that_computes_the_tokens_before_them(overlap: bool) -> None:
    """Each of them once, from the first that is asked for to the one after the prompt."""
    scheduler, engine = make_engine(60, overlap=overlap)
    request = make_request("scored", 40, 0)
    request.scored_token_ids, request.num_scored = [*request.prompt_token_ids, 7], 5
    assert request.most_cached_tokens == 4
    add(scheduler, make_request("plain", 3, 9), request)
    engine.run()
    scored = []
    for output in engine.outputs:
        for index, before, token_ids in output.prompt_targets:
            assert output.request_ids[index] == request.request_id
            scored += list(enumerate(token_ids, output.num_computed_tokens[index] + before + 1))
    assert scored == list(enumerate(request.scored_token_ids))[5:]
    assert (request.num_scored, request.most_cached_tokens) == (41, None)
