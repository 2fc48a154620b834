"""The bodies of requests as /openapi.json describes them: their fields, and the types of those that are parameters."""

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.openai.requests import FIELDS
from compiled_llm.server.tokens import DETOKENIZE_FIELDS, TOKENIZE_FIELDS

_IDS = {"type": "array", "items": {"type": "integer"}}
_OBJECT: dict[str, Any] = {"type": "object"}
_FLAG = {"type": "boolean"}
_TEXT = {"type": "string"}
# Fields that are no sampling parameters of the same type.
_SCHEMAS: Mapping[str, dict[str, Any]] = {
    "model": _TEXT,
    "prompt": {"anyOf": [_TEXT, _IDS, {"type": "array", "items": _TEXT}, {"type": "array", "items": _IDS}]},
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role"],
            "properties": {"role": _TEXT, "content": {"anyOf": [_TEXT, {"type": "array", "items": _OBJECT}]}},
        },
    },
    "tokens": _IDS,
    "logprobs": {"anyOf": [_FLAG, {"type": "integer"}]},
    "top_logprobs": {"type": "integer"},
    "max_completion_tokens": {"type": "integer"},
    "best_of": {"type": "integer"},
    "priority": {"type": "integer"},
    "stream_options": _OBJECT,
    "response_format": _OBJECT,
    "structured_outputs": _OBJECT,
    "chat_template_kwargs": _OBJECT,
    "tools": {"type": "array", "items": _OBJECT},
    "tool_choice": {"anyOf": [_TEXT, _OBJECT]},
    "parallel_tool_calls": _FLAG,
    "documents": {"type": "array", "items": _OBJECT},
    **dict.fromkeys(("cache_salt", "user", "reasoning_effort", "suffix", "request_id"), _TEXT),
    **dict.fromkeys(("stream", "echo", "return_token_ids", "continue_final_message", "add_generation_prompt"), _FLAG),
    **dict.fromkeys(("add_special_tokens", "return_token_strs", "use_beam_search", "store"), _FLAG),
}
_BODIES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "chat": (FIELDS["chat"], ["messages"]),
    "completion": (FIELDS["completion"], ["prompt"]),
    "tokenize": (TOKENIZE_FIELDS, []),
    "detokenize": (DETOKENIZE_FIELDS, ["tokens"]),
}
_KINDS = {int: "integer", float: "number", bool: "boolean", str: "string", dict: "object", tuple: "array"}


def body_of(name: Literal["chat", "completion", "tokenize", "detokenize"]) -> dict[str, Any]:
    """What FastAPI's ``openapi_extra`` is to say of a body."""
    fields, required = _BODIES[name]
    hints = typing.get_type_hints(SamplingParams)
    properties = {field: _SCHEMAS.get(field) or _schema(hints.get(field, Any)) for field in fields}
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _schema(hint: Any) -> dict[str, Any]:
    """The JSON schema of a parameter's type; empty where it may be anything."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    names = [_KINDS.get(typing.get_origin(kind) or kind) for kind in kinds if kind is not type(None)]
    found = [{"type": name} for name in names if name is not None]
    return found[0] if len(found) == 1 else {"anyOf": found} if found else {}
