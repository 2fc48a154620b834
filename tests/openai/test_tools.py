"""Tools of a chat and the choice of them: what is taken, and what is refused by name."""

from typing import Any

import pytest

from compiled_llm.openai.tools import MOST_TOOLS, ToolUse, read_tool_use
from compiled_llm.parsing.events import Tool

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def function(name: Any = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def test_what_is_taken() -> None:
    tools = [function("f", parameters=SCHEMA, strict=True), function("g.h-i_1", description="d", parameters=None)]
    f, g = Tool("f", SCHEMA, True), Tool("g.h-i_1")
    named = {"type": "function", "function": {"name": "f"}}
    assert read_tool_use({}) == ToolUse()
    assert read_tool_use({"tools": [], "tool_choice": "auto"}) == ToolUse()
    assert read_tool_use({"tools": tools}) == ToolUse((f, g))
    assert read_tool_use({"tools": tools, "parallel_tool_calls": False}) == ToolUse((f, g), "auto", False)
    assert read_tool_use({"tools": tools, "tool_choice": "required"}) == ToolUse((f, g), "required")
    assert read_tool_use({"tools": tools, "tool_choice": named}) == ToolUse((f,), "named", False)
    assert read_tool_use({"tools": tools, "tool_choice": "none"}) == ToolUse()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": {}}, "tools must be a list of at most 256 functions, given {}"),
        ({"tools": [function(str(n)) for n in range(MOST_TOOLS + 1)]}, "given 257 of them"),
        ({"tools": [3]}, "tools[0] must be {'type': 'function'"),
        ({"tools": [function(), {"type": "custom", "custom": {"name": "a"}}]}, "tools[1] must be {'type': 'function'"),
        ({"tools": [function("a b")]}, "tools[0].function.name must be 1 to 64 letters"),
        ({"tools": [function(), function()]}, "given 'f' twice"),
        ({"tools": [function(parameters=[])]}, "parameters must be a JSON schema of type 'object', given []"),
        ({"tools": [function(parameters={"type": "string"})]}, "parameters must be a JSON schema of type 'object'"),
        ({"tools": [function(parameters={"x-guidance": {}})]}, "x-guidance is not served"),
        ({"tools": [function(description=1)]}, "description must be a str, given 1"),
        ({"tools": [function(strict="yes")]}, "strict must be true or false, given 'yes'"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls must be true or false, given 1"),
        ({"tool_choice": "required"}, "tool_choice 'required' needs tools, given none"),
        ({"tools": [function()], "tool_choice": "any"}, "tool_choice must be 'auto', 'none', 'required' or"),
        ({"tools": [function()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice must be of type 'function'"),
        ({"tools": [function()], "tool_choice": {"function": {"name": "g"}}}, "must name one of tools, which are f"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        read_tool_use(fields)
    assert words in str(refused.value)
