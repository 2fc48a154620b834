"""Rows and answers in our own format, and what holds in both: bad rows have a reason, a line tells its row."""

import dataclasses
import json
import typing
from typing import Any

import pytest

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.offline.formats import answer_line, error_line, index_of, is_error, row_of_object, row_of_text
from compiled_llm.offline.rows import Row, RowFormat
from compiled_llm.openai.answers import TokenTexts
from tests.offline.examples import CHAT, LOGPROBS, batch, error_of, output_of, row

TEXTS = TokenTexts(None)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"prompt": ' + "1" * 5000 + "}", "not JSON"),
        ("[1]", "must be a JSON object, given [1]"),
        ("null", "must be a JSON object"),
        ('"import os"', "must be a JSON object"),
        ('{"prompt": "a", "colour": 1, "temperature": 0}', "unknown key: colour; known are"),
        ("{}", "exactly one of prompt, prompt_token_ids, messages, given none"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "exactly one of"),
        ('{"prompt": "a", "priority": true}', "priority must be an integer"),
        ('{"prompt": "a", "priority": NaN}', "priority must be a finite number, given nan"),
        ('{"prompt": "a", "priority": 1.0}', "priority must be an integer"),
        ('{"messages": [{"role": "user", "content": "a", "x": {"y": [1, NaN]}}]}', "messages[0].x.y[1] must be"),
        ('{"messages": [{"role": "user", "content": 1e999}]}', "messages[0].content must be a finite"),
        ('{"prompt": "a", "sampling_params": ' + '{"a":' * 99 + "[1]" + "}" * 99 + "}", "100 lists and objects deep"),
        ('{"prompt": "a", "sampling_params": {"self": 1}}', "unknown sampling parameter 'self'"),
        (json.dumps({"x" * 10**6: 1}), "unknown key"),
        ('{"prompt": "a", "max_tokens": 3}', 'put it into "sampling_params"'),
        ('{"prompt": "a", "image": "x"}', "images, audio and video are not served"),
        ('{"promt": "a"}', "did you mean 'prompt'?"),
        ('{"prompt": "a", "custom_id": 7}', "custom_id must be a non-empty str"),
        ('{"prompt": "a", "sampling_params": [1]}', "sampling_params must be a JSON object"),
        ('{"prompt": "a", "sampling_params": {"temprature": 1}}', "did you mean 'temperature'?"),
        ('{"prompt": "a", "sampling_params": {"temperature": -1}}', "temperature must be a number"),
        ('{"prompt": "a", "sampling_params": {"output_kind": "delta"}}', "output_kind must be left out of a row"),
        ('{"prompt": "a", "tools": []}', "tools must go with messages"),
        ('{"prompt": "a", "reasoning_effort": "low"}', "reasoning_effort must go with messages"),
        ('{"prompt": "a", "sampling_params": {"min_tokens": 9, "max_tokens": 8}}', "min_tokens must be an integer"),
        ('{"messages": "a"}', "messages must be a list"),
        ('{"messages": []}', "messages must be a list"),
        ('{"messages": [{"role": "user", "content": "a"}], "cache_salt": "x"}', "cache_salt goes with prompt"),
    ],
)
def test_a_bad_row_has_a_short_reason(line: str, words: str) -> None:
    row = row_of_text(7, "row 7", line)
    assert row.error is not None
    assert words in row.error
    assert len(row.error) < 550
    assert (row.index, row.prompt, row.messages) == (7, None, None)


def test_our_own_rows() -> None:
    values = {"messages": CHAT, "tools": [{"type": "function"}], "chat_template_kwargs": {"a": 1}, "custom_id": "x"}
    assert row_of_object(3, "row 3", {**values, "sampling_params": {"n": 2, "seed": None}}) == Row(
        3,
        "row 3",
        messages=CHAT,
        chat_options={"tools": [{"type": "function"}], "chat_template_kwargs": {"a": 1}},
        sampling={"n": 2, "seed": None},
        custom_id="x",
    )


@pytest.mark.parametrize(("given", "kept"), [("", ()), ([""], ()), (["", "a"], ("a",)), (None, ()), ("a", ("a",))])
def test_an_empty_stop_string_is_none(given: Any, kept: tuple[str, ...]) -> None:
    """As clients of OpenAI's send it; ``SamplingParams`` refuses it, as vLLM's does."""
    for values in ({"prompt": "a", "sampling_params": {"stop": given}}, batch({"prompt": "a", "stop": given})):
        row = row_of_object(0, "row 0", values)
        assert row.error is None
        assert SamplingParams(**row.sampling).stop == kept
    with pytest.raises(ValueError, match="stop must be a non-empty string"):
        SamplingParams(stop="")


def test_min_tokens_may_be_more_than_max_tokens_is_by_default() -> None:
    """The run has another ``max_tokens``, and the engine checks the two together."""
    for values in ({"prompt": "a", "sampling_params": {"min_tokens": 60}}, batch({"messages": CHAT, "min_tokens": 60})):
        row = row_of_object(0, "row 0", values)
        assert (row.error, row.sampling) == (None, {"min_tokens": 60})


def test_the_two_names_of_max_tokens_may_agree() -> None:
    row = row_of_object(0, "row 0", batch({"messages": CHAT, "max_tokens": 5, "max_completion_tokens": 5}))
    assert (row.error, row.sampling) == (None, {"max_tokens": 5})


@pytest.mark.parametrize("beside", [{}, {"a": 1}, {"reasoning_effort": "high"}])
def test_the_effort_of_reasoning_is_a_variable_of_the_template(beside: dict[str, Any]) -> None:
    values: dict[str, Any] = {"messages": CHAT, "reasoning_effort": "high", "chat_template_kwargs": beside or None}
    for found in (row_of_object(0, "row 0", values), row_of_object(0, "row 0", batch(values))):
        assert found.error is None
        assert found.chat_options == {"chat_template_kwargs": {**beside, "reasoning_effort": "high"}}


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_images_and_the_like_are_refused_by_name(kind: str) -> None:
    chat = [*CHAT, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {}}]}]
    words = rf"are not served: messages[1] has a part of type '{kind}'"
    assert words in error_of({"messages": chat})
    assert words in error_of(batch({"messages": chat}))


# -- Answers


def test_our_own_answer() -> None:
    line = answer_line(row(custom_id="me"), output_of(n=2, text="line\u2028\nfeed", logprobs=LOGPROBS), TEXTS)
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


def test_log_probabilities_of_the_prompt_are_in_each_format() -> None:
    output = dataclasses.replace(output_of(), prompt_logprobs=[None, LOGPROBS[1]])
    expected = [None, {"8": {"logprob": -1.0, "rank": 1, "decoded_token": "é"}}]
    own, chat, completion = (json.loads(answer_line(row(kind), output, TEXTS)) for kind in typing.get_args(RowFormat))
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
def test_a_line_tells_its_row_and_whether_it_is_an_error(row_format: RowFormat) -> None:
    text = '"error": {"message": ' * 2 + '{"index": 3,'
    good, bad = (
        answer_line(row(row_format), output_of(text=text), TEXTS),
        error_line(row(row_format), text, is_users=True),
    )
    assert [index_of(line) for line in (good, bad)] == [5, 5]
    assert [is_error(line) for line in (good, bad)] == [False, True]


@pytest.mark.parametrize("line", [b"", b"[]\n", b'{"index": -1,', b'{"index": 1.5,', b'{"index": "1",', b'{"mine": 1}'])
def test_other_lines_have_no_row(line: bytes) -> None:
    with pytest.raises(ValueError, match="must begin with the number of its row"):
        index_of(line)


def test_half_a_surrogate_pair_is_written_as_json_spells_it() -> None:
    line = answer_line(row(), output_of(text="a\ud800b"), TEXTS)
    assert json.loads(line)["text"] == "a\ud800b"
