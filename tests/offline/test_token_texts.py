"""Log-probabilities in OpenAI's formats, of tokens that are a part of a character."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams
from compiled_llm.offline.answers import answer_line
from compiled_llm.offline.rows import Row
from compiled_llm.offline.token_texts import TokenTexts
from compiled_llm.text.tokenizer import OutputText, Tokenizer
from tests.tokenizers import END, byte_fallback, byte_level

# "a 🚀中 b": the rocket is F0 9F 9A 80, of which the first part comes after a space; 中 is E4 B8 AD.
LEVEL = ["a", "ĠðŁ", "ļ", "Ģ", "ä¸", "Ń", "Ġb", "\\"]
FALLBACK = ["▁a", "▁", "<0xF0>", "<0x9F>", "<0x9A>", "<0x80>", "<0xE4>", "<0xB8>", "<0xAD>", "▁b", "A"]
TEXT = "a 🚀中 b"


def pieces(tokenizer: Tokenizer) -> dict[str, int]:
    """Token ids by the token as the vocabulary spells it."""
    spelled = {tokenizer.token(token_id): token_id for token_id in range(300)}
    return {name: token_id for name, token_id in spelled.items() if name is not None}


def likely(*token_ids: int) -> dict[int, Logprob]:
    """The first one was chosen; each is more likely than the one after it."""
    return {token_id: Logprob(-float(rank), rank, "\ufffd") for rank, token_id in enumerate(token_ids, 1)}


def body_of(
    row_format: Any, tokenizer: Tokenizer | None, found: Sequence[dict[int, Logprob]], text: str, **sampling: Any
) -> dict[str, Any]:
    """The logprobs of the answer to a row whose output has these tokens and this text."""
    token_ids = [next(iter(each)) for each in found]
    completion = CompletionOutput(0, text, token_ids, -1.0, list(found), "stop", None)
    output = RequestOutput("0", None, [1], [completion], True, RequestMetrics(0.0))
    row = Row(0, "row 0", {"prompt_token_ids": [1]}, format=row_format, sampling={"logprobs": 3, **sampling})
    line = json.loads(answer_line(row, output, TokenTexts(tokenizer)))
    return line["response"]["body"]["choices"][0]["logprobs"]


@pytest.fixture(scope="module")
def level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("level")
    return byte_level(directory, LEVEL)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("fallback")
    return byte_fallback(directory, FALLBACK)


def test_a_chat_has_the_bytes_of_byte_level_tokens(level: Tokenizer) -> None:
    chosen = range(7)
    content = body_of("chat", level, [likely(token_id, 7) for token_id in chosen], TEXT)["content"]
    assert bytes(itertools.chain(*(token["bytes"] for token in content))).decode() == TEXT
    expected = ["a", r" \xf0\x9f", r"\x9a", r"\x80", r"\xe4\xb8", r"\xad", " b"]
    assert [token["token"] for token in content] == expected
    assert content[1]["bytes"] == [0x20, 0xF0, 0x9F]
    assert content[1]["top_logprobs"] == [
        {"token": r" \xf0\x9f", "logprob": -1.0, "bytes": [0x20, 0xF0, 0x9F]},
        {"token": "\\", "logprob": -2.0, "bytes": [0x5C]},
    ]


def test_a_chat_has_the_bytes_of_fallback_tokens(fallback: Tokenizer) -> None:
    content = body_of("chat", fallback, [likely(token_id) for token_id in range(10)], TEXT)["content"]
    assert bytes(itertools.chain(*(token["bytes"] for token in content))).decode() == f" {TEXT}"
    expected = [" a", " ", r"\xf0", r"\x9f", r"\x9a", r"\x80", r"\xe4", r"\xb8", r"\xad", " b"]
    assert [token["token"] for token in content] == expected


def test_a_completion_has_offsets_of_its_text(level: Tokenizer, fallback: Tokenizer) -> None:
    """Each part of a character has the character's own."""
    found = body_of("completion", level, [likely(token_id) for token_id in range(7)], TEXT)
    assert found["tokens"] == [
        "a",
        r"bytes: \xf0\x9f",
        r"bytes:\x9a",
        r"bytes:\x80",
        r"bytes:\xe4\xb8",
        r"bytes:\xad",
        " b",
    ]
    assert found["text_offset"] == [0, 1, 2, 2, 3, 3, 4]
    found = body_of("completion", fallback, [likely(token_id) for token_id in range(10)], TEXT)
    assert found["tokens"][:4] == [" a", " ", r"bytes:\xf0", r"bytes:\x9f"]
    assert found["text_offset"] == [0, 2, 3, 3, 3, 3, 4, 4, 4, 5]
    assert found["token_logprobs"] == [-1.0] * 10


@pytest.mark.parametrize("name", ["level", "fallback"])
def test_offsets_are_those_of_the_text_as_it_comes(name: str, request: pytest.FixtureRequest) -> None:
    """Of random tokens too, most of which make no characters, with a stop string that cuts the text."""
    tokenizer = request.getfixturevalue(name)
    found = [likely((number * 37) % 256) for number in range(200)]
    text = OutputText(tokenizer, [1], SamplingParams())
    whole, starts = "", []
    for each in found:
        starts.append(len(whole))
        text.append(next(iter(each)))
        whole += text.take(finished=False)
    assert body_of("completion", tokenizer, found, whole)["text_offset"] == starts
    cut = body_of("completion", tokenizer, found, whole[:50])["text_offset"]
    assert cut == [min(start, 50) for start in starts]


def test_no_two_tokens_share_a_key(level: Tokenizer, fallback: Tokenizer) -> None:
    """Neither parts of characters, whose text was U+FFFD each time, nor tokens of equal bytes."""
    found = body_of("completion", level, [likely(2, 3, 4, 5)], "\ufffd")
    assert found["top_logprobs"] == [
        {r"bytes:\x9a": -1.0, r"bytes:\x80": -2.0, r"bytes:\xe4\xb8": -3.0, r"bytes:\xad": -4.0}
    ]
    letter, byte = pieces(fallback)["A"], pieces(fallback)["<0x41>"]
    found = body_of("completion", fallback, [likely(letter, byte, 0)], "A")
    assert found["top_logprobs"] == [{"A": -1.0, f"token_id:{byte}": -2.0, " a": -3.0}]
    found = body_of("completion", fallback, [likely(byte, letter)], "A")
    assert (found["tokens"], found["top_logprobs"]) == (["A"], [{"A": -1.0, f"token_id:{letter}": -2.0}])


@pytest.mark.parametrize("skips", [True, False])
def test_special_tokens_have_text_where_the_output_has_it(level: Tokenizer, skips: bool) -> None:
    end = pieces(level)[END]
    text = "ab" if skips else f"a{END}b"
    found = body_of("completion", level, [likely(0), likely(end), likely(6)], text, skip_special_tokens=skips)
    assert found["tokens"] == ["a", END, " b"]
    assert found["text_offset"] == [0, 1, 1 if skips else 1 + len(END)]
    content = body_of("chat", level, [likely(end)], "")["content"]
    assert content[0]["bytes"] == list(END.encode())


def test_tokens_without_a_tokenizer_have_names(level: Tokenizer) -> None:
    found = body_of("completion", None, [likely(5, 6)], "")
    assert found["tokens"] == ["token_id:5"]
    assert found["top_logprobs"] == [{"token_id:5": -1.0, "token_id:6": -2.0}]
    assert found["text_offset"] == [0]
    assert body_of("chat", None, [likely(5)], "")["content"][0]["bytes"] is None


def test_a_padded_vocabulary_has_ids_without_a_token(level: Tokenizer) -> None:
    found = body_of("completion", level, [likely(5000, 5001), likely(0)], "a")
    assert found["tokens"] == ["", "a"]
    assert found["top_logprobs"][0] == {"": -1.0, "token_id:5001": -2.0}
    assert found["text_offset"] == [0, 0]
