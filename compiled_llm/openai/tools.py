"""The tools of a chat, as OpenAI defines them: which there are, and which the answer may or must call.

https://platform.openai.com/docs/guides/function-calling
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from compiled_llm.api.readable import shown
from compiled_llm.parsing.events import Tool

MOST_TOOLS = 256
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_CHOICES = ("auto", "none", "required")


@dataclasses.dataclass(frozen=True, slots=True)
class ToolUse:
    """What a chat may do with tools.

    Attributes:
        tools: that may be called; without any there are no calls.
        choice: "auto": text or calls; "required": calls; "named": one call of the one tool.
        parallel: an answer may have several calls.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    parallel: bool = True


def read_tool_use(body: Mapping[str, Any]) -> ToolUse:
    """``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a body. ``ValueError``: one of them is wrong."""
    parallel, choice = body.get("parallel_tool_calls", True), body.get("tool_choice")
    if not isinstance(parallel, bool):
        raise ValueError(f"parallel_tool_calls must be true or false, given {shown(parallel)}")
    tools = _tools(body.get("tools", []))
    if choice in (None, "none") or (choice == "auto" and not tools):
        return ToolUse(() if choice == "none" else tools, "auto", parallel)
    if isinstance(choice, Mapping):
        name = _chosen(choice)
        named = tuple(tool for tool in tools if tool.name == name)
        if not named:
            known = ", ".join(tool.name for tool in tools) or "none"
            raise ValueError(f"tool_choice must name one of tools, which are {known:.500}, given {shown(name)}")
        return ToolUse(named, "named", False)
    if choice not in _CHOICES:
        raise ValueError(
            "tool_choice must be 'auto', 'none', 'required' or "
            f"{{'type': 'function', 'function': {{'name': ...}}}}, given {shown(choice)}"
        )
    if not tools:
        raise ValueError(f"tool_choice {choice!r} needs tools, given none")
    return ToolUse(tools, choice, parallel)


def _chosen(choice: Mapping[str, Any]) -> Any:
    function = choice.get("function")
    if choice.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise ValueError(
            "tool_choice must be of type 'function', with the name in function, all that is served here, given "
            f"{shown(choice)}"
        )
    return function.get("name")


def _tools(values: Any) -> tuple[Tool, ...]:
    if not isinstance(values, list) or len(values) > MOST_TOOLS:
        given = f"{len(values)} of them" if isinstance(values, list) else shown(values)
        raise ValueError(f"tools must be a list of at most {MOST_TOOLS} functions, given {given}")
    tools: dict[str, Tool] = {}
    for number, value in enumerate(values):
        tool = _tool(f"tools[{number}]", value)
        if tool.name in tools:
            raise ValueError(f"tools must have names of their own, given {tool.name!r} twice")
        tools[tool.name] = tool
    return tuple(tools.values())


def _tool(place: str, value: Any) -> Tool:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or value.get("type") != "function" or not isinstance(function, Mapping):
        raise ValueError(
            f"{place} must be {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}, all that is "
            f"served here, given {shown(value)}"
        )
    name, parameters, strict = (function.get(key) for key in ("name", "parameters", "strict"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{place}.function.name must be 1 to 64 letters, digits or any of _.-, given {shown(name)}")
    if not isinstance(parameters, Mapping | None) or (parameters or {}).get("type", "object") != "object":
        raise ValueError(
            f"{place}.function.parameters must be a JSON schema of type 'object', given {shown(parameters)}"
        )
    if "x-guidance" in (parameters or {}):
        raise ValueError(f"{place}.function.parameters: x-guidance is not served: leave it out")
    if not isinstance(function.get("description"), str | None):
        raise ValueError(f"{place}.function.description must be a str, given {shown(function['description'])}")
    if not isinstance(strict, bool | None):
        raise ValueError(f"{place}.function.strict must be true or false, given {shown(strict)}")
    return Tool(name, dict(parameters or {}), bool(strict))
