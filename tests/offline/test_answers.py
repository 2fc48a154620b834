"""Answers: one line a row in the format of the row, from which its number and kind are read again."""

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from compiled_llm.offline.answers import answer_line, error_line, index_of, is_error
from compiled_llm.offline.rows import Row, RowFormat
from compiled_llm.offline.token_texts import TokenTexts
from tests.tokenizers import byte_level

LOGPROBS = [
    {7: Logprob(-0.5, 2, " a"), 9: Logprob(-0.25, 1, "b")},
    {8: Logprob(-1.0, 1, "é")},
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> TokenTexts:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    return TokenTexts(byte_level(directory, ["0", "1", "2", "3", "4", "p", "\u010a", "\u0120a", "\u00c3\u00a9", "b"]))


def output_of(*, n: int = 1, text: str = " aé", logprobs: Any = None) -> RequestOutput:
    completions = [
        CompletionOutput(index, text, [7, 8], None if logprobs is None else -1.5, logprobs, "stop", "x")
        for index in range(n)
    ]
    return RequestOutput("5", "prompt\n", [5, 6, 7], completions, True, RequestMetrics(0.0), None, 2)


def row(row_format: RowFormat = "row", **fields: Any) -> Row:
    return Row(5, "row 5", {"prompt": "prompt\n"}, format=row_format, **fields)


def test_our_own_answer(texts: TokenTexts) -> None:
    line = answer_line(row(custom_id="me"), output_of(n=2, text="line\u2028\nfeed", logprobs=LOGPROBS), texts)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    answer = json.loads(line)
    fields = {
        "text": "line\u2028\nfeed",
        "token_ids": [7, 8],
        "finish_reason": "stop",
        "stop_reason": "x",
        "cumulative_logprob": -1.5,
        "logprobs": [
            {
                "7": {"logprob": -0.5, "rank": 2, "decoded_token": " a"},
                "9": {"logprob": -0.25, "rank": 1, "decoded_token": "b"},
            },
            {"8": {"logprob": -1.0, "rank": 1, "decoded_token": "é"}},
        ],
    }
    assert answer == {"index": 5, "custom_id": "me", "prompt": "prompt\n", **fields, "outputs": [fields, fields]}


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
                    "content": [
                        {**first, "top_logprobs": [likely]},
                        {**second, "top_logprobs": [second]},
                    ],
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


def test_log_probabilities_of_the_prompt_are_in_each_format(texts: TokenTexts) -> None:
    output = dataclasses.replace(output_of(), prompt_logprobs=[None, LOGPROBS[1]])
    expected = [None, {"8": {"logprob": -1.0, "rank": 1, "decoded_token": "é"}}]
    own, chat, completion = (json.loads(answer_line(row(kind), output, texts)) for kind in typing.get_args(RowFormat))
    assert own["prompt_logprobs"] == expected
    assert chat["response"]["body"]["prompt_logprobs"] == expected
    assert completion["response"]["body"]["choices"][0]["prompt_logprobs"] == expected


@pytest.mark.parametrize("is_users", [False, True])
def test_errors(is_users: bool) -> None:
    kind = "invalid_request_error" if is_users else "server_error"
    own = json.loads(error_line(row(custom_id="me"), "broken", is_users=is_users))
    assert own == {"index": 5, "custom_id": "me", "error": {"message": "broken", "type": kind}}
    answer = json.loads(error_line(row("chat", custom_id="me"), "broken", is_users=is_users))
    error = {"message": "broken", "type": kind, "param": None, "code": None}
    assert answer["response"]["status_code"] == (400 if is_users else 500)
    assert (answer["custom_id"], answer["error"], answer["response"]["body"]) == ("me", None, {"error": error})


@pytest.mark.parametrize("row_format", ["row", "chat", "completion"])
def test_a_line_tells_its_row_and_whether_it_is_an_error(row_format: RowFormat, texts: TokenTexts) -> None:
    text = '"error": {"message": ' * 2 + '{"index": 3,'
    good, bad = (
        answer_line(row(row_format), output_of(text=text), texts),
        error_line(row(row_format), text, is_users=True),
    )
    assert [index_of(line) for line in (good, bad)] == [5, 5]
    assert [is_error(line) for line in (good, bad)] == [False, True]


@pytest.mark.parametrize("line", [b"", b"[]\n", b'{"index": -1,', b'{"index": 1.5,', b'{"index": "1",', b'{"mine": 1}'])
def test_other_lines_have_no_row(line: bytes) -> None:
    with pytest.raises(ValueError, match="must begin with the number of its row"):
        index_of(line)


def test_half_a_surrogate_pair_is_written_as_json_spells_it(texts: TokenTexts) -> None:
    line = answer_line(row(), output_of(text="a\ud800b"), texts)
    assert json.loads(line)["text"] == "a\ud800b"
