"""TokenMask: which tokens may follow, token after token, for every reason that there is."""

from collections.abc import Collection, Sequence

import numpy as np
import pytest

from compiled_llm.constraints.token_masks import TokenMask, allows_any

VOCAB = 70  # no multiple of 32
EVERY = set(range(VOCAB))


def allowed(mask: TokenMask, output: Sequence[int] = (), count: int | None = None, vocab_size: int = VOCAB) -> set[int]:
    words = mask.words(list(output), len(output) if count is None else count)
    if words is None:
        return set()
    assert words.dtype == np.int32
    assert words.shape == (-(-vocab_size // 32),)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:vocab_size]).tolist())


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 70, 4096])
def test_nothing_asked_allows_all(vocab_size: int) -> None:
    mask = TokenMask(vocab_size)
    assert allowed(mask, vocab_size=vocab_size) == set(range(vocab_size))
    assert not mask.needs_last_token
    assert not mask.is_finished


def test_allowed_ids() -> None:
    mask = TokenMask(VOCAB, allowed_token_ids=[0, 31, 32, 63, 69, 0])
    for output in ([], [31], [5, 5]):
        assert allowed(mask, output) == {0, 31, 32, 63, 69}
    assert not mask.needs_last_token


def test_bad_words_of_one_token_never_come() -> None:
    mask = TokenMask(VOCAB, bad_words=[(3,), (31,), (69,)])
    for output in ([], [3], [5, 31]):
        assert allowed(mask, output) == EVERY - {3, 31, 69}
    assert not mask.needs_last_token, "they follow from nothing"


def test_bad_words_of_several_tokens_are_not_completed() -> None:
    mask = TokenMask(VOCAB, bad_words=[(1, 2), (7, 8, 9), (8, 10), (4, 4), (5, 6, 5, 6, 0)])
    assert mask.needs_last_token
    cases: list[tuple[list[int], set[int]]] = [
        ([], set()),
        ([1], {2}),
        ([1, 2], set()),
        ([2, 1], {2}),
        ([1, 3], set()),
        ([7], set()),
        ([8], {10}),
        ([7, 8], {9, 10}),
        ([0, 7, 8], {9, 10}),
        ([8, 7], set()),
        ([7, 0, 8], {10}),
        ([4], {4}),
        ([4, 4], {4}),
        ([6, 5, 6], set()),
        ([5, 6, 5, 6], {0}),
    ]
    for output, banned in cases:
        assert allowed(mask, output) == EVERY - banned, output
    assert allowed(mask) == EVERY, "what was banned for one output stayed so"


def test_a_mask_of_one_call_is_not_written_to_by_the_next() -> None:
    mask = TokenMask(VOCAB, bad_words=[(1, 2), (1, 3)], min_tokens=3, stop_token_ids=[0])
    first = mask.words([1], 1)
    before = first.copy()
    mask.words([], 0)
    mask.words([5, 5, 5], 3)
    assert np.array_equal(first, before)


def test_nothing_ends_the_output_before_the_minimum() -> None:
    mask = TokenMask(VOCAB, min_tokens=2, stop_token_ids={0, 40})
    assert [allowed(mask, [5] * count) for count in range(4)] == [EVERY - {0, 40}] * 2 + [EVERY] * 2
    assert not mask.needs_last_token


def test_the_number_of_tokens_may_be_ahead_of_those_known() -> None:
    mask = TokenMask(VOCAB, min_tokens=2, stop_token_ids=[0], allowed_token_ids=[0, 1])
    assert [allowed(mask, [], count) for count in range(4)] == [{1}, {1}, {0, 1}, {0, 1}]


def test_all_reasons_together() -> None:
    mask = TokenMask(
        VOCAB, allowed_token_ids=[0, 1, 2, 3, 4], bad_words=[(3,), (1, 2)], min_tokens=2, stop_token_ids=[0, 69]
    )
    assert [allowed(mask, output) for output in ([], [1], [1, 1], [1, 4])] == [
        {1, 2, 4},
        {1, 4},
        {0, 1, 4},
        {0, 1, 2, 4},
    ]


class Stub:
    """A grammar: the tokens of a row of sets, one after the other."""

    def __init__(self, *steps: Collection[int]) -> None:
        self.steps, self.taken = steps, list[int]()

    def allow(self, words: np.ndarray) -> None:
        bits = np.zeros(len(words) * 32, dtype=np.uint8)
        bits[list(self.steps[len(self.taken)])] = 1
        words[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> None:
        assert token_id in self.steps[len(self.taken)]
        self.taken.append(token_id)

    @property
    def finished(self) -> bool:
        return len(self.taken) == len(self.steps)


def test_a_grammar_takes_in_each_token_once() -> None:
    grammar = Stub({5, 69}, {6}, {7, 8})
    mask = TokenMask(VOCAB, grammar=grammar)  # type: ignore[arg-type]
    assert mask.needs_last_token
    assert allowed(mask) == {5, 69}
    assert allowed(mask) == {5, 69}
    mask.accept([69])
    mask.accept([69])
    assert allowed(mask, [69]) == {6}
    assert allowed(mask, [69, 6]) == {7, 8}, "what accept was not told, words takes in"
    assert not mask.is_finished
    mask.accept([69, 6, 7])
    assert mask.is_finished
    assert grammar.taken == [69, 6, 7]


def test_accept_without_a_grammar_changes_nothing() -> None:
    mask = TokenMask(VOCAB, bad_words=[(1, 2)])
    mask.accept([1, 1, 1])
    assert allowed(mask) == EVERY
    assert not mask.is_finished


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 70])
def test_whether_any_token_is_left(vocab_size: int) -> None:
    words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    assert not allows_any(words, vocab_size)
    for token in range(vocab_size):
        words[:] = 0
        words.view(np.uint32)[token // 32] = 1 << token % 32
        assert allows_any(words, vocab_size), token
    for beyond in range(vocab_size, len(words) * 32):  # bits of no token
        words[:] = 0
        words.view(np.uint32)[beyond // 32] = 1 << beyond % 32
        assert not allows_any(words, vocab_size), beyond
    words[:] = -1
    assert allows_any(words, vocab_size)
    none = TokenMask(vocab_size, bad_words=[(token,) for token in range(vocab_size)])
    assert none.words([], 0) is None


def drafted(mask: TokenMask, output: Sequence[int], drafts: Sequence[int]) -> list[set[int]]:
    """What may follow each of the drafts that are left."""
    found = []
    for words in mask.after_drafts(list(output), drafts):
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        found.append(set(np.flatnonzero(bits[:VOCAB]).tolist()))
    return found


def test_drafts_are_followed_by_what_may_follow_them_as_output() -> None:
    mask = TokenMask(VOCAB, bad_words=[(1, 2, 3), (9,)], min_tokens=3, stop_token_ids=[69])
    for output in ([], [7], [1], [7, 7, 1]):
        for drafts in ([1, 2, 5], [2, 5, 5], [4]):
            expected = [allowed(mask, [*output, *drafts[: place + 1]]) for place in range(len(drafts))]
            assert drafted(mask, output, drafts) == expected
    assert [69 in words for words in drafted(mask, [5], [5, 5, 5])] == [False, True, True]


def test_drafts_end_before_one_that_may_not_follow() -> None:
    mask = TokenMask(VOCAB, bad_words=[(1, 2, 3), (9,)], min_tokens=3, stop_token_ids=[69])
    assert len(drafted(mask, [7], [1, 2, 3, 4])) == 2
    assert len(drafted(mask, [7, 1, 2], [3, 4])) == 0
    assert len(drafted(mask, [7], [4, 9, 4])) == 1
    assert len(drafted(mask, [7], [69])) == 0, "too early an end"
    assert len(drafted(mask, [7, 7, 7], [69])) == 1
    assert drafted(mask, [7], []) == []
    nothing_left = TokenMask(VOCAB, allowed_token_ids=[1, 2], bad_words=[(1, 1), (1, 2)])
    assert drafted(nothing_left, [2], [2, 1, 1]) == [{1, 2}], "nothing may follow the second draft"
