"""Outputs with reasoning, content and calls -> messages and responses: streamed, they are the whole one."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from anthropic.types import Message
from openai.types.responses import Response

from compiled_llm.anthropic.events import MessageEvents
from compiled_llm.anthropic.requests import read_message
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.openai.answers import TokenTexts
from compiled_llm.openai.requests import OpenAIRequest
from compiled_llm.openai.response_events import ResponseEvents
from compiled_llm.openai.responses import read_response
from compiled_llm.server.answer_formats import AnswerFormats
from compiled_llm.server.event_answer import AnswerEvents, EventAnswer
from compiled_llm.server.service import Served, ServedPrompt
from compiled_llm.text.tokenizer import Tokenizer
from tests import tokenizers
from tests.server.test_answers import TEXT, outputs_of

SCHEMA = {"type": "object"}
RESPONSE = read_response({"input": "a", "tools": [{"type": "function", "name": "now", "parameters": SCHEMA}]})
CHAT = [{"role": "user", "content": "a"}]
MESSAGE = read_message({"messages": CHAT, "max_tokens": 99, "tools": [{"name": "now", "input_schema": SCHEMA}]})
Made = Callable[[Sequence[str], str], EventAnswer]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    return tokenizers.byte_level(directory, special_tokens=["<think>", "</think>", "<pad>"])


def answer(tokenizer: Tokenizer, asked: OpenAIRequest, events: AnswerEvents, pieces: Sequence[str], end: str) -> Any:
    """To a request whose answer comes in ``pieces``."""
    plan = AnswerFormats("hermes", "qwen3", tokenizer).plan(asked, "")
    outputs = outputs_of(tokenizer, pieces, end)
    served = Served(asked, SamplingParams(), plan, [ServedPrompt("r", "", [1, 2])], outputs)
    return EventAnswer(served, events, TokenTexts(tokenizer))


@pytest.fixture
def message(tokenizer: Tokenizer) -> Made:
    return lambda pieces, end: answer(tokenizer, MESSAGE, MessageEvents("msg_1", "m", 2), pieces, end)


@pytest.fixture
def response(tokenizer: Tokenizer) -> Made:
    def make(pieces: Sequence[str], end: str) -> EventAnswer:
        events = ResponseEvents("resp_1", "m", 2, RESPONSE.repeated, RESPONSE.tools)
        return answer(tokenizer, RESPONSE.chat, events, pieces, end)

    return make


def cuts(text: str) -> list[list[str]]:
    """The text as a whole, character by character, and cut at random."""
    rng = random.Random(0)
    found = [[text], list(text)]
    for _ in range(30):
        places = sorted(rng.sample(range(len(text)), 8))
        found.append([text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)])
    return found


NEW = ("id", "call_id", "created_at", "completed_at")


def named(value: Any) -> Any:
    """Without what is new each time: ids of calls, and moments."""
    if isinstance(value, dict):
        return {key: named(item) for key, item in value.items() if key not in NEW}
    return [named(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("dialect", ["message", "response"])
def test_however_it_is_cut_it_is_one_answer(dialect: str, request: pytest.FixtureRequest) -> None:
    make: Made = request.getfixturevalue(dialect)
    wanted = named(asyncio.run(make([TEXT], "stop").whole()))
    assert wanted["usage"]["output_tokens"] > 9
    counts = wanted.pop("usage")
    for pieces in cuts(TEXT):
        whole = named(asyncio.run(make(pieces, "stop").whole()))
        whole.pop("usage")  # pieces have other tokens here
        assert whole == wanted, pieces
    assert counts


def test_blocks_of_a_message(message: Made) -> None:
    found = Message.model_validate(asyncio.run(message([TEXT], "stop").whole()))
    assert [block.type for block in found.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (found.content[0].thinking, found.content[1].text) == ("Let me see.", "A moment.")  # type: ignore[union-attr]
    assert found.content[2].input == {"zone": "Óslo"}  # type: ignore[union-attr]
    assert found.stop_reason == "tool_use"
    assert asyncio.run(message([TEXT[:-30]], "length").whole())["stop_reason"] == "max_tokens"


def test_items_of_a_response(response: Made) -> None:
    found = Response.model_validate(asyncio.run(response([TEXT], "stop").whole()))
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call", "function_call"]
    assert found.output[2].arguments == '{"zone": "Óslo"}'  # type: ignore[union-attr]
    assert found.usage is not None
    assert 0 < found.usage.output_tokens_details.reasoning_tokens < found.usage.output_tokens
    assert found.status == "completed"
