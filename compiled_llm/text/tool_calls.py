"""The tool calls of a message, as chat templates expect them: ``arguments`` is an object.

OpenAI's API has it as text, JSON in a string. A template that writes it with ``tojson`` would encode such a text a
second time, and one that goes through its items would fail.
"""

import json
from collections.abc import Mapping
from typing import Any

from compiled_llm.api.error_texts import shown

_ARGUMENTS = "arguments"


def with_decoded_arguments(name: str, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of tool calls whose ``arguments`` are values, not text: as vLLM has them, {} where there are none.

    Args:
        name: of the tool calls, for messages.
        calls: ``{"function": {"name": str, "arguments": ...}}``, or what is in "function" alone.

    Raises:
        ValueError: a text is not JSON.
    """
    return [_decoded_call(f"{name}[{number}]", call) for number, call in enumerate(calls)]


def _decoded_call(name: str, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _decoded_call(f"{name}.function", dict(function))}
    # A call of another kind than a function has no arguments.
    return {**call, _ARGUMENTS: _decoded(name, call.get(_ARGUMENTS))} if "name" in call else call


def _decoded(name: str, arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():
        return {}
    try:
        found = json.loads(arguments, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{name}.arguments must be a dict, or one as JSON in a str: {error}, given {shown(arguments)}"
        ) from error
    return {} if found is None else found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no value of JSON")
