"""/openapi.json: the fields of a body with their types and ranges, and what is answered.

What these schemas refuse, the server refuses too. It also refuses what they cannot say: fields that contradict each
other, a token id above the vocabulary, a chat that the template does not take.
"""

import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI

from compiled_llm.anthropic.requests import FIELDS as MESSAGE_FIELDS
from compiled_llm.api.sampling_params import (
    INTEGERS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    NUMBERS,
    SamplingParams,
)
from compiled_llm.openai.requests import FIELDS, ONLY, WITHOUT_EFFECT
from compiled_llm.openai.responses import FIELDS as RESPONSE_FIELDS
from compiled_llm.server import schemas
from compiled_llm.server.errors import KINDS
from compiled_llm.server.scores import SCORE_FIELDS
from compiled_llm.server.tokens import CHAT_FIELDS, DETOKENIZE_FIELDS, TEXT_FIELDS
from compiled_llm.text.prompts import MAX_SALT_CHARACTERS

Schema = dict[str, Any]

_REF = "#/components/schemas/"
_MOST = 2**31 - 1
_ANY: Schema = {}
_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}


def _integer(low: int, high: int = _MOST) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _list(item: Schema, least: int = 0, most: int | None = None) -> Schema:
    return {"type": "array", "items": item, "minItems": least} | ({} if most is None else {"maxItems": most})


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _object(required: Sequence[str], is_closed: bool = False, **properties: Schema) -> Schema:
    found: Schema = {"type": "object", "properties": properties, "required": required}
    return {**found, "additionalProperties": False} if is_closed else found


_IDS = _list(_integer(0), 1)
_STOP: Schema = {"type": "string", "maxLength": MAX_STOP_CHARACTERS}
_PART = _object(["type", "text"], type={"const": "text"}, text=_TEXT)
_ROLE: Schema = {"type": "string", "pattern": r"^[\w .:/-]{1,64}$"}
_MESSAGE = _either(
    _object(["role", "content"], role=_ROLE, content=_either(_TEXT, _list(_PART))),
    _object(["role", "tool_calls"], role=_ROLE, tool_calls=_list(_OBJECT, 1)),
)
_STRUCTURE = _object(
    [],
    is_closed=True,
    json=_either(_TEXT, _OBJECT, {"type": "null"}),
    regex=_either(_TEXT, {"type": "null"}),
    choice=_either(_list(_TEXT, 1), {"type": "null"}),
    grammar=_either(_TEXT, {"type": "null"}),
    json_object={"enum": [True, None]},
    whitespace_pattern=_either(_TEXT, {"type": "null"}),
    disable_any_whitespace=_FLAG,
)
_FORMAT = _either(
    _object(["type"], type={"enum": ["text", "json_object"]}),
    _object(["type", "json_schema"], type={"const": "json_schema"}, json_schema=_object(["schema"], schema=_OBJECT)),
)
# Fields that are no sampling parameters, and parameters of which the type and range do not say all.
_SCHEMAS: Mapping[str, Schema] = {
    **{name: {"enum": list(values)} for name, values in ONLY.items()},
    **dict.fromkeys(WITHOUT_EFFECT, _ANY),
    **dict.fromkeys(("stream", "echo", "return_token_ids", "continue_final_message", "add_generation_prompt"), _FLAG),
    **dict.fromkeys(("add_special_tokens", "return_token_strs", "split_special_tokens"), _FLAG),
    "prompt": _either({"type": "string", "minLength": 1}, _IDS, _list(_either({**_TEXT, "minLength": 1}, _IDS), 1)),
    "messages": _list(_MESSAGE, 1),
    "tokens": _list(_integer(0)),
    "max_tokens": _integer(1),
    "max_completion_tokens": _integer(1),
    "min_tokens": _integer(0),
    "best_of": _integer(1, INTEGERS["n"][1]),
    "top_logprobs": _integer(0, 1000),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "truncate_prompt_tokens": {**_integer(-1), "not": {"const": 0}},
    "priority": _integer(-(2**31)),
    "cache_salt": {"type": "string", "maxLength": MAX_SALT_CHARACTERS},
    "reasoning_effort": _TEXT,
    "stop": _either(_STOP, _list(_STOP, most=MAX_STOPS)),
    "stop_token_ids": _list(_integer(0), most=MAX_STOPS),
    "allowed_token_ids": _IDS,
    "bad_words": _either({**_STOP, "minLength": 1}, _list({**_STOP, "minLength": 1})),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        "maxProperties": MAX_BIASES,
    },
    "structured_outputs": _STRUCTURE,
    "response_format": _FORMAT,
    "stream_options": _object([], is_closed=True, **dict.fromkeys(("include_usage", "continuous_usage_stats"), _FLAG)),
    "chat_template_kwargs": _OBJECT,
    "tools": _list(_OBJECT),
    "tool_choice": _either(_TEXT, _OBJECT),
    "kv_transfer_params": _OBJECT,
    "parallel_tool_calls": _FLAG,
    "documents": _list(_OBJECT),
}
ABORT_FIELDS = ("request_id", "abort_all")
DRAIN_FIELDS = ("engine", "grace_seconds", "to", "to_api_key")
LOAD_FIELDS = ("lora_name", "lora_path", "load_inplace", "base_model_name")
UNLOAD_FIELDS = ("lora_name", "lora_int_id")
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 256}
_SYSTEM = _either(_TEXT, _list(_PART))
_BLOCKS = _list(_object(["role", "content"], role={"enum": ["user", "assistant"]}, content=_SYSTEM), 1)
_OF_MESSAGES: Mapping[str, Schema] = {
    **dict.fromkeys(("tool_choice", "thinking", "output_config"), _OBJECT),
    **{"messages": _BLOCKS, "system": _SYSTEM, "stop_sequences": _list(_STOP, most=MAX_STOPS)},
}
_OF_DRAINS = {"engine": _integer(0), "grace_seconds": {"type": "number"}, **dict.fromkeys(("to", "to_api_key"), _TEXT)}
_TAKEN = ("challenge", "proof", "request")
_OF_TAKE_OVERS = {**dict.fromkeys(_TAKEN, _TEXT), "adapters": _list(_TEXT)}
_OF_RESPONSES: Mapping[str, Schema] = {
    **dict.fromkeys(("text", "reasoning", "metadata"), _OBJECT),
    **{"input": _either(_TEXT, _list(_OBJECT, 1)), "max_output_tokens": _integer(1), "top_logprobs": _integer(0, 20)},
    **{"include": _list(_TEXT), "instructions": _TEXT, "store": _FLAG},
    **{"previous_response_id": _TEXT, "background": {"const": False}, "truncation": {"const": "disabled"}},
}
_OF_ADAPTERS: Mapping[str, Schema] = {
    **{"lora_name": _NAME, "lora_path": {"type": "string", "minLength": 1}, "load_inplace": _FLAG},
    **{"base_model_name": _TEXT, "lora_int_id": _ANY},
}
# Name of a body's schema -> its fields, those that must be there, and the schemas of those that are its own.
_BODIES: Mapping[str, tuple[Collection[str], Sequence[str], Mapping[str, Schema]]] = {
    "CompletionRequest": (FIELDS["completion"], ["prompt"], {"max_tokens": _integer(0)}),
    "ChatCompletionRequest": (FIELDS["chat"], ["messages"], {"logprobs": _FLAG}),
    "ResponseRequest": (RESPONSE_FIELDS, ["input"], _OF_RESPONSES),
    "MessageRequest": (MESSAGE_FIELDS, ["messages", "max_tokens"], _OF_MESSAGES),
    "CountTokensRequest": (MESSAGE_FIELDS, ["messages"], _OF_MESSAGES),
    "ScoreRequest": (SCORE_FIELDS, ["prompt"], {"continuations": _SCHEMAS["prompt"]}),
    "AbortRequest": (ABORT_FIELDS, [], {"request_id": _TEXT, "abort_all": {"const": True}}),
    "DrainRequest": (DRAIN_FIELDS, [], _OF_DRAINS),
    "UndrainRequest": (DRAIN_FIELDS[:1], ["engine"], _OF_DRAINS),
    "TakeOverRequest": (("challenge", "adapters"), ["challenge", "adapters"], _OF_TAKE_OVERS),
    "TakenRequest": (_TAKEN, [*_TAKEN], _OF_TAKE_OVERS),
    "LoadAdapterRequest": (LOAD_FIELDS, ["lora_name", "lora_path"], _OF_ADAPTERS),
    "UnloadAdapterRequest": (UNLOAD_FIELDS, ["lora_name"], _OF_ADAPTERS),
    "TokenizeTextRequest": (TEXT_FIELDS, ["prompt"], {"prompt": _TEXT}),
    "TokenizeChatRequest": (CHAT_FIELDS, ["messages"], {}),
    "DetokenizeRequest": (DETOKENIZE_FIELDS, ["tokens"], {}),
}
_ERRORS = (401, 404, 405, 431, 503)
_ERRORS_OF_BODIES = (400, 408, 413, 429, 500)


def described(answer: Any, *bodies: str, chunk: Any = None, error: Any = schemas.Error) -> dict[str, Any]:
    """What FastAPI's ``openapi_extra`` is to say of a route.

    Args:
        answer: a class of ``schemas``; str: a text.
        bodies: names of the schemas that its body may have.
        chunk: a class of ``schemas``: an event's data, if the answer may be streamed.
        error: a class of ``schemas``.
    """
    content: dict[str, Any] = {"application/json": {"schema": _of(answer)}}
    if answer is str:
        content = {"text/plain": {"schema": _TEXT}}
    if chunk is not None:
        data = {"contentMediaType": "application/json", "contentSchema": _either(_of(chunk), _of(error))}
        content["text/event-stream"] = {"itemSchema": _object(["data"], data=_either({"const": "[DONE]"}, data))}
    statuses = _ERRORS + (_ERRORS_OF_BODIES if bodies else ())
    errors = {str(status): {"description": KINDS[status][1] or KINDS[status][0]} for status in sorted(statuses)}
    for one in errors.values():
        one["content"] = {"application/json": {"schema": _of(error)}}  # type: ignore[assignment]
    found: dict[str, Any] = {"responses": {"200": {"content": content}, **errors}}
    if bodies:
        schema = _either(*({"$ref": _REF + name} for name in bodies)) if bodies[1:] else {"$ref": _REF + bodies[0]}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return found


class DescribedApp(FastAPI):
    """FastAPI whose document has the schemas that ``described`` names. ``names``: of the model and its adapters."""

    def __init__(self, names: Callable[[], Sequence[str]], **options: Any) -> None:
        super().__init__(**options)
        self._names = names

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)  # FastAPI's own, which no route gives
            document["components"] = {"schemas": _components(self._names())}
        return self.openapi_schema or {}


def _of(answer: Any) -> Schema:
    return {"$ref": _REF + answer.__name__}


def _components(names: Sequence[str]) -> dict[str, Schema]:
    classes = [
        each for each in vars(schemas).values() if isinstance(each, type) and issubclass(each, schemas.Described)
    ]
    _, answers = msgspec.json.schema_components(classes, ref_template=_REF + "{name}")
    return answers | {name: _body(name, names) for name in _BODIES}


def _body(name: str, names: Sequence[str]) -> Schema:
    fields, required, own = _BODIES[name]
    known = {**_SCHEMAS, "model": {"enum": list(names)}, **own}
    hints = typing.get_type_hints(SamplingParams)
    properties = {field: known.get(field) or _parameter(field, hints) for field in fields}
    for field in properties.keys() - set(required):  # a null is as no field
        properties[field] = _either(properties[field], {"type": "null"})
    return _object(required, is_closed=True, **properties)


_KINDS = {bool: "boolean", str: "string", dict: "object"}


def _parameter(name: str, hints: Mapping[str, Any]) -> Schema:
    """The schema of a sampling parameter; empty where it may be anything."""
    if name in INTEGERS:
        return _integer(*INTEGERS[name])
    if name in NUMBERS:
        low, high = NUMBERS[name]
        return {"type": "number", "minimum": low, "maximum": high}
    hint = hints.get(name, Any)
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    found = [_KINDS[base] for kind in kinds if (base := typing.get_origin(kind) or kind) in _KINDS]
    return {"type": found[0]} if found else _ANY
