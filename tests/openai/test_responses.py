"""Bodies of responses: the chat that they are, and what of them is refused by name."""

from typing import Any

import pytest

from compiled_llm.openai.response_tools import ToolName
from compiled_llm.openai.responses import read_response

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
CUSTOM = {"type": "custom", "name": "patch", "description": "Edits", "format": {"type": "text"}}


def functions(asked: Any) -> list[str]:
    return [tool["function"]["name"] for tool in asked.chat.chat_options.get("tools", [])]


def test_names_of_its_own() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": PARAMETERS, "strict": True}
    body = {"input": "a", "instructions": "be short", "max_output_tokens": 9, "temperature": 0, "stop": ["x"],
            "text": {"format": schema, "verbosity": "low"}, "metadata": {"k": "v"}, "user": "u", "store": False,
            "include": ["message.output_text.logprobs"], "top_logprobs": 3, "model": None}  # fmt: skip
    asked = read_response(body)
    assert asked.chat.messages == [{"role": "system", "content": "be short"}, {"role": "user", "content": "a"}]
    assert asked.chat.sampling == {"max_tokens": 9, "temperature": 0, "stop": ["x"], "logprobs": 3,
                                   "structured_outputs": {"json": PARAMETERS}}  # fmt: skip
    assert not asked.is_stored
    assert asked.items == [{"type": "message", "role": "user", "content": "a"}]
    assert asked.repeated["text"] == {"format": schema, "verbosity": "low"}
    assert (asked.repeated["metadata"], asked.repeated["max_output_tokens"]) == ({"k": "v"}, 9)


def test_what_codex_sends() -> None:
    """Also tools that no model here was taught, and fields that change nothing."""
    message = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox"}]}
    question = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Mend it"}]}
    namespace = {"type": "namespace", "name": "mcp__docs", "description": "Docs", "tools": [TOOL]}
    asked = read_response(
        {
            **{"model": "m", "instructions": "You are Codex", "input": [message, question], "store": False},
            **{"tools": [TOOL, CUSTOM, {"type": "web_search"}, namespace], "tool_choice": "auto", "stream": True},
            **{
                "parallel_tool_calls": False,
                "reasoning": {"effort": "medium", "summary": "auto"},
                "service_tier": "auto",
            },
            **{"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "text": {"verbosity": "medium"}},
            **{"client_metadata": {}},
        }
    )
    assert asked.chat.messages == [
        {"role": "system", "content": "You are Codex\n\nSandbox"}, {"role": "user", "content": "Mend it"}]  # fmt: skip
    assert functions(asked) == ["add", "patch", "mcp__docs__add"]
    assert asked.tools["mcp__docs__add"] == ToolName("add", "mcp__docs")
    assert asked.tools["patch"].is_custom
    assert asked.chat.ignored_tools == ("web_search",)
    assert asked.chat.template_hints["reasoning_effort"] == "medium"
    assert asked.chat.stream


def test_items_are_messages_of_a_chat() -> None:
    items = [
        {"role": "user", "content": "1+1"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "namespace": "n"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": "?"},
        {"type": "function_call", "call_id": "c3", "name": "add", "arguments": ""},
    ]
    asked = read_response({"input": items[1:]}, earlier=items[:1])
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "n__add", "arguments": '{"a": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "patch", "arguments": '{"input": "x"}'}},
        {"id": "c3", "type": "function", "function": {"name": "add", "arguments": ""}},
    ]
    assert asked.chat.messages == [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "I add", "reasoning_content": "hm", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
        {"role": "assistant", "content": None, "reasoning_content": "short", "tool_calls": calls[2:]},
    ]
    assert asked.items == items


def test_which_tools_may_be_called() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "patch"}]}
    assert functions(read_response({"input": "a", "tools": [TOOL, CUSTOM], "tool_choice": allowed})) == ["patch"]
    assert functions(read_response({"input": "a", "tools": [TOOL], "tool_choice": "none"})) == []
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    tools = [{**CUSTOM, "format": grammar}]
    (tool,) = read_response({"input": "a", "tools": tools}).chat.chat_options["tools"]
    assert tool["function"]["description"] == "Edits\n\nThe input must be of this grammar (lark):\nstart: /a/"
    assert tool["function"]["parameters"]["required"] == ["input"]


def test_how_much_it_thinks() -> None:
    hints = read_response({"input": "a", "reasoning": {"effort": "none"}}).chat.template_hints
    assert hints == {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages is not served: a name of other libraries; give input"),
        ({"max_tokens": 3}, "give max_output_tokens"),
        ({"max_output_token": 3}, "did you mean 'max_output_tokens'?"),
        ({"max_output_tokens": 0}, "max_output_tokens must be"),
        ({"conversation": "c"}, "give previous_response_id"),
        ({"background": True}, "background must be False, all that is served here"),
        ({"truncation": "auto"}, "truncation must be 'disabled'"),
        ({"input": []}, "input must be a str or a list of one or more items"),
        ({"input": None}, "input must be a str or a list of one or more items"),
        ({"input": ["a"]}, "input[0] must be an item of type message"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0] must be an item of type message"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0]: role must be one of user"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "images are not served: input[0].content",
        ),
        ({"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input[0].content must have parts of type"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0] must have a name and arguments"),
        ({"tools": [{"type": "local_shell"}]}, "tools must be of type function, custom, namespace, or web_search"),
        ({"tools": [{"type": "function"}]}, "tools must have a name each"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "must have a list of other tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "b"}},
            "tool_choice must name one of the tools, add",
        ),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice must be 'auto', 'none', 'required'"),
        ({"tool_choice": "required"}, "where no tools are served"),
        ({"top_logprobs": 2}, "top_logprobs needs include"),
        ({"include": ["everything"]}, "include must be a list of any of"),
        ({"text": {"form": 1}}, "text must be an object with format and verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format must be an object of type"),
        ({"reasoning": {"effort": 3}}, "reasoning must be an object with effort"),
        ({"store": 1}, "store must be true or false"),
        ({"metadata": []}, "metadata must be an object"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not served"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        read_response({"input": "a", **fields})
    assert words in str(refused.value)
