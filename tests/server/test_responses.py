"""OpenAI's own client against a server: responses, whole, streamed, stored and cancelled."""

import json
from typing import Any

import msgspec
import openai
import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.server import schemas
from compiled_llm.server.settings import DEMO_NAME
from tests.server.conftest import Running
from tests.server.test_manners import until

QUESTION = "Return the larger of two numbers"
GREEDY: Any = {"model": DEMO_NAME, "temperature": 0, "max_output_tokens": 12}


def expected(engine: CompiledEngine, *texts: str) -> Any:
    """The answer to a conversation, whose turns are the user's and the assistant's."""
    roles = ("user", "assistant")
    chat = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    (output,) = engine.chat(chat, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    return output


def test_a_response_is_a_chat(reference: CompiledEngine, running: Running) -> None:
    wanted = expected(reference, QUESTION)
    answer = running.openai.responses.create(input=QUESTION, metadata={"a": "b"}, **GREEDY)
    assert answer.output_text == wanted.outputs[0].text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.model, answer.temperature, answer.metadata) == (DEMO_NAME, 0, {"a": "b"})
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (
        len(wanted.prompt_token_ids),
        12,
        len(wanted.prompt_token_ids) + 12,
    )
    stop = answer.output_text[5:8]
    with running.openai.responses.stream(input=QUESTION, extra_body={"stop": stop}, **GREEDY) as stream:
        final = stream.get_final_response()
    assert (final.status, final.incomplete_details) == ("completed", None)
    assert final.output_text == answer.output_text.partition(stop)[0]


def test_the_events_of_a_stream(running: Running) -> None:
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = list(running.openai.responses.create(input=QUESTION, stream=True, **GREEDY, **logprobs))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    text = "".join(event.delta for event in deltas)
    last = events[-1].response
    assert (events[-4].text, events[-3].part.text, last.output_text) == (text,) * 3
    found = [one for event in deltas for one in event.logprobs]
    assert [len(one.top_logprobs) for one in found] == [2] * 12
    assert [one.logprob for one in last.output[0].content[0].logprobs] == [one.logprob for one in found]
    assert events[0].response.output == []
    assert {event.item_id for event in deltas} == {last.output[0].id}


def test_answers_are_as_openapi_describes_them(running: Running) -> None:
    """Other routes are held against it by the tests of their own."""
    chat = [{"role": "user", "content": QUESTION}]
    for path, body, kind in (
        ("/v1/responses", {"input": QUESTION, "max_output_tokens": 2}, schemas.Response),
        ("/v1/messages", {"messages": chat, "max_tokens": 2}, schemas.Message),
        ("/v1/messages", {"messages": chat}, schemas.MessageError),
        ("/v1/messages/count_tokens", {"messages": chat}, schemas.MessageTokens),
        ("/score", {"prompt": "import os", "top_logprobs": 1}, schemas.Scores),
    ):
        msgspec.json.decode(running.http.post(path, json=body).content, type=kind)
    for path, kind in (("/server_info", schemas.ServerInfo), ("/tokenizer_info", schemas.TokenizerInfo)):
        msgspec.json.decode(running.http.get(path).content, type=kind)
    paths = running.http.get("/openapi.json").json()["paths"]
    assert {"/v1/responses/{response_id}/cancel", "/v1/messages", "/v1/score"} <= paths.keys()
    assert "/abort" not in paths


def test_a_response_whose_client_goes_is_forgotten(running: Running) -> None:
    body = {"input": QUESTION, "stream": True, "max_output_tokens": 400, "ignore_eos": True}
    with running.http.stream("POST", "/v1/responses", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: response.created"
        path = f"/v1/responses/{json.loads(next(lines).removeprefix('data: '))['response']['id']}"
        assert running.http.get(path).json()["status"] == "in_progress"
    until(lambda: running.http.get(path).status_code == 404)


def test_a_stored_response_is_gone_on_with(reference: CompiledEngine, running: Running) -> None:
    responses = running.openai.responses
    first = responses.create(input=QUESTION, instructions="forgotten later", **GREEDY)
    assert responses.retrieve(first.id) == first
    more = expected(reference, QUESTION, first.output_text, "And the smaller?")
    second = responses.create(input="And the smaller?", previous_response_id=first.id, **GREEDY)
    assert (second.output_text, second.previous_response_id) == (more.outputs[0].text, first.id)
    responses.delete(first.id)
    for gone in (lambda: responses.retrieve(first.id), lambda: responses.delete(first.id)):
        with pytest.raises(openai.NotFoundError):
            gone()
    with pytest.raises(openai.BadRequestError) as refused:
        responses.create(input="a", previous_response_id=first.id, **GREEDY)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    unstored = responses.create(input=QUESTION, store=False, **GREEDY)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(unstored.id)


def test_a_response_under_way_is_seen_and_cancelled(running: Running) -> None:
    responses = running.openai.responses
    long: Any = {**GREEDY, "max_output_tokens": 400, "extra_body": {"ignore_eos": True}}
    stream = responses.create(input=QUESTION, stream=True, **long)
    response_id = next(stream).response.id
    assert responses.retrieve(response_id).status == "in_progress"
    assert responses.cancel(response_id).status == "cancelled"
    last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.failed", "cancelled")
    assert responses.retrieve(response_id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="given one that is cancelled"):
        responses.cancel(response_id)
    until(lambda: running.http.get("/load").json()["server_load"] == 0)
