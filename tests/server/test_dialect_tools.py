"""Tools by the clients of messages and responses: calls that must be are legal, and results go on."""

import json
from typing import Any

import anthropic

from compiled_llm.server.settings import DEMO_NAME
from tests.server.conftest import Running
from tests.server.test_tools import CHAT, WEATHER, with_tools  # noqa: F401 - a fixture

FUNCTION = WEATHER["function"]
SCHEMA = FUNCTION["parameters"]


def test_a_message_with_a_call(with_tools: Running) -> None:  # noqa: F811
    client = anthropic.Anthropic(base_url=with_tools.url, api_key="none", max_retries=0)
    tool: Any = {"name": "weather", "description": "The weather", "input_schema": SCHEMA}
    asked: Any = {"model": DEMO_NAME, "messages": CHAT, "max_tokens": 120, "tools": [tool], "extra_body": {"seed": 3},
                  "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}  # fmt: skip
    answer = client.messages.create(**asked)
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "weather", "tool_use")
    assert set(call.input) == {"place", "days"}
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert (final.content[0].input, final.stop_reason) == (call.input, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain"}
    more = [*CHAT, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    counted = client.messages.count_tokens(model=DEMO_NAME, messages=more, tools=[tool])
    answered = client.messages.create(**{**asked, "messages": more, "tool_choice": {"type": "none"}, "max_tokens": 2})
    assert answered.content[0].type == "text"
    assert counted.input_tokens > answer.usage.input_tokens


def test_a_response_with_calls(with_tools: Running) -> None:  # noqa: F811
    responses = with_tools.openai.responses
    function = {"type": "function", **{key: FUNCTION[key] for key in ("name", "parameters")}, "strict": True}
    custom = {"type": "custom", "name": "shell", "description": "Runs a command"}
    asked: Any = {"model": DEMO_NAME, "input": "a", "max_output_tokens": 120, "extra_body": {"seed": 3}}
    named = {
        "tools": [function, custom, {"type": "web_search"}],
        "tool_choice": {"type": "function", "name": "weather"},
    }
    answer = responses.create(**asked, **named)
    (call,) = answer.output
    assert (call.type, call.name, answer.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["place"] in ("Oslo", "Rome")
    events = list(responses.create(**asked, **named, stream=True))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
    more = {**asked, "input": [result], "max_output_tokens": 2, "previous_response_id": answer.id, "tools": [function]}
    assert responses.create(**more).output[0].type == "message"
    patched = responses.create(**asked, tools=[custom], tool_choice={"type": "custom", "name": "shell"})
    assert [item.type for item in patched.output] == ["custom_tool_call"]
