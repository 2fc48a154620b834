"""The body of a request for a message, as Anthropic defines it -> a chat. https://docs.anthropic.com/en/api/messages

What means the same has other names there, and a message's content is a list of blocks, among them tool calls and their
results. A field that nobody knows is refused by name.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compiled_llm.api.names import refuse_unknown_fields
from compiled_llm.api.readable import shown
from compiled_llm.openai.requests import SAMPLING_FIELDS, OpenAIRequest, part_type, read_request

# Fields of a chat that are fields here under the same name.
_SAME = ("model", "stream", "priority", "cache_salt", "chat_template_kwargs", *SAMPLING_FIELDS)
# Fields that change no token.
WITHOUT_EFFECT = (
    *("metadata", "service_tier", "cache_control", "context_management", "diagnostics", "speed", "inference_geo"),
    *("user_profile_id", "workspace_id"),
)
FIELDS = tuple(
    field
    for field in (
        *("messages", "system", "stop_sequences", "tools", "tool_choice", "thinking", "output_config"),
        *(*_SAME, *WITHOUT_EFFECT),
    )
    if field not in ("n", "stop", "prompt_logprobs")
)
_ELSEWHERE = {
    "stop": "give stop_sequences",
    "n": "a message is one answer",
    "output_format": "give output_config with format",
    "max_tokens_to_sample": "give max_tokens",
    "prompt": "give messages",
    "betas": "give it in the header anthropic-beta, which has no effect",
    **dict.fromkeys(("container", "mcp_servers"), "tools are run by the client alone"),
}
# Claude Code's system prompt begins with it, another one each time, so that no prefix would be found in the cache.
_BILLING = "x-anthropic-billing-header"
# Tools that Anthropic runs itself, by how their types begin: a model is not told of them.
PROVIDER_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "tool_search_", "mcp_toolset")


def read_message(body: Mapping[str, Any], counts: bool = False) -> OpenAIRequest:
    """A body, as values of JSON; a null is as no field.

    Args:
        counts: only the tokens of the prompt are to be counted, so max_tokens may be left out.

    Raises:
        ValueError: a field is unknown, has a value that is not allowed, or contradicts another one.
    """
    body = {name: value for name, value in body.items() if value is not None}
    refuse_unknown_fields(body, FIELDS, _ELSEWHERE)
    if "max_tokens" not in body and not counts:
        raise ValueError("max_tokens must be given, given none")
    chat: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    chat |= _tool_fields(body) | _format_fields(body)
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    chat["messages"] = [*_system(body.get("system")), *_conversation(body.get("messages"))]
    if chat["messages"][-1]["role"] == "assistant":
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    try:
        asked = read_request("chat", chat)
    except ValueError as error:
        text = str(error)
        raise ValueError(text.replace("stop", "stop_sequences", 1) if text.startswith("stop must") else text) from error
    types = [str(tool.get("type", "")) for tool in body.get("tools", [])]
    ignored = tuple(kind.rstrip("_") for kind in PROVIDER_TOOLS if any(one.startswith(kind) for one in types))
    return dataclasses.replace(asked, template_hints=_hints(body), ignored_tools=ignored)


# -- Messages


def _system(given: Any) -> Iterator[dict[str, Any]]:
    """One message of the system, unless there is nothing in it."""
    texts = [block["text"] for block in _blocks("system", given or [], ("text",))]
    kept = [text for text in texts if not text.startswith(_BILLING)]
    if kept:
        yield {"role": "system", "content": _content(kept)}


def _conversation(messages: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"messages must be a list of one or more objects with role and content, given {shown(messages)}"
        )
    for number, message in enumerate(messages):
        name = f"messages[{number}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if role == "user":
            yield from _of_the_user(_blocks(name, content, ("text", "tool_result")))
        elif role == "assistant":
            kinds = ("text", "thinking", "redacted_thinking", "tool_use")
            yield _of_the_assistant(name, _blocks(name, content, kinds))
        elif role == "system":
            yield from _system(content)
        else:
            raise ValueError(f"{name} must be an object whose role is 'user' or 'assistant', given {shown(message)}")


def _of_the_user(blocks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The results of tools are messages of their own, before what the user says."""
    for block in blocks:
        if block["type"] == "tool_result":
            texts = [part["text"] for part in _blocks("tool_result", block.get("content") or [], ("text",))]
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": "\n".join(texts)}
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    if texts or not blocks:
        yield {"role": "user", "content": _content(texts)}


def _of_the_assistant(name: str, blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Thinking that is redacted is left out: no model here could read it."""
    message: dict[str, Any] = {"role": "assistant"}
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    thoughts = [str(block.get("thinking", "")) for block in blocks if block["type"] == "thinking"]
    calls = [_call(name, block) for block in blocks if block["type"] == "tool_use"]
    message["content"] = _content(texts) if texts or not calls else None
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _call(name: str, block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input", {})
    if not isinstance(block.get("name"), str) or not isinstance(arguments, Mapping):
        raise ValueError(
            f"{name}: a block of type 'tool_use' must have a name and an object as input, given {shown(block)}"
        )
    function = {"name": block["name"], "arguments": arguments}
    return {"id": str(block.get("id", "")), "type": "function", "function": function}


def _blocks(name: str, content: Any, kinds: tuple[str, ...]) -> list[Mapping[str, Any]]:
    """What is a str is one block of text. ``ValueError`` for a block of another kind."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError(f"{name} must be a str or a list of blocks, given {shown(content)}")
    for block in content:
        kind = part_type(name, block)
        if kind not in kinds:
            raise ValueError(f"{name} must have blocks of type {', '.join(kinds)}, given {shown(block)}")
        if kind == "text" and not isinstance(block.get("text"), str):
            raise ValueError(f"{name}: a block of type 'text' must have a str as text, given {shown(block)}")
    return content


def _content(texts: Sequence[str]) -> Any:
    """Several texts stay several, as parts, for a template that takes them."""
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


# -- Other fields


def _tool_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a chat for tools."""
    tools = body.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tools must be a list of objects with name and input_schema, given {shown(tools)}")
    own = [_function(tool) for tool in tools if not str(tool.get("type", "")).startswith(PROVIDER_TOOLS)]
    choice = body.get("tool_choice", {"type": "auto"})
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "tool":
        wanted: Any = {"type": "function", "function": {"name": choice.get("name")}}
    else:
        wanted = {"auto": "auto", "any": "required", "none": "none"}.get(str(kind))
    if wanted is None:
        raise ValueError(
            f"tool_choice must be an object of type 'auto', 'any', 'none' or 'tool' (with name), given {shown(choice)}"
        )
    if not own:
        if wanted not in ("auto", "none"):
            raise ValueError("tool_choice must be left out where there are no tools with an input_schema")
        return {}
    return {"tools": own, "tool_choice": wanted, "parallel_tool_calls": not choice.get("disable_parallel_tool_use")}


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), Mapping):
        raise ValueError(f"tools must have a name and an input_schema each, given {shown(tool)}")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"],
                "strict": tool.get("strict")}  # fmt: skip
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _format_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    config = body.get("output_config", {})
    if not isinstance(config, Mapping):
        raise ValueError(f"output_config must be an object with effort and format, given {shown(config)}")
    wanted = config.get("format")
    if wanted is None:
        return {}
    if not isinstance(wanted, Mapping) or wanted.get("type") != "json_schema" or "schema" not in wanted:
        raise ValueError(
            f"output_config: format must be an object of type 'json_schema' with schema, given {shown(wanted)}"
        )
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "message", "schema": wanted["schema"]}}}


def _hints(body: Mapping[str, Any]) -> dict[str, Any]:
    """Whether and how much the model is to think, under the names that chat templates have for it."""
    hints: dict[str, Any] = {}
    if "thinking" in body:
        thinking = body["thinking"]
        kind = thinking.get("type") if isinstance(thinking, Mapping) else None
        if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
            raise ValueError(
                f"thinking must be an object of type 'enabled', 'adaptive' or 'disabled', given {shown(thinking)}"
            )
        hints |= dict.fromkeys(("enable_thinking", "thinking"), kind != "disabled")
    effort = body.get("output_config", {}).get("effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise ValueError(f"output_config: effort must be a str, such as 'low', given {shown(effort)}")
        hints["reasoning_effort"] = effort
    return hints
