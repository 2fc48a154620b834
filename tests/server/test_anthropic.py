"""Anthropic's own client against a server: messages, whole and streamed, are what ``chat`` gives."""

import json
from typing import Any

import anthropic
import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.server.errors import ApiError
from compiled_llm.server.http import error_response
from compiled_llm.server.settings import DEMO_NAME
from tests.server.conftest import Running, running_with

CHAT: Any = [{"role": "user", "content": "Return the larger of two numbers"}]
GREEDY: Any = {"model": DEMO_NAME, "max_tokens": 12, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(running: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0, timeout=60)


def test_a_message_is_a_chat(reference: CompiledEngine, client: anthropic.Anthropic) -> None:
    system = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be short"}]
    (wanted,) = reference.chat(
        [{"role": "system", "content": "Be short"}, *CHAT], SamplingParams(temperature=0, max_tokens=12)
    )
    answer = client.messages.create(messages=CHAT, system=system, **GREEDY)
    (block,) = answer.content
    assert (block.type, block.text) == ("text", wanted.outputs[0].text)
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("max_tokens", None, "assistant")
    assert answer.id.startswith("msg_")
    usage = answer.usage
    assert (usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens) == (
        len(wanted.prompt_token_ids),
        12,
    )
    with client.messages.stream(messages=CHAT, system=system, **GREEDY) as stream:
        kinds = [event.type for event in stream]
        assert "".join(stream.text_stream) == ""
        final = stream.get_final_message()
    assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert final.content[0].text == block.text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)


def test_the_events_of_a_stream(running: Running) -> None:
    body = {"messages": CHAT, "max_tokens": 3, "stream": True}
    answer = running.http.post("/v1/messages?beta=true", json=body, headers={"x-request-id": "mine"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["request-id"] == "mine"
    *found, end = answer.text.split("\n\n")
    assert end == "", "a stream of messages has no [DONE]"
    for one in found:
        name, data = one.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=CHAT, **GREEDY)
    stop = whole.content[0].text[5:8]
    answer = client.messages.create(messages=CHAT, stop_sequences=[stop], **GREEDY)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == whole.content[0].text.partition(stop)[0]


def test_an_answer_goes_on_with_what_is_begun(reference: CompiledEngine, client: anthropic.Anthropic) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "def larger(a, b):"}]
    options: Any = {"add_generation_prompt": False, "continue_final_message": True}
    params = SamplingParams(temperature=0, max_tokens=12)
    (wanted,) = reference.chat(messages, params, use_tqdm=False, **options)
    assert client.messages.create(messages=messages, **GREEDY).content[0].text == wanted.outputs[0].text


def test_what_claude_code_sends_is_served(client: anthropic.Anthropic) -> None:
    """Also by a model whose template cannot be told how much to think."""
    more = {"context_management": {"edits": []}, "temperature": 0}
    answer = client.messages.create(
        model=DEMO_NAME, messages=CHAT, max_tokens=3, extra_body=more, metadata={"user_id": "u"},
        thinking={"type": "adaptive"}, output_config={"effort": "high"},
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
    )  # fmt: skip
    assert answer.usage.output_tokens == 3


def test_tokens_are_counted(reference: CompiledEngine, client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=DEMO_NAME, messages=CHAT)
    assert counted.input_tokens == len(reference.encode_chat(CHAT).token_ids)


def test_errors_have_anthropics_form(engine: CompiledEngine, client: anthropic.Anthropic, running: Running) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(messages=CHAT, model="other", max_tokens=1)
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id
    for fields in ({"max_tokens": 0}, {"temperature": 300}):
        with pytest.raises(anthropic.BadRequestError) as bad:
            client.messages.create(model=DEMO_NAME, messages=CHAT, max_tokens=1, extra_body=fields)
        assert bad.value.body["error"]["type"] == "invalid_request_error"
    for method, path, status in (("GET", "/v1/messages", 405), ("POST", "/v1/messages/batches", 404)):
        refused = running.http.request(method, path)
        assert (refused.status_code, set(refused.json())) == (status, {"type", "error"})
    asked: Any = {"messages": CHAT, "max_tokens": 480, "ignore_eos": True}
    with running_with(engine, api_key=("key",), max_request_seconds=0.2, max_waiting_requests=0) as guarded:
        unknown = guarded.http.post("/v1/messages", json=asked)
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (401, "authentication_error")
        key = {"x-api-key": "key"}
        late = guarded.http.post("/v1/messages", json=asked, headers=key)
        assert (late.status_code, late.json()["error"]["type"]) == (408, "timeout_error")


def test_an_error_is_the_last_event_of_a_stream(engine: CompiledEngine) -> None:
    asked: Any = {"messages": CHAT, "max_tokens": 480, "ignore_eos": True, "stream": True}
    with running_with(engine, dev=True) as running, running.http.stream("POST", "/v1/messages", json=asked) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: message_start"
        assert running.http.post("/abort", json={"abort_all": True}).json() == {"aborted": 1}
        *_, name, data, end = lines
        assert (name, end) == ("event: error", "")
        assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"


def test_a_server_that_cannot_serve_is_overloaded() -> None:
    answer = error_response(ApiError(503, "the model is being loaded"), {"path": "/v1/messages"})
    assert (answer.status_code, json.loads(answer.body)["error"]["type"]) == (529, "overloaded_error")
