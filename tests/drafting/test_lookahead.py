"""Drafts by lookahead: what a step sampled behind wrong drafts is guessed next, and n-grams come before guesses."""

import random
from collections.abc import Sequence

import pytest

from compiled_llm.drafting.lookahead import MOST_NGRAMS, LookaheadDrafter
from compiled_llm.scheduling.request import Request
from tests.fake_engine import make_request


def proposal(drafter: LookaheadDrafter, request: Request, most: int = 15) -> list[int]:
    (drafts,) = drafter.propose([request], [most])
    return drafts


def verify(drafter: LookaheadDrafter, request: Request, drafts: Sequence[int], sampled: Sequence[int]) -> None:
    """A step has verified these drafts: enter its tokens as the scheduler does."""
    right = next((place for place, draft in enumerate(drafts) if draft != sampled[place]), len(drafts))
    start = len(request.prompt_token_ids) + len(request.output_token_ids)
    request.output_token_ids += sampled[: right + 1]
    drafter.read_samples(request, start, drafts, sampled)


def drafting(prompt: Sequence[int], window: int = 6, ngram: int = 3) -> tuple[LookaheadDrafter, Request]:
    drafter, request = LookaheadDrafter(15, window, ngram), make_request("x", list(prompt), 4000)
    drafter.propose([request], [15])
    return drafter, request


def test_n_grams_of_the_text_one_after_another_and_the_last_of_each_token() -> None:
    drafter, request = drafting([1, 2, 3, 4, 1])
    assert proposal(drafter, request, 8) == [2, 3, 4, 1, 2, 3, 4, 1]
    request.output_token_ids += [5, 6, 1, 5]
    assert proposal(drafter, request, 8) == [6, 1, 5, 6, 1, 5, 6, 1]
    assert proposal(drafter, request, 1) == [6]
    assert proposal(*drafting([1, 2])) == []


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_what_was_sampled_behind_the_first_wrong_draft_is_guessed_next(num_right: int) -> None:
    drafter, request = drafting([1, 2])
    sampled = [51, 52, 53, 54, 55]
    drafts = [*sampled[:num_right], *range(91, 95 - num_right)]
    verify(drafter, request, drafts, sampled)
    guesses = sampled[num_right + 1 :]
    # Up to the end of the window the last guess once more.
    assert proposal(drafter, request) == [*guesses, *[55] * (6 - len(guesses))]
    request.output_token_ids.append(60)  # a step without drafts: what is left of them
    assert proposal(drafter, request)[: len(guesses) - 1] == guesses[1:]
    request.output_token_ids += [61, 62, 63, 64]
    assert proposal(drafter, request) == []


def test_a_proposal_is_no_longer_than_the_window_but_for_n_grams() -> None:
    drafter, request = drafting([1, 2], window=2)
    verify(drafter, request, [91, 92, 93, 94], [51, 52, 53, 54, 55])
    assert proposal(drafter, request) == [52, 53]
    drafter, request = drafting([52, 81, 82], window=2)
    verify(drafter, request, [91, 92, 93, 94], [51, 52, 53, 54, 55])
    assert proposal(drafter, request) == [52, 81, 82]


def test_n_grams_of_iterations_are_taken_where_the_text_has_none() -> None:
    drafter, request = drafting([1, 2])
    # Position 4 is guessed to be 92, after which 53 came; the next step guesses 53 there, after which 63 came.
    verify(drafter, request, [91, 92, 93], [51, 52, 53, 54])
    verify(drafter, request, [52, 53, 54], [61, 62, 63, 64])
    request.output_token_ids.append(92)
    assert proposal(drafter, request, 2) == [53, 63]
    request.output_token_ids += [7, 8, 92]
    assert proposal(drafter, request, 2) == [7, 8]


def test_a_draft_that_was_no_guess_begins_an_n_gram_of_its_own() -> None:
    drafter, request = drafting([1, 2])
    verify(drafter, request, [91, 92, 93], [51, 52, 53, 54])
    verify(drafter, request, [52, 77, 54], [61, 62, 63, 64])
    assert dict(drafter._known[request]._of_guesses) == {91: (52, 62), 93: (54, 64)}


def test_nothing_is_guessed_after_a_row_without_a_token() -> None:
    drafter, request = drafting([1, 2])
    verify(drafter, request, [91, 92, 93], [51, 52, -1, 54])
    assert proposal(drafter, request) == [52] * 6


def test_what_is_kept_is_bounded_and_goes_with_the_request() -> None:
    rng = random.Random(1)
    drafter, request = drafting(range(5000), ngram=4)
    for _ in range(1500):
        drafts = proposal(drafter, request) or [3]
        verify(drafter, request, drafts, [rng.randrange(9000) for _ in range(len(drafts) + 1)])
    known = drafter._known[request]
    assert len(known._of_text) == len(known._of_guesses) == MOST_NGRAMS
    assert len(known._runs) <= 15
    assert len(known.guesses) <= 15
    drafter.end(request)
    drafter.end(request)
    assert not drafter._known
    drafter.read_samples(request, 5000, [1], [2, 3])  # of a step that was under way
    assert not drafter._known
