"""The events of a message, in their order, and that what they say together is the message."""

import json
from collections.abc import Iterable
from typing import Any

from compiled_llm.anthropic.events import MessageEvents
from compiled_llm.parsing.events import ArgumentsDelta, CallBegins, CallEnds, ContentDelta, Event, ReasoningDelta

PARTS: list[Event] = [
    *(ReasoningDelta("I "), ReasoningDelta("add"), ContentDelta("So")),
    *(CallBegins(0, "t0", "add"), ArgumentsDelta(0, '{"a"'), ArgumentsDelta(0, ": 1}"), CallEnds(0)),
    *(CallBegins(1, "t1", "now"), CallEnds(1), ContentDelta("!")),
]


def made(parts: Iterable[Event], reason: str = "stop", stop: Any = None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events, as they were when they came, and the message."""
    events = MessageEvents("msg_1", "m", 10)
    found = [json.loads(json.dumps(event)) for event in events.start(4)]
    for part in parts:
        found += [json.loads(json.dumps(event)) for event in events.take(part)]
    found += events.finish(reason, stop, 7, 2)
    return found, events.answer


def joined(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events."""
    message: dict[str, Any] = {}
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append({**event["content_block"]})
            arguments = ""
        elif kind == "content_block_delta":
            delta, block = event["delta"], message["content"][event["index"]]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
        elif kind == "content_block_stop":
            if message["content"][event["index"]]["type"] == "tool_use":
                message["content"][event["index"]]["input"] = json.loads(arguments or "{}")
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return message


def test_joined_the_events_are_the_message() -> None:
    events, message = made(PARTS)
    assert joined(events) == message
    assert message["content"] == [
        {"type": "thinking", "thinking": "I add", "signature": ""},
        {"type": "text", "text": "So"},
        {"type": "tool_use", "id": "t0", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "t1", "name": "now", "input": {}},
        {"type": "text", "text": "!"},
    ]
    assert message["stop_reason"] == "tool_use"
    assert message["usage"] == {"input_tokens": 6, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4,
                                "output_tokens": 7}  # fmt: skip
    kinds = [event["type"] for event in events]
    blocks = ["content_block_start", "content_block_stop"] * 5
    assert [kind for kind in kinds if kind != "content_block_delta"] == [
        *("message_start", *blocks, "message_delta", "message_stop")
    ]


def test_why_it_ended() -> None:
    for reason, stop, wanted in (
        ("stop", None, ("end_turn", None)),
        ("stop", 7, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
    ):
        _, message = made([ContentDelta("a")], reason, stop)
        assert (message["stop_reason"], message["stop_sequence"]) == wanted
    assert made(PARTS, "length")[1]["stop_reason"] == "max_tokens"


def test_arguments_that_were_cut_off_stay() -> None:
    _, message = made([CallBegins(0, "t0", "add"), ArgumentsDelta(0, '{"a'), CallEnds(0)], "length")
    assert message["content"][0]["input"] == {"INVALID_JSON": '{"a'}


def test_an_error_is_the_last_event() -> None:
    assert MessageEvents("msg_1", "m", 1).fail(503, "gone") == {
        "type": "error", "error": {"type": "overloaded_error", "message": "gone"}}  # fmt: skip
