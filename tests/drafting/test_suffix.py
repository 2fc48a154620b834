"""Drafts by suffixes: runs and their followers are those that a search of the whole text finds; memory is bounded."""

import random
import tracemalloc

import pytest

from compiled_llm.drafting import suffix
from compiled_llm.drafting.ngram import NgramDrafter
from compiled_llm.drafting.suffix import RecentOutputs, SortedPlaces, SuffixDrafter, _likeliest
from compiled_llm.drafting.token_text import as_text
from compiled_llm.scheduling.request import Request
from tests.fake_engine import make_request

DEPTH = 7


def ended(output: list[int], salt: str = "") -> Request:
    request = make_request("ended", [1], 99, cache_salt=salt)
    request.output_token_ids = output
    return request


def places_of(texts: list[str], run: str) -> list[str]:
    """What follows ``run``, given backwards, by trying every place; some of it may be the end of a text."""
    forwards = run[::-1]
    return [text[end:] for text in texts for end in range(1, len(text)) if text[:end].endswith(forwards)]


@pytest.mark.parametrize("block", [2, 5, 512])
@pytest.mark.parametrize("letters", [2, 4])
def test_runs_and_followers_are_those_of_a_search(block: int, letters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "_BLOCK", block)
    monkeypatch.setattr(suffix, "_MOST_PLACES", 10**6)
    rng = random.Random(block * letters)
    compared = 0
    for _ in range(30):
        texts = ["".join(chr(rng.randrange(letters)) for _ in range(rng.randint(2, 25))) for _ in range(3)]
        found = SortedPlaces(DEPTH, texts[0])
        for number, text in enumerate(texts[1:], 1):
            found.texts[number] = text
            found.add(number, 1, len(text))
        if rng.random() < 0.3:
            del found.texts[1]
            gone = places_of([texts.pop(1)], "")
            found.clear(10**6)
            assert sum(map(len, found._keys)) == sum(len(text) - 1 for text in texts), gone
        last = "".join(chr(rng.randrange(letters)) for _ in range(DEPTH - 1))
        length, near = found.longest(last)
        assert length == max((n for n in range(DEPTH) if places_of(texts, last[:n])), default=0)
        for n in range(1, length + 1):
            expected = sorted(text[:4] for text in places_of(texts, last[:n]))
            got = sorted(found.after(found.find(last[:n]), 4))
            assert not set(got) - set(expected)
            assert got, "a place of the run is found"
            if block == 512:
                assert got == expected
        beside = found.after(near, 4)
        assert near == sorted(near, reverse=True)
        assert not set(beside) - {text[:4] for text in places_of(texts, last[:length])}
        assert bool(beside) == bool(length)
        compared += length
    assert compared > 50


@pytest.mark.parametrize("most_places", [2, 8])
@pytest.mark.parametrize("letters", [2, 3, 9])
def test_runs_that_go_on_are_those_of_a_search(letters: int, most_places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own text and among outputs of others, of which some are dropped meanwhile."""
    monkeypatch.setattr(suffix, "_MOST_PLACES", most_places)
    rng = random.Random(letters)
    went_on = compared = 0
    for _ in range(40):
        drafter = SuffixDrafter(6, DEPTH, most_cached=2)
        request = make_request("x", [rng.randrange(letters) for _ in range(rng.randint(2, 20))], 99)
        for _ in range(15):
            if rng.random() < 0.2:
                drafter.end(ended([rng.randrange(letters) for _ in range(rng.randint(0, 30))]))
            drafts = drafter.propose([request], [6])[0]
            tokens, text = as_text(request.prompt_token_ids + request.output_token_ids), drafter._texts[request]
            assert text.places.texts[0] == tokens
            outputs = drafter._outputs.of("")
            for run, places in ((text.own, text.places), (text.others, outputs)):
                if places is None or run.list is not places or not places.after(run.places, 1):
                    continue  # not looked for, or there is none, or only in an output that is dropped
                texts = list(places.texts.values())
                searched = max(n for n in range(DEPTH) if places_of(texts, tokens[::-1][:n]))
                length = min(run.length, DEPTH - 1)
                # Outputs that have ended since it was found are not searched while it goes on.
                assert length == searched if places is text.places else 0 < length <= searched
                assert set(places.after(run.places, 4)) <= {
                    found[:4] for found in places_of(texts, tokens[::-1][:length])
                }
                compared += 1
            right = rng.randint(0, len(drafts))
            went_on += right > 0
            request.output_token_ids += [*drafts[:right], *[rng.randrange(letters)] * rng.randint(0, 1)]
    assert went_on > 100 < compared


@pytest.mark.parametrize(
    ("followers", "tokens", "score"),
    [
        (["abc"], "abc", 3.0),
        (["abc", "abc"], "abc", 3.0),
        (["abc", "abd", "xyz", "abc"], "abc", 0.75 + 0.75 + 0.5),
        (["ab", "a", "ab"], "ab", 1 + 2 / 3),
        (["a", "b"], "a", 0.5),
        (list("abcdefghijk"), "", 0.0),
        ([], "", 0.0),
    ],
)
def test_the_likeliest_tokens_by_their_counts(followers: list[str], tokens: str, score: float) -> None:
    draft = _likeliest(followers, 0.1)
    assert draft.tokens == tokens
    assert draft.score == pytest.approx(score)


def test_a_run_gives_as_many_drafts_as_it_is_long() -> None:
    drafter = SuffixDrafter(15, depth=24)
    request = make_request("x", [7, 1, 2, 3, 4, 5, 6, 9, 1, 2, 3], 99)
    assert drafter.propose([request], [15]) == [[4, 5, 6]]
    assert drafter.propose([request], [2]) == [[4, 5]]
    twice = SuffixDrafter(15, depth=24, factor=2.0)
    assert twice.propose([request], [15]) == [[4, 5, 6, 9, 1, 2]]
    request.output_token_ids += [4, 5]
    assert drafter.propose([request], [15]) == [[6, 9, 1, 2, 3]]
    assert SuffixDrafter(15).propose([make_request("new", [1, 2, 3], 9)], [15]) == [[]]


def test_the_longer_run_wins_over_the_more_frequent_one() -> None:
    request = make_request("x", [1, 2, 3, 8, 9, 3, 5, 3, 5, 3, 5, 1, 2, 3], 99)
    assert SuffixDrafter(15).propose([request], [3]) == [[8, 9, 3]]


def test_outputs_of_others_are_drafted_within_a_salt_alone() -> None:
    drafter = SuffixDrafter(15)
    drafter.end(ended([1, 2, 3, 4, 5, 6]))
    drafter.end(ended([1, 2, 3, 7, 7, 7], "a"))
    salted = make_request("y", [9, 1, 2, 3], 99, cache_salt="a")
    assert drafter.propose([make_request("x", [9, 1, 2, 3], 99), salted], [15, 15]) == [[4, 5, 6], [7, 7, 7]]
    assert drafter.propose([make_request("z", [9, 1, 2, 3], 99, cache_salt="b")], [15]) == [[]]
    none_kept = SuffixDrafter(15, most_cached=0)
    none_kept.end(ended([1, 2, 3, 4, 5, 6]))
    assert none_kept.propose([make_request("x", [9, 1, 2, 3], 99)], [15]) == [[]]


@pytest.mark.parametrize(("most_outputs", "most_tokens"), [(4, 10**6), (10**6, 100), (10**6, 7)])
def test_the_oldest_outputs_go_first_and_memory_is_bounded(
    most_outputs: int, most_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suffix, "_BLOCK", 4)
    rng = random.Random(most_tokens)
    kept, salts = RecentOutputs(most_outputs, most_tokens, DEPTH), ["", "a", "b"]
    added: list[tuple[str, str]] = []
    for _ in range(200):
        salt, text = rng.choice(salts), as_text([rng.randrange(50) for _ in range(rng.randint(0, 30))])
        kept.add(salt, text)
        if len(text) > 1:
            added.append((salt, text[-most_tokens:]))
        while len(added) > most_outputs or sum(len(text) for _, text in added) > most_tokens:
            del added[0]
        for salt in salts:
            places = kept.of(salt)
            there = [] if places is None else list(places.texts.values())
            assert there == [text for other, text in added if other == salt]
    assert kept.num_tokens == sum(len(text) for _, text in added)
    num_places = sum(len(keys) for places in kept._places.values() for keys in places._keys)
    assert num_places <= 4 * kept.num_tokens + 100


def test_a_request_that_has_ended_is_forgotten() -> None:
    drafter, request = SuffixDrafter(3), make_request("x", [1, 2, 1], 10)
    assert drafter.propose([request], [3]) == [[2]]
    drafter.end(request)
    drafter.end(make_request("never asked about", 3, 3))
    assert not drafter._texts


@pytest.mark.parametrize("vocab_size", [4_000, 150_000])
def test_memory_is_within_what_it_says(vocab_size: int) -> None:
    """Of text without any repetition, where a place shares least with others."""
    rng = random.Random(vocab_size)
    for drafter in (SuffixDrafter(15), NgramDrafter(7, 1, 4), NgramDrafter(7, 1, 16)):
        request = make_request("x", [rng.randrange(vocab_size) for _ in range(4000)], 4500)
        more = [rng.randrange(vocab_size) for _ in range(4000)]
        tracemalloc.start()
        drafter.propose([request], [7])
        for start in range(0, 4000, 200):
            request.output_token_ids.extend(more[start : start + 200])
            drafter.propose([request], [7])
        kept = tracemalloc.get_traced_memory()[0] - 8 * 4000  # the output itself
        tracemalloc.stop()
        most = drafter.most_bytes(8000) - drafter.most_bytes(0)
        assert most / 4 < kept < most, drafter
    assert SuffixDrafter(15).most_bytes(0) > 0 == SuffixDrafter(15, most_cached=0).most_bytes(0)
