"""Objects of the input: both formats give rows, and what cannot be served is refused by name."""

import json
from typing import Any

import pytest

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.offline.row_formats import row_of_object, row_of_text
from compiled_llm.offline.rows import Row

CHAT = [{"role": "user", "content": "hello"}]


def error_of(values: Any) -> str:
    row = row_of_object(0, "row 0", values)
    assert row.error is not None
    assert (row.prompt, row.messages) == (None, None)
    return row.error


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
        (
            '{"messages": [{"role": "user", "content": "a", "x": {"y": [1, NaN]}}]}',
            "messages[0].x.y[1] must be",
        ),
        (
            '{"messages": [{"role": "user", "content": 1e999}]}',
            "messages[0].content must be a finite",
        ),
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
    assert len(row.error) < 500
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
    for values in (
        {"prompt": "a", "sampling_params": {"min_tokens": 60}},
        batch({"messages": CHAT, "min_tokens": 60}),
    ):
        row = row_of_object(0, "row 0", values)
        assert (row.error, row.sampling) == (None, {"min_tokens": 60})


def test_the_two_names_of_max_tokens_may_agree() -> None:
    row = row_of_object(0, "row 0", batch({"messages": CHAT, "max_tokens": 5, "max_completion_tokens": 5}))
    assert (row.error, row.sampling) == (None, {"max_tokens": 5})


@pytest.mark.parametrize("beside", [{}, {"a": 1}, {"reasoning_effort": "high"}])
def test_the_effort_of_reasoning_is_a_variable_of_the_template(beside: dict[str, Any]) -> None:
    values: dict[str, Any] = {"messages": CHAT, "reasoning_effort": "high", "chat_template_kwargs": beside or None}
    for row in (row_of_object(0, "row 0", values), row_of_object(0, "row 0", batch(values))):
        assert row.error is None
        assert row.chat_options == {"chat_template_kwargs": {**beside, "reasoning_effort": "high"}}


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_images_and_the_like_are_refused_by_name(kind: str) -> None:
    chat = [*CHAT, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {}}]}]
    words = rf"are not served: messages[1] has a part of type '{kind}'"
    assert words in error_of({"messages": chat})
    assert words in error_of(batch({"messages": chat}))


# -- OpenAI's batches


def batch(body: dict[str, Any], **others: Any) -> dict[str, Any]:
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return {"custom_id": "a", "method": "POST", "url": url, "body": body, **others}


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
        (
            batch({"messages": CHAT, "max_tokens": 2, "max_completion_tokens": 1}),
            "must be the same, or one",
        ),
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
