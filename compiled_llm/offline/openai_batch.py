"""Rows in the format of OpenAI's batches: ``custom_id``, ``method``, ``url`` and ``body``.

https://platform.openai.com/docs/api-reference/batch/request-input; the fields of ``body`` are those of chat completions
and of completions. What this engine cannot do is refused by name. Sampling parameters that vLLM's server takes besides
are taken too.
"""

from collections.abc import Mapping
from typing import Any

from compiled_llm.api.argument_checks import integer
from compiled_llm.api.error_texts import shown
from compiled_llm.offline.json_values import check_json
from compiled_llm.offline.row_checks import CHAT_OPTIONS, chat_options, check_messages, checked_sampling

OPENAI_KEYS = {"body", "url", "method"}  # any of them tells the format
_URLS = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}

# Of either kind of body: name -> name of the sampling parameter.
_SAMPLING = {
    name: name
    for name in (
        *("max_tokens", "temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens"),
        *("skip_special_tokens", "include_stop_str_in_output", "bad_words", "allowed_token_ids", "prompt_logprobs"),
        *("truncate_prompt_tokens", "split_special_tokens", "structured_outputs", "logits_transforms"),
    )
}
# They change nothing in a batch: names of users, of the account's plan, and the like.
_WITHOUT_EFFECT = {
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("parallel_tool_calls", "request_id"),
}
# Those whose only value that is served is the default.
_ONLY = {
    "stream": (False,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
}


def openai_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the ``Row`` of an object in this format. ``ValueError`` with what is wrong."""
    unknown = values.keys() - OPENAI_KEYS - {"custom_id"}
    if unknown:
        raise ValueError(f"unknown key: {sorted(unknown)[0]:.100}; known are custom_id, method, url, body")
    check_json("", values)
    if values.get("custom_id") is None:
        raise ValueError("custom_id must be given beside body, given none")
    if values.get("method", "POST") != "POST":
        raise ValueError(f"method must be 'POST', given {shown(values['method'])}")
    url, body = values.get("url"), values.get("body")
    if not isinstance(url, str) or url not in _URLS:
        raise ValueError(f"url must be one of {', '.join(_URLS)}, given {shown(url)}")
    if not isinstance(body, dict):
        raise ValueError(f"body must be a JSON object, given {shown(body)}")
    body = {name: value for name, value in body.items() if value is not None}
    kind = _URLS[url]
    used = set(_SAMPLING) | _WITHOUT_EFFECT | set(_ONLY) | {"priority", "logprobs"}
    fields: dict[str, Any] = {"format": kind, "model": _model(body)}
    sampling = {ours: body[name] for name, ours in _SAMPLING.items() if name in body}
    if kind == "chat":
        used |= {"messages", "max_completion_tokens", "top_logprobs", "response_format", *CHAT_OPTIONS}
        fields |= _chat_fields(body, sampling)
    else:
        used |= {"prompt", "cache_salt"}
        fields["prompt"] = _prompt(body)
        if "logprobs" in body:
            sampling["logprobs"] = body["logprobs"]
    for name in body:
        if name not in used:
            raise ValueError(f"body: {name:.100} is not served: leave it out")
        if name in _ONLY and body[name] not in _ONLY[name]:
            raise ValueError(
                f"body: {name} must be {' or '.join(map(repr, _ONLY[name]))}, all that is served here, "
                f"given {shown(body[name])}"
            )
    if "priority" in body:
        integer("priority", body["priority"], -(2**31), 2**31 - 1)
        fields["priority"] = body["priority"]
    return {**fields, "sampling": checked_sampling(sampling)}


def _model(body: Mapping[str, Any]) -> str | None:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise ValueError(f"body: model must be a str, given {shown(model)}")
    return model


def _chat_fields(body: Mapping[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    """Fields of the ``Row``; completes ``sampling``."""
    if "messages" not in body:
        raise ValueError("body: messages must be given, given none")
    if "max_completion_tokens" in body:
        if body.get("max_tokens", body["max_completion_tokens"]) != body["max_completion_tokens"]:
            raise ValueError(
                "body: max_completion_tokens and max_tokens, its older name, must be the same, or one be left out, "
                f"given {shown(body['max_completion_tokens'])} and {shown(body['max_tokens'])}"
            )
        sampling["max_tokens"] = body["max_completion_tokens"]
    wanted, most = body.get("logprobs", False), body.get("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise ValueError(f"body: logprobs must be true or false in a chat, given {shown(wanted)}")
    if most and not wanted:
        raise ValueError("body: top_logprobs needs logprobs to be true")
    if wanted:
        integer("top_logprobs", most, 0, 1000)
        sampling["logprobs"] = most
    if "response_format" in body:
        structured = _structured_outputs(body["response_format"])
        if structured is not None and "structured_outputs" in sampling:
            raise ValueError("body: give response_format or structured_outputs, not both")
        sampling |= {} if structured is None else {"structured_outputs": structured}
    options = chat_options(body)
    if body.get("tool_choice") == "none":
        options.pop("tools", None)
    return {"messages": check_messages(body["messages"]), "chat_options": options}


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
            "body: response_format must be an object of type 'text', 'json_object' or 'json_schema' (with "
            f"json_schema.schema), given {shown(wanted)}"
        )
    return {"json": dict(schema["schema"])}


def _prompt(body: Mapping[str, Any]) -> dict[str, Any]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and any(isinstance(item, str | list) for item in prompt):
        raise ValueError("body: prompt must be one prompt, a str or a list of token ids, given a list of prompts")
    if not isinstance(prompt, str | list):
        raise ValueError(f"body: prompt must be a str or a list of token ids, given {shown(prompt)}")
    salt = {"cache_salt": body["cache_salt"]} if "cache_salt" in body else {}
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, **salt}
