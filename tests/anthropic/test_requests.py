"""Bodies of messages: the chat that they are, and what of them is refused by name."""

from typing import Any

import pytest

from compiled_llm.anthropic.requests import read_message

CHAT: Any = [{"role": "user", "content": "a"}]
TOOL = {"name": "add", "description": "Adds", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": {"type": "object"}}}


def read(**fields: Any) -> Any:
    return read_message({"messages": CHAT, "max_tokens": 9, **fields})


def test_names_of_its_own() -> None:
    asked = read(model="m", stop_sequences=["x"], top_k=3, stream=True, metadata={"user_id": "u"}, service_tier="auto",
                 system="s", cache_control=None)  # fmt: skip
    assert asked.sampling == {"max_tokens": 9, "stop": ["x"], "top_k": 3}
    assert (asked.kind, asked.model, asked.stream) == ("chat", "m", True)
    assert asked.messages == [{"role": "system", "content": "s"}, *CHAT]


def test_what_claude_code_sends() -> None:
    """Its first block differs in each request, and none of its fields is an error."""
    cached = {"cache_control": {"type": "ephemeral"}}
    asked = read(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=abc"},
            {"type": "text", "text": "one", **cached},
            {"type": "text", "text": "two"},
        ],
        tools=[{**TOOL, **cached}, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        context_management={"edits": []},
        metadata={},
        stream=True,
    )
    assert asked.messages[0] == {
        "role": "system", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}  # fmt: skip
    assert asked.chat_options["tools"] == [FUNCTION]
    assert asked.ignored_tools == ("web_search",)
    assert asked.template_hints == {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}


def test_a_conversation_with_tools() -> None:
    asked = read(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "1+1"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "redacted_thinking", "data": "?"},
                    {"type": "text", "text": "I add"},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                    {"type": "text", "text": "so?"},
                ],
            },
            {"role": "assistant", "content": "It is"},
        ]
    )
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert asked.messages == [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "I add", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "user", "content": "so?"},
        {"role": "assistant", "content": "It is"},
    ]
    assert asked.chat_options["continue_final_message"], "the answer goes on with what the last message begins"
    assert not asked.chat_options["add_generation_prompt"]


def test_thinking_and_formats() -> None:
    assert read(thinking={"type": "disabled"}).template_hints == {"enable_thinking": False, "thinking": False}
    schema = {"type": "object"}
    formed = read(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert formed.sampling["structured_outputs"] == {"json": schema}


def test_tokens_are_counted_without_max_tokens() -> None:
    assert read_message({"messages": CHAT}, counts=True).messages == CHAT


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens must be given"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"stop": ["a"]}, "give stop_sequences"),
        ({"stop_sequences": [1]}, "stop_sequences must be"),
        ({"max_token": 1}, "max_token is not served: did you mean 'max_tokens'?"),
        ({"mcp_servers": []}, "tools are run by the client alone"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not served"),
        ({"messages": []}, "messages must be a list of one or more"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0] must be an object whose role is"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "images are not served: messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "files are not served: messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "messages[0] must have blocks of type"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0] must be a str or a list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must have a str as text"),
        ({"system": [{"type": "image"}]}, "images are not served: system"),
        ({"tools": [{"name": "a"}]}, "tools must have a name and an input_schema each"),
        ({"tools": 3}, "tools must be a list of objects"),
        ({"tool_choice": "any"}, "tool_choice must be an object of type 'auto'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice must be left out where there are no tools"),
        ({"thinking": {"type": "much"}}, "thinking must be an object of type"),
        ({"output_config": {"effort": 3}}, "output_config: effort must be a str"),
        ({"output_config": {"format": {"type": "json"}}}, "output_config: format must be an object of type"),
        ({"output_config": 3}, "output_config must be an object"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        read(**fields)
    assert words in str(refused.value)
