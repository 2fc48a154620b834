"""Prompts and their continuations: what is scored of a text, and how long both may be together."""

from pathlib import Path

import pytest

from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.text.prompts import (
    Capacity,
    EncodedPrompt,
    ScoredPrompt,
    encode_prompt,
    encode_scored,
    scored_prompts,
)
from compiled_llm.text.tokenizer import Tokenizer
from tests.tokenizer_pairs import BOS, END, write_pair

CAPACITY = Capacity(64, "max_model_len")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_MODEL)


@pytest.mark.parametrize(
    ("prompt", "continuation"),
    [
        ("import os", ", sys"),
        ("def f(x):\n    return", " x"),
        ("def f(x):\n    return ", "x"),  # the space and the letter are one token
        ("a  ", "  b"),
        ("größe = 1 # ", "é\U0001f600"),
        ("x", "\n\n"),
    ],
)
def test_a_text_is_scored_from_its_first_token_that_is_not_the_prompts_own(
    tokenizer: Tokenizer, prompt: str, continuation: str
) -> None:
    token_ids, alone = tokenizer.encode(prompt + continuation), tokenizer.encode(prompt)
    encoded, start = encode_scored(ScoredPrompt(prompt, continuation), tokenizer, CAPACITY)
    assert encoded == EncodedPrompt(prompt + continuation, token_ids)
    assert token_ids[:start] == alone[:start]
    assert token_ids[start : start + 1] != alone[start : start + 1]
    # All of the continuation is scored, and nothing of the prompt but what became one token with it.
    before = tokenizer.decode(token_ids[:start])
    assert prompt.startswith(before)
    assert tokenizer.decode(token_ids[: start + 1]).startswith(prompt[: len(before)])


def test_token_ids_follow_those_of_the_prompt(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("import os")
    for prompt in ("import os", ids, {"prompt": "import os"}, {"prompt_token_ids": ids}, EncodedPrompt("chat", ids)):
        encoded, start = encode_scored(ScoredPrompt(prompt, (5, 6)), tokenizer, CAPACITY)
        assert (encoded.token_ids, start) == ([*ids, 5, 6], len(ids))
    encoded, start = encode_scored(ScoredPrompt({"prompt": "a", "cache_salt": "s"}, " b"), tokenizer, CAPACITY)
    assert encoded.cache_salt == "s"
    assert ids == tokenizer.encode("import os"), "the caller's list is changed"


def test_a_prompt_by_itself_is_scored_from_its_second_token_on(tokenizer: Tokenizer) -> None:
    assert encode_scored(ScoredPrompt([5, 6, 7]), tokenizer, CAPACITY) == (EncodedPrompt(None, [5, 6, 7]), 1)
    with pytest.raises(ValueError, match="at least two tokens"):
        encode_scored(ScoredPrompt([5]), tokenizer, CAPACITY)


def test_the_last_token_is_not_computed_and_needs_no_room(tokenizer: Tokenizer) -> None:
    for scored in (ScoredPrompt([5] * 65), ScoredPrompt([5] * 64, [6]), ScoredPrompt([5], [6] * 64)):
        assert len(encode_scored(scored, tokenizer, CAPACITY)[0].token_ids) == 65
    message = r"prompt must be at most 65 tokens with its continuation \(one more than the max_model_len\), given 66"
    for scored in (ScoredPrompt([5] * 66), ScoredPrompt([5] * 65, [6]), ScoredPrompt([5], [6] * 65)):
        with pytest.raises(ValueError, match=message):
            encode_scored(scored, tokenizer, CAPACITY)
    with pytest.raises(ValueError, match=r"prompt must be shorter than 64 tokens \(the max_model_len"):
        encode_prompt([5] * 64, tokenizer, CAPACITY)
    with pytest.raises(ValueError, match="prompt must be at most 65 tokens"):
        encode_scored(ScoredPrompt("a b " * 100, "c d " * 100_000), tokenizer, CAPACITY)


@pytest.mark.parametrize("continuation", ["", [], (), b"x", 5, 1.5, {"prompt": "x"}])
def test_what_is_no_continuation(tokenizer: Tokenizer, continuation: object) -> None:
    message = "continuation must be a str or a list of token ids, and not empty, given "
    with pytest.raises(ValueError, match=message):
        encode_scored(ScoredPrompt("x", continuation), tokenizer, CAPACITY)
    (item,) = scored_prompts(["x"], [None])
    assert str(item) == message + "None"


def test_a_prompt_whose_first_token_becomes_another_one(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="the first token of the prompt becomes another one by the continuation"):
        encode_scored(ScoredPrompt("impo", "rt os"), tokenizer, CAPACITY)


@pytest.mark.parametrize("prompt", [[5, 6], {"prompt_token_ids": [5]}, EncodedPrompt("a chat", [5])])
def test_a_text_follows_a_text_only(tokenizer: Tokenizer, prompt: object) -> None:
    with pytest.raises(ValueError, match="a list of token ids where the prompt is one, or a chat"):
        encode_scored(ScoredPrompt(prompt, "x"), tokenizer, CAPACITY)
    with pytest.raises(ValueError, match="continuation must be valid Unicode"):
        encode_scored(ScoredPrompt("x", "\ud800"), tokenizer, CAPACITY)


def test_pairs() -> None:
    pair = ScoredPrompt
    assert scored_prompts("a", None) == [pair("a")]
    assert scored_prompts([1, 2], None) == [pair([1, 2])]
    assert scored_prompts(["a", [1]], None) == [pair("a"), pair([1])]
    assert scored_prompts("a", "b") == [pair("a", "b")]
    assert scored_prompts("a", [1, 2]) == [pair("a", [1, 2])]
    assert scored_prompts([1, 2], [[3], "b"]) == [pair([1, 2], [3]), pair([1, 2], "b")]
    assert scored_prompts(["a", "b"], ["c", "d"]) == [pair("a", "c"), pair("b", "d")]
    for prompts, continuations in [(["a", "b"], ["c"]), (["a", "b"], "c"), (["a"], []), ([], ["a"])]:
        with pytest.raises(ValueError, match="continuations must be as many as the prompts"):
            scored_prompts(prompts, continuations)


@pytest.mark.parametrize("kind", ["smollm2", "llama2"])  # of which the first puts <s> before a text
def test_a_prompt_that_begins_with_the_begin_of_text_token_gets_no_second_one(kind: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_pair(tmp_path, kind, add_bos_token=True))
    bos = tokenizer.special_tokens[BOS].token_id
    assert tokenizer.prefix_ids == [bos]
    for text in (f"{BOS}x =", f"{BOS}{END}\n", f"{BOS}"):
        ids = encode_prompt(text, tokenizer, CAPACITY).token_ids
        assert ids == tokenizer.encode_piece(text)
        assert [bos, *ids] == tokenizer.encode(text), "as the library has it"
        assert encode_prompt(text, tokenizer, CAPACITY, 20).token_ids == ids
    assert encode_prompt(f"x{BOS}", tokenizer, CAPACITY).token_ids == tokenizer.encode(f"x{BOS}")
    assert encode_prompt(f"{BOS}{BOS}x", tokenizer, CAPACITY).token_ids[:3].count(bos) == 2
    split = encode_prompt(f"{BOS}x", tokenizer, CAPACITY, None, True).token_ids
    assert split == tokenizer.encode(f"{BOS}x", True)
    assert split.count(bos) == 1
    encoded, start = encode_scored(ScoredPrompt(f"{BOS}x =", " 1"), tokenizer, CAPACITY)
    assert encoded.token_ids.count(bos) == 1
    assert start == len(tokenizer.encode_piece(f"{BOS}x ="))


def test_special_tokens_of_a_prompt_are_such_unless_it_is_split(tokenizer: Tokenizer) -> None:
    for split in (False, True):
        token_ids = encode_prompt("a<|endoftext|>b", tokenizer, CAPACITY, None, split).token_ids
        assert (0 in token_ids) == (not split)
        scored = encode_scored(ScoredPrompt("a", "<|endoftext|>b"), tokenizer, CAPACITY, split)[0].token_ids
        assert scored == token_ids
