"""Drafts by n-grams: those that a search of the whole text finds, by vLLM's rule."""

import random

import pytest

from compiled_llm.drafting.ngram import NgramDrafter
from tests.fake_engine import make_request


def searched(tokens: list[int], least: int, most: int, count: int) -> list[int]:
    """The rule, by trying every place: the longest n-gram, its first place, what follows there."""
    for length in range(most, least - 1, -1):
        for end in range(length, len(tokens)):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                return tokens[end : end + count]
    return []


@pytest.mark.parametrize(("least", "most"), [(1, 1), (2, 2), (1, 4), (3, 5), (1, 16), (16, 16)])
def test_proposals_are_those_of_a_search_of_the_whole_text(least: int, most: int) -> None:
    rng = random.Random(least * 10 + most)
    found = 0
    for trial in range(40):
        drafter = NgramDrafter(6, least, most)
        letters = rng.choice([2, 3, 5])
        request = make_request("x", [rng.randrange(letters) for _ in range(rng.randint(1, 30))], 200)
        other = make_request("y", [rng.randrange(letters) for _ in range(20)], 200)
        for _ in range(20):
            request.output_token_ids += [rng.randrange(letters) for _ in range(rng.randint(0, 4))]
            count = rng.randint(1, 6)
            if trial % 4 == 0:  # what it said before, so that long runs come again
                tokens = request.prompt_token_ids + request.output_token_ids
                request.output_token_ids += tokens[rng.randrange(len(tokens)) :][: rng.randint(1, 24)]
            proposals = drafter.propose([request, other], [count, 6])
            tokens = request.prompt_token_ids + request.output_token_ids
            assert proposals[0] == searched(tokens, least, most, count), (trial, tokens)
            assert proposals[1] == searched(other.prompt_token_ids, least, most, 6)
            found += bool(proposals[0])
    assert found > 50


@pytest.mark.parametrize("tokens", [[5] * 400, [1, 2] * 200, [*[3, 4] * 100, 9, *[4] * 200], [0] * 70 + [1]])
@pytest.mark.parametrize(("least", "most"), [(1, 16), (2, 3), (9, 16), (1, 1)])
def test_what_repeats_hundreds_of_times(tokens: list[int], least: int, most: int) -> None:
    """More places than are compared as a table."""
    for end in (len(tokens), len(tokens) - 1, 150, 66, 65, 64):
        for last in ([], [7], [9, *tokens[:12]], tokens[3:30]):
            text = tokens[:end] + last
            drafter = NgramDrafter(7, least, most)
            assert drafter.propose([make_request("x", text, 300)], [7]) == [searched(text, least, most, 7)], (end, last)


def test_ids_of_every_size() -> None:
    """Those that no text has as characters, too."""
    ids = [0, 0xD800, 0xDFFF, 0x10000, 0x10FFFE, 7]
    request = make_request("x", [*ids, 1, *ids[:3]], 10)
    assert NgramDrafter(15, 2, 3).propose([request], [15]) == [[*ids[3:], 1, *ids[:3]]]


def test_a_request_that_has_ended_is_forgotten() -> None:
    drafter, request = NgramDrafter(3, 1, 2), make_request("x", [1, 2, 1], 10)
    assert drafter.propose([request], [3]) == [[2, 1]]
    drafter.end(request)
    drafter.end(make_request("never asked about", 3, 3))
    assert not drafter._texts
