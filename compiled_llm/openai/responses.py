"""The body of a request for a response, as OpenAI defines it -> a chat. https://platform.openai.com/docs/api-reference/responses

A conversation is a list of items there: messages, reasoning, calls of tools and what these gave. A field that nobody
knows is refused by name.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from compiled_llm.api.argument_checks import integer
from compiled_llm.api.names import refuse_unknown_fields
from compiled_llm.api.readable import shown
from compiled_llm.openai.requests import SAMPLING_FIELDS, OpenAIRequest, read_request
from compiled_llm.openai.response_items import messages_of
from compiled_llm.openai.response_tools import ToolName, read_tools

# Fields of a chat that are fields here under the same name.
_SAME = tuple(
    field
    for field in ("model", "stream", "priority", "cache_salt", "chat_template_kwargs", *SAMPLING_FIELDS)
    if field not in ("n", "max_tokens", "prompt_logprobs")
)
# Fields that change no token.
WITHOUT_EFFECT = (
    *("metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    *("service_tier", "max_tool_calls", "client_metadata", "context_management", "stream_options"),
)
# Fields of which only the default is served.
_ONLY: Mapping[str, Any] = {"background": False, "truncation": "disabled"}
FIELDS = (
    *("input", "instructions", "max_output_tokens", "previous_response_id", "include", "text", "reasoning", "tools"),
    *("tool_choice", "parallel_tool_calls", "store", "top_logprobs", *_SAME, *WITHOUT_EFFECT, *_ONLY),
)
_ELSEWHERE = {
    "messages": "give input",
    "response_format": "give text with format",
    "reasoning_effort": "give reasoning with effort",
    "conversation": "give previous_response_id, or all items as input",
    "prompt": "give input and instructions",
    "n": "a response is one answer",
    "logprobs": "give include with 'message.output_text.logprobs', and top_logprobs",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "give max_output_tokens"),
}
_TYPES = {
    **dict.fromkeys(("store", "parallel_tool_calls"), (bool, "true or false")),
    "metadata": (dict, "an object"),
    "instructions": (str, "a str"),
}
_LOGPROBS = "message.output_text.logprobs"
# What "include" may ask for besides, of tools that are not run here or of other models.
_INCLUDED_IN_VAIN = (
    *("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
    *("web_search_call.action.sources", "message.input_image.image_url", "code_interpreter_call.outputs"),
    "computer_call_output.output.image_url",
)
# Name of a chat's field, as errors begin with it -> its name here.
_NAMES = {"max_tokens": "max_output_tokens", "response_format": "text.format", "messages": "input"}


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseRequest:
    """What a body asks for.

    Attributes:
        chat: the same as a request for a chat.
        items: the whole conversation, without the instructions.
        repeated: fields of the response that repeat what was asked for.
        tools: the name that the model has of a tool -> what the client calls it.
        is_stored: it can be asked for again, and gone on with.
    """

    chat: OpenAIRequest
    items: Sequence[Any]
    repeated: Mapping[str, Any]
    tools: Mapping[str, ToolName]
    is_stored: bool


def read_response(body: Mapping[str, Any], earlier: Sequence[Any] = ()) -> ResponseRequest:
    """A body, as values of JSON; a null is as no field.

    Args:
        earlier: the items of the response that it goes on with.

    Raises:
        ValueError: a field is unknown, has a value that is not allowed, or contradicts another one.
    """
    body = {name: value for name, value in body.items() if value is not None}
    refuse_unknown_fields(body, FIELDS, _ELSEWHERE)
    for name, only in _ONLY.items():
        if body.get(name, only) != only:
            raise ValueError(f"{name} must be {only!r}, all that is served here, given {shown(body[name])}")
    for name, (kind, allowed) in _TYPES.items():
        if name in body and not isinstance(body[name], kind):
            raise ValueError(f"{name} must be {allowed}, given {shown(body[name])}")
    tools = read_tools(body.get("tools", []), body.get("tool_choice", "auto"))
    items = [*earlier, *_items(body.get("input"))]
    chat: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    chat |= {"messages": messages_of(body.get("instructions"), items)}
    if tools.functions:
        parallel = body.get("parallel_tool_calls", True)
        chat |= {"tools": tools.functions, "tool_choice": tools.choice, "parallel_tool_calls": parallel}
    if "max_output_tokens" in body:
        chat["max_tokens"] = body["max_output_tokens"]
    text_format = _text_format(body)
    if text_format != {"type": "text"}:
        chat["response_format"] = _response_format(text_format)
    if _LOGPROBS in _included(body):
        integer("top_logprobs", body.get("top_logprobs", 0), 0, 20)
        chat |= {"logprobs": True, "top_logprobs": body.get("top_logprobs", 0)}
    elif body.get("top_logprobs"):
        raise ValueError(f"top_logprobs needs include to have {_LOGPROBS!r}")
    try:
        asked = read_request("chat", chat)
    except ValueError as error:
        name, space, rest = str(error).partition(" ")
        raise ValueError(_NAMES.get(name, name) + space + rest) from error
    hints = _hints(body)
    return ResponseRequest(
        chat=dataclasses.replace(asked, template_hints=hints, ignored_tools=tools.ignored),
        items=items,
        repeated=_repeated(body, text_format, hints),
        tools=tools.names,
        is_stored=body.get("store", True),
    )


def _items(given: Any) -> list[Any]:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ValueError(f"input must be a str or a list of one or more items, given {shown(given)}")
    return given


def _included(body: Mapping[str, Any]) -> Sequence[str]:
    include = body.get("include", [])
    known = (_LOGPROBS, *_INCLUDED_IN_VAIN)
    if not isinstance(include, list) or not all(name in known for name in include):
        raise ValueError(f"include must be a list of any of {', '.join(known)}, given {shown(include)}")
    return include


def _text_format(body: Mapping[str, Any]) -> Mapping[str, Any]:
    text = body.get("text", {})
    if not isinstance(text, Mapping) or not text.keys() <= {"format", "verbosity"}:
        raise ValueError(f"text must be an object with format and verbosity, given {shown(text)}")
    wanted = text.get("format") or {"type": "text"}
    if not isinstance(wanted, Mapping):
        raise ValueError(f"text.format must be an object with type, given {shown(wanted)}")
    return wanted


def _response_format(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat has under that name: there, a schema lies one object deeper."""
    kind = wanted.get("type")
    if kind != "json_schema":
        return dict(wanted)
    return {"type": kind, kind: {name: value for name, value in wanted.items() if name != "type"}}


def _hints(body: Mapping[str, Any]) -> dict[str, Any]:
    """How much the model is to think, under the names that chat templates have for it."""
    reasoning = body.get("reasoning", {})
    effort = reasoning.get("effort") if isinstance(reasoning, Mapping) else reasoning
    if effort is None:
        return {}
    if not isinstance(effort, str) or not isinstance(reasoning, Mapping):
        raise ValueError(f"reasoning must be an object with effort, a str such as 'low', given {shown(reasoning)}")
    thinks = effort != "none"
    return {"enable_thinking": thinks, "thinking": thinks, **({"reasoning_effort": effort} if thinks else {})}


def _repeated(body: Mapping[str, Any], text_format: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata", {}),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": body.get("reasoning", {}).get("effort"), "summary": None},
        "safety_identifier": body.get("safety_identifier"),
        "store": body.get("store", True),
        "text": {**body.get("text", {}), "format": text_format},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools", []),
        "top_logprobs": body.get("top_logprobs", 0),
        "user": body.get("user"),
    }
