"""The events of a response, in their order, and that what they say together is the response."""

import json
from collections.abc import Iterable
from typing import Any

from compiled_llm.openai.response_events import ResponseEvents
from compiled_llm.openai.response_tools import ToolName
from compiled_llm.parsing.events import ArgumentsDelta, CallBegins, CallEnds, ContentDelta, Event, ReasoningDelta

TOOLS = {"n__add": ToolName("add", "n"), "patch": ToolName("patch", is_custom=True)}
PARTS: list[Event] = [
    *(ReasoningDelta("I "), ReasoningDelta("add"), ContentDelta("So"), ContentDelta(" be it")),
    *(CallBegins(0, "c0", "n__add"), ArgumentsDelta(0, '{"a"'), ArgumentsDelta(0, ": 1}"), CallEnds(0)),
    *(CallBegins(1, "c1", "patch"), ArgumentsDelta(1, '{"input"'), ArgumentsDelta(1, ': "x"}'), CallEnds(1)),
]
DONE = {"function_call": "arguments", "custom_tool_call": "input"}


def made(parts: Iterable[Event], reason: str = "stop") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events, as they were when they came, and the response."""
    events = ResponseEvents("resp_1", "m", 10, {"metadata": {}}, TOOLS)
    found = [json.loads(json.dumps(event)) for event in events.start(4)]
    for part in parts:
        found += [json.loads(json.dumps(event)) for event in events.take(part)]
    found += events.finish(reason, None, 7, 2)
    return found, events.answer


def test_the_order_of_events() -> None:
    events, _ = made(PARTS)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", *["reasoning_text.delta"] * 2, "reasoning_text.done", "output_item.done"),
        *("output_item.added", "content_part.added", *["output_text.delta"] * 2),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", *["function_call_arguments.delta"] * 2, "function_call_arguments.done"),
        "output_item.done",
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        "completed",
    ]


def test_deltas_joined_are_the_items() -> None:
    events, response = made(PARTS)
    assert events[-1]["response"] == response
    ended = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert ended == response["output"]
    joined = {item["id"]: "" for item in ended}
    for event in events:
        if event["type"].endswith(".delta"):
            joined[event["item_id"]] += event["delta"]
            assert response["output"][event["output_index"]]["id"] == event["item_id"]
    thought, said, called, patched = ended
    assert list(joined.values()) == ["I add", "So be it", '{"a": 1}', "x"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "I add"}]
    assert said["content"] == [{"type": "output_text", "annotations": [], "logprobs": [], "text": "So be it"}]
    assert (called["name"], called["namespace"], called["arguments"]) == ("add", "n", '{"a": 1}')
    assert (patched["name"], patched["call_id"], patched["input"]) == ("patch", "c1", "x")
    assert {item["status"] for item in ended} == {"completed"}
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 4


def test_an_answer_that_was_cut_off() -> None:
    events, response = made([ContentDelta("a")], "length")
    assert events[-1]["type"] == "response.incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")


def test_a_custom_call_that_was_cut_off_stays() -> None:
    _, response = made([CallBegins(0, "c0", "patch"), ArgumentsDelta(0, '{"inp'), CallEnds(0)], "length")
    assert response["output"][0]["input"] == '{"inp'


def test_a_failure_is_the_last_event() -> None:
    events = ResponseEvents("resp_1", "m", 10, {}, {})
    list(events.start(0))
    last = events.fail(503, "gone")
    assert (last["type"], last["sequence_number"]) == ("response.failed", 2)
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "gone"}
