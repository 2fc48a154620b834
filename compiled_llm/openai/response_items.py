"""Items of responses -> messages of a chat."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from compiled_llm.api.readable import shown
from compiled_llm.openai.requests import part_type
from compiled_llm.openai.response_tools import ToolName

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
_KINDS = "message, reasoning, function_call, function_call_output, custom_tool_call or custom_tool_call_output"


def messages_of(instructions: str | None, items: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of a chat. What the assistant thought, said and called between two other messages is one of them.

    What stands for the system at the start is one message, since many templates take no more.

    Raises:
        ValueError: an item is not as it must be.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for number, item in enumerate(items):
        message = _message(f"input[{number}]", item)
        last = messages[-1] if messages else {}
        if message["role"] == "system" and last.get("role") == "system":
            last["content"] += "\n\n" + message["content"]
        elif message["role"] == "assistant" and last.get("role") == "assistant":
            _join(last, message)
        else:
            messages.append(message)
    for message in messages:
        if message["role"] == "assistant" and "content" not in message:
            message["content"] = None if message.get("tool_calls") else ""
    return messages


def _join(message: dict[str, Any], other: Mapping[str, Any]) -> None:
    """What comes later of the same turn of the assistant."""
    for key in ("content", "reasoning_content"):
        if key in other:
            message[key] = "\n\n".join(filter(None, (message.get(key), other[key])))
    if "tool_calls" in other:
        message["tool_calls"] = [*message.get("tool_calls", []), *other["tool_calls"]]


def _message(name: str, item: Any) -> dict[str, Any]:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise ValueError(f"{name}: role must be one of {', '.join(_ROLES)}, given {shown(item.get('role'))}")
        return {"role": role, "content": _text(f"{name}.content", item.get("content"))}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
        return {"role": "assistant", "reasoning_content": "\n".join(filter(None, map(str, texts)))}
    if kind in ("function_call", "custom_tool_call"):
        return {"role": "assistant", "tool_calls": [_call(name, item)]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        content = _text(f"{name}.output", item.get("output"))
        return {"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": content}
    raise ValueError(f"{name} must be an item of type {_KINDS}, given {shown(item)}")


def _call(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    tool, key = item.get("name"), "input" if item["type"] == "custom_tool_call" else "arguments"
    if not isinstance(tool, str) or not isinstance(item.get(key), str):
        raise ValueError(f"{name} must have a name and {key}, each a str, given {shown(item)}")
    arguments = json.dumps({"input": item["input"]}) if key == "input" else item["arguments"]
    function = {"name": ToolName(tool, item.get("namespace")).function, "arguments": arguments}
    return {"id": str(item.get("call_id", "")), "type": "function", "function": function}


def _text(name: str, content: Any) -> str:
    """A str, or the texts of a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{name} must be a str or a list of parts, given {shown(content)}")
    for part in content:
        if part_type(name, part) not in _TEXT_PARTS:
            raise ValueError(f"{name} must have parts of type {', '.join(_TEXT_PARTS)}, given {shown(part)}")
        if not isinstance(part.get("text", part.get("refusal")), str):
            raise ValueError(f"{name}: a part must have a str as text, given {shown(part)}")
    return "".join(part.get("text", part.get("refusal")) for part in content)
