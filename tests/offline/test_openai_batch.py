"""OpenAI's batch format: its rows, what of it is refused by name, and its answers, also of parts of characters."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams
from compiled_llm.offline.formats import answer_line, row_of_object
from compiled_llm.offline.rows import Row
from compiled_llm.openai.answers import TokenTexts
from compiled_llm.text.output_text import OutputText
from compiled_llm.text.tokenizer import Tokenizer
from tests.offline.examples import CHAT, LOGPROBS, batch, error_of, output_of, row
from tests.tokenizers import END, byte_fallback, byte_level


def test_a_chat_of_a_batch() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {
        "model": "gpt-4o-mini",
        "messages": CHAT,
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "stop": "x",
        "seed": 3,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "logit_bias": {"5": -100},
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}},
        "top_k": 4,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto",
        "user": "me",
        "metadata": {"a": "b"},
        "stream": False,
        "suffix": None,
        "priority": 2,
    }
    row = row_of_object(5, "row 5", batch(body))
    assert row.error is None
    assert (row.format, row.custom_id, row.model, row.messages) == ("chat", "a", "gpt-4o-mini", CHAT)
    assert row.priority == 2
    assert row.chat_options == {"tools": body["tools"]}
    assert SamplingParams(**row.sampling) == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        n=2,
        stop="x",
        seed=3,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={5: -100},
        logprobs=2,
        structured_outputs={"json": schema},
        top_k=4,
    )


@pytest.mark.parametrize(
    ("wanted", "structured"),
    [({"type": "text"}, {}), ({"type": "json_object"}, {"structured_outputs": {"json_object": True}})],
)
def test_formats_of_responses(wanted: dict, structured: dict) -> None:
    row = row_of_object(0, "row 0", batch({"messages": CHAT, "response_format": wanted, "tools": [], "logprobs": True}))
    assert row.sampling == {"logprobs": 0, **structured}


@pytest.mark.parametrize(("prompt", "key"), [("a", "prompt"), ([1, 2], "prompt_token_ids")])
def test_a_completion_of_a_batch(prompt: Any, key: str) -> None:
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, "logprobs": 3, "echo": False, "best_of": 1}
    row = row_of_object(0, "row 0", batch(body))
    assert (row.format, row.prompt, row.sampling) == ("completion", {key: prompt}, {"max_tokens": 4, "logprobs": 3})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"body": {}}, "custom_id must be given"),
        (batch({"prompt": "a"}, method="GET"), "method must be 'POST'"),
        (batch({"prompt": "a"}, url="/v1/embeddings"), "url must be one of /v1/chat/completions, /v1/completions"),
        (batch({"prompt": "a"}, url=["x"]), "url must be one of"),
        (batch({"prompt": "a"}, more=1), "unknown key: more"),
        ({**batch({"prompt": "a"}), "body": "text"}, "body must be a JSON object"),
        ({**batch({"prompt": "a"}), "body": 5}, "body must be a JSON object"),
        (batch({"messages": [*CHAT, {"x": float("nan")}]}), "body.messages[1].x must be a finite number, given nan"),
        (batch({}), "prompt must be a str or a list of token ids"),
        (batch({"prompt": ["a", "b"]}), "given a list of prompts"),
        (batch({"prompt": "a", "messages": CHAT}), "body: prompt is not served"),
        (batch({"prompt": "a", "stream": True}), "body: stream must be False"),
        (batch({"prompt": "a", "echo": True}), "body: echo must be False"),
        (batch({"prompt": "a", "best_of": 3}), "body: best_of must be 1"),
        (batch({"prompt": "a", "model": 3}), "model must be a str"),
        (batch({"messages": CHAT, "audio": {}}), "body: audio is not served"),
        (batch({"messages": CHAT, "tool_choice": "required"}), "tool_choice must be 'auto' or 'none'"),
        (batch({"messages": CHAT, "top_logprobs": 2}), "top_logprobs needs logprobs"),
        (batch({"messages": CHAT, "logprobs": 2}), "logprobs must be true or false"),
        (batch({"messages": CHAT, "max_tokens": 2, "max_completion_tokens": 1}), "must be the same, or one"),
        (batch({"messages": CHAT, "reasoning_effort": 3}), "reasoning_effort must be a str"),
        (batch({"prompt": "a", "reasoning_effort": "low"}), "body: reasoning_effort is not served"),
        (
            batch({"messages": CHAT, "reasoning_effort": "a", "chat_template_kwargs": {"reasoning_effort": "b"}}),
            "reasoning_effort must be the same in chat_template_kwargs",
        ),
        (batch({"messages": CHAT, "response_format": {"type": "xml"}}), "response_format must be an object of type"),
        (batch({"messages": CHAT, "temperature": 3000}), "temperature must be a number"),
        (batch({"messages": CHAT, "modalities": ["audio"]}), "modalities must be ['text']"),
    ],
)
def test_what_a_batch_asks_for_in_vain_is_refused_by_name(values: dict, words: str) -> None:
    assert words in error_of(values)


# -- Answers


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> TokenTexts:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    return TokenTexts(byte_level(directory, ["0", "1", "2", "3", "4", "p", "\u010a", "\u0120a", "\u00c3\u00a9", "b"]))


def test_an_answer_of_a_chat(texts: TokenTexts) -> None:
    answer = json.loads(
        answer_line(
            row("chat", custom_id="me", model="m", sampling={"logprobs": 1}), output_of(logprobs=LOGPROBS), texts
        )
    )
    body = answer["response"].pop("body")
    assert answer == {
        "id": "batch_req_5",
        "custom_id": "me",
        "response": {"status_code": 200, "request_id": "req_5"},
        "error": None,
    }
    assert body.pop("created") > 1_700_000_000
    likely = {"token": "b", "logprob": -0.25, "bytes": [98]}
    second = {"token": "é", "logprob": -1.0, "bytes": [195, 169]}
    first = {"token": " a", "logprob": -0.5, "bytes": [32, 97]}
    assert body == {
        "id": "chatcmpl-5",
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": " aé", "refusal": None},
                "logprobs": {
                    "content": [{**first, "top_logprobs": [likely]}, {**second, "top_logprobs": [second]}],
                    "refusal": None,
                },
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


@pytest.mark.parametrize(("wanted", "likely"), [(0, []), (1, ["b"]), (2, ["b", " a"])])
def test_a_chat_gets_as_many_likely_tokens_as_it_asked_for(wanted: int, likely: list[str], texts: TokenTexts) -> None:
    """The chosen one, which the engine gives besides, is among them only if it is that likely."""
    line = answer_line(row("chat", sampling={"logprobs": wanted}), output_of(logprobs=LOGPROBS), texts)
    token = json.loads(line)["response"]["body"]["choices"][0]["logprobs"]["content"][0]
    assert token["token"] == " a"
    assert [other["token"] for other in token["top_logprobs"]] == likely


def test_an_answer_of_a_completion(texts: TokenTexts) -> None:
    body = json.loads(answer_line(row("completion", custom_id="me"), output_of(n=2, logprobs=LOGPROBS), texts))[
        "response"
    ]["body"]
    assert (body["object"], body["id"], body["usage"]["completion_tokens"]) == ("text_completion", "cmpl-5", 4)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0] == {
        "index": 0,
        "text": " aé",
        "logprobs": {
            "tokens": [" a", "é"],
            "token_logprobs": [-0.5, -1.0],
            "top_logprobs": [{" a": -0.5, "b": -0.25}, {"é": -1.0}],
            "text_offset": [0, 2],
        },
        "finish_reason": "stop",
    }


# -- Tokens


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
