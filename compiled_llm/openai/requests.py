"""The body of a request for a completion or a chat, as OpenAI and vLLM define it: read, and checked by itself.

https://platform.openai.com/docs/api-reference/chat and .../completions. Every sampling parameter is a field under its
own name. A field that nobody knows is refused by name, and so is one that this engine cannot serve.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from compiled_llm.api.argument_checks import integer
from compiled_llm.api.names import SAMPLING_PARAMETERS, name_hint
from compiled_llm.api.readable import shown
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.openai.tools import ToolUse, read_tool_use
from compiled_llm.text.prompts import MAX_SALT_CHARACTERS

Kind = Literal["chat", "completion"]  # of a body that ``read_request`` reads


@dataclasses.dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """What a body asks for.

    Attributes:
        model: what the body calls the model.
        prompts: of a completion: each ``{"prompt": str}`` or ``{"prompt_token_ids": [...]}``; of a score: each a
            ``ScoredPrompt``.
        messages: of a chat.
        chat_options: of a chat: options of ``CompiledEngine.encode_chat``.
        template_hints: of a chat: variables for a chat template that has a use for them.
        ignored_tools: of a chat: types of tools that the provider would run, of which the model is not told.
        tool_use: of a chat: its tools, and what the answer may do with them.
        sampling: the sampling parameters that it gives; each was checked.
        cache_salt: as the engine takes it with a prompt.
        stream: answer with an event for each step.
        include_usage: the last event of a stream counts tokens; ``continuous_usage``: every event does.
        echo: of a completion: its text begins with the prompt; ``only_echo``: and has no more (max_tokens is 0).
        return_token_ids: the answer has token ids beside the text.
        kv_transfer_params: vLLM's: where KV blocks come from, or that they are to be taken.
    """

    kind: Literal["chat", "completion", "score"]
    model: str | None
    prompts: Sequence[Any] = ()
    messages: Sequence[Any] = ()
    chat_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    template_hints: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ignored_tools: Sequence[str] = ()
    tool_use: ToolUse = dataclasses.field(default_factory=ToolUse)
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    priority: int = 0
    cache_salt: str = ""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    only_echo: bool = False
    return_token_ids: bool = False
    kv_transfer_params: Mapping[str, Any] | None = None


# Fields of either kind of body that are sampling parameters of the same name.
SAMPLING_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name not in ("logprobs", "detokenize", "output_kind")
)
_EFFORT = "reasoning_effort"  # a variable of chat templates that OpenAI's API has as a field of its own
CHAT_OPTIONS = (
    *("tools", "documents", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    _EFFORT,
)
# Fields that change no token: names of users, of the account's plan, hints to caches, and the like.
WITHOUT_EFFECT = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "request_id", "verbosity", "prediction"),
)
_SERVING = (
    *("stream", "stream_options", "return_token_ids", "priority", "cache_salt", "logprobs", "best_of"),
    "kv_transfer_params",
)
# Fields of which only the default is served: the values that mean it.
ONLY: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
}
# Kind of body -> the fields that it may have.
FIELDS: Mapping[Kind, tuple[str, ...]] = {
    "completion": ("prompt", "echo", *_SERVING, *SAMPLING_FIELDS, *WITHOUT_EFFECT, *ONLY),
    "chat": (
        *("messages", "max_completion_tokens", "top_logprobs", "response_format", "tool_choice", "parallel_tool_calls"),
        *(*_SERVING, *CHAT_OPTIONS, *SAMPLING_FIELDS, *WITHOUT_EFFECT, *ONLY),
    ),
}
_ELSEWHERE = {
    **SAMPLING_PARAMETERS,
    **dict.fromkeys(("functions", "function_call"), "give tools and tool_choice"),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar"), "give response_format or structured_outputs"
    ),
    "chat_template": "the model's own is used, since a template is a program: give chat_template_kwargs",
    "enable_thinking": "give it in chat_template_kwargs",
    "echo": "only completions have it",
}
_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "images"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "videos"),
    **dict.fromkeys(("file", "input_file", "document"), "files"),
}
_MOST_DEPTH = 100  # of lists and objects; far below what Python's own functions for JSON can go down


def read_request(kind: Kind, body: Mapping[str, Any]) -> OpenAIRequest:
    """A body, as values of JSON; a null is as no field.

    Raises:
        ValueError: a field is unknown, has a value that is not allowed, or contradicts another one.
    """
    body = {name: value for name, value in body.items() if value is not None}
    sampling = {name: body[name] for name in SAMPLING_FIELDS if name in body}
    own = _chat_fields(body, sampling) if kind == "chat" else _completion_fields(body, sampling)
    _check_names(kind, body)
    options = body.get("stream_options", {})
    if not isinstance(options, Mapping) or not options.keys() <= {"include_usage", "continuous_usage_stats"}:
        allowed = "an object with include_usage and continuous_usage_stats"
        raise ValueError(f"stream_options must be {allowed}, given {shown(options)}")
    if options and not body.get("stream"):
        raise ValueError("stream_options must be left out unless stream is true")
    return OpenAIRequest(
        kind=kind,
        model=_text(body, "model"),
        priority=_priority(body.get("priority", 0)),
        cache_salt=_salt(body),
        stream=flag(body, "stream"),
        include_usage=flag(options, "include_usage") or flag(options, "continuous_usage_stats"),
        continuous_usage=flag(options, "continuous_usage_stats"),
        return_token_ids=flag(body, "return_token_ids"),
        kv_transfer_params=_transfer(body),
        **{**own, "sampling": checked_sampling(sampling)},
    )


def _transfer(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    params = body.get("kv_transfer_params")
    if params is not None and not isinstance(params, Mapping):
        raise ValueError(f"kv_transfer_params must be an object, given {shown(params)}")
    return params


def _completion_fields(body: Mapping[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    """Fields of the ``OpenAIRequest``; completes ``sampling``."""
    prompt, echo = body.get("prompt"), flag(body, "echo")
    is_several = isinstance(prompt, list) and not {str, list}.isdisjoint(map(type, prompt))
    prompts = prompt if is_several else [prompt]
    for item in prompts or ():
        if not isinstance(item, str | list):
            raise ValueError(f"prompt must be a str or a list of token ids, or a list of these, given {shown(item)}")
    if "logprobs" in body:
        sampling["logprobs"] = body["logprobs"]
        if echo:
            sampling.setdefault("prompt_logprobs", body["logprobs"])
    only_echo = echo and body.get("max_tokens") == 0
    if only_echo:
        sampling["max_tokens"] = 1  # the engine's least
    keys = ("prompt" if isinstance(item, str) else "prompt_token_ids" for item in prompts or ())
    named = [{key: item} for key, item in zip(keys, prompts or (), strict=True)]
    return {"prompts": named, "echo": echo, "only_echo": only_echo}


def _chat_fields(body: Mapping[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    """Fields of the ``OpenAIRequest``; completes ``sampling``."""
    if "messages" not in body:
        raise ValueError("messages must be given, given none")
    if "max_completion_tokens" in body:
        if body.get("max_tokens", body["max_completion_tokens"]) != body["max_completion_tokens"]:
            raise ValueError(
                "max_completion_tokens and max_tokens, its older name, must be the same, or one be left out, "
                f"given {shown(body['max_completion_tokens'])} and {shown(body['max_tokens'])}"
            )
        sampling["max_tokens"] = body["max_completion_tokens"]
    wanted, most = body.get("logprobs", False), body.get("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise ValueError(f"logprobs must be true or false in a chat, given {shown(wanted)}")
    integer("top_logprobs", most, 0, 1000)
    if most and not wanted:
        raise ValueError("top_logprobs needs logprobs to be true")
    if wanted:
        sampling["logprobs"] = most
    if "response_format" in body:
        structured = _structured_outputs(body["response_format"])
        if structured is not None and "structured_outputs" in sampling:
            raise ValueError("give response_format or structured_outputs, not both")
        sampling |= {} if structured is None else {"structured_outputs": structured}
    options, tool_use = chat_options(body), read_tool_use(body)
    if not tool_use.tools:
        options.pop("tools", None)
    return {"messages": check_messages(body["messages"]), "chat_options": options, "tool_use": tool_use}


def _check_names(kind: Kind, body: Mapping[str, Any]) -> None:
    known = FIELDS[kind]
    for name, value in body.items():
        if name not in known:
            raise ValueError(f"{name:.100} is not served: {name_hint(name, known, _ELSEWHERE) or 'leave it out'}")
        if name in ONLY and value not in ONLY[name]:
            allowed = " or ".join(map(repr, ONLY[name]))
            raise ValueError(f"{name} must be {allowed}, all that is served here, given {shown(value)}")
    n = body.get("n", 1)
    if body.get("best_of", n) != n:
        given = shown(body["best_of"])
        raise ValueError(f"best_of must be {shown(n)}, as n is, since every continuation is answered, given {given}")


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be a str, given {shown(value)}")
    return value


def _salt(body: Mapping[str, Any]) -> str:
    salt = _text(body, "cache_salt") or ""
    if len(salt) > MAX_SALT_CHARACTERS:
        raise ValueError(f"cache_salt may have {MAX_SALT_CHARACTERS} characters at most, given {len(salt)}")
    return salt


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A field that is true or false; a null is as no field."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, given {shown(value)}")
    return value


def _priority(value: Any) -> int:
    integer("priority", value, -(2**31), 2**31 - 1)
    return value


def _structured_outputs(wanted: Any) -> dict[str, Any] | None:
    """What ``response_format`` asks for. https://platform.openai.com/docs/guides/structured-outputs"""
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    schema = wanted.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, Mapping) or not isinstance(schema.get("schema"), Mapping):
        raise ValueError(
            "response_format must be an object of type 'text', 'json_object' or 'json_schema' (with "
            f"json_schema.schema), given {shown(wanted)}"
        )
    return {"json": dict(schema["schema"])}


def checked_sampling(values: Any) -> dict[str, Any]:
    """Sampling parameters. ``ValueError`` as ``SamplingParams`` raises it.

    Whether they go together with those that are not given is known where they are used. Empty stop strings, with which
    clients say that there is none, are left out.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"sampling_params must be a JSON object, given {shown(values)}")
    sampling, stop = dict(values), values.get("stop")
    if stop == "":
        sampling["stop"] = None
    elif isinstance(stop, list):
        sampling["stop"] = [text for text in stop if text != ""]
    SamplingParams(**{"max_tokens": None, **sampling})  # min_tokens is for the default of max_tokens to allow
    return sampling


def chat_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``CompiledEngine.encode_chat`` among ``values``; a null is as no key.

    Raises:
        ValueError: two of them contradict each other.
    """
    options = {key: values[key] for key in CHAT_OPTIONS if key != _EFFORT and values.get(key) is not None}
    effort = values.get(_EFFORT)
    if effort is None:
        return options
    if not isinstance(effort, str):
        raise ValueError(f"{_EFFORT} must be a str, such as 'low', given {shown(effort)}")
    variables = options.get("chat_template_kwargs", {})
    if not isinstance(variables, Mapping):
        return options  # the chat template's code says what is wrong with them
    if variables.get(_EFFORT, effort) != effort:
        raise ValueError(
            f"{_EFFORT} must be the same in chat_template_kwargs, or be given once, given {shown(effort)} and "
            f"{shown(variables[_EFFORT])}"
        )
    return {**options, "chat_template_kwargs": {**variables, _EFFORT: effort}}


def check_messages(messages: Any) -> list[Any]:
    """``ValueError`` for what is no list, and for images and the like. The chat template's code checks the rest."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"messages must be a list of one or more objects with role and content, given {shown(messages)}"
        )
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            part_type(f"messages[{number}]", part)
    return messages


def part_type(place: str, part: Any) -> str | None:
    """Of a part of a message's content. ``ValueError`` for images and the like."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        return None
    if kind in _MEDIA:
        raise ValueError(f"{_MEDIA[kind]} are not served: {place} has a part of type {kind!r}")
    return kind


def check_json(name: str, value: Any, depth: int = 0) -> None:
    """``ValueError``, with the place in ``name``, unless ``value`` and all in it are values of JSON.

    Columns of a table may hold more than those, and Python reads NaN from JSON.
    """
    if value is None or isinstance(value, str | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, given {value}")
        return
    if depth >= _MOST_DEPTH:
        raise ValueError(f"{name} must not be more than {_MOST_DEPTH} lists and objects deep")
    if isinstance(value, list):
        if not set(map(type, value)) <= {str, int}:  # most lists, and long ones, have nothing else
            for number, item in enumerate(value):
                check_json(f"{name}[{number}]", item, depth + 1)
    elif isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            check_json(f"{name}.{key:.100}" if name else f"{key:.100}", item, depth + 1)
    else:
        raise ValueError(
            f"{name} must be a value of JSON (a string, a number, true, false, null, a list or an object), given "
            f"{type(value).__name__}: {shown(value)}"
        )
