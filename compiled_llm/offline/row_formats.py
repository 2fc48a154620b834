"""JSON objects of the input -> rows. Two formats: our own, and that of OpenAI's batches (openai_batch.py)."""

import json
from collections.abc import Mapping
from typing import Any

from compiled_llm.api.argument_checks import integer
from compiled_llm.api.error_texts import shown
from compiled_llm.api.names import name_hint
from compiled_llm.offline.json_values import check_json
from compiled_llm.offline.openai_batch import OPENAI_KEYS, openai_fields
from compiled_llm.offline.row_checks import (
    CHAT_OPTIONS,
    chat_options,
    check_custom_id,
    check_messages,
    checked_sampling,
)
from compiled_llm.offline.rows import Row

_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_OWN_KEYS = (*_PROMPTS, *CHAT_OPTIONS, "cache_salt", "priority", "custom_id", "sampling_params")
ROW_KEYS = frozenset((*_OWN_KEYS, *OPENAI_KEYS))  # of both formats
_ELSEWHERE = {
    **dict.fromkeys(
        ("image", "images", "image_url", "multi_modal_data", "audio", "video"),
        "images, audio and video are not served: leave them out",
    ),
    **dict.fromkeys(
        ("max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "logprobs", "structured_outputs"),
        'put it into "sampling_params": {...}',
    ),
    **dict.fromkeys(("text", "input", "inputs", "question", "instruction"), "give 'prompt'"),
    **dict.fromkeys(("conversation", "conversations"), "give 'messages'"),
    **dict.fromkeys(("token_ids", "input_ids"), "give 'prompt_token_ids'"),
}


def row_of_text(index: int, name: str, text: str) -> Row:
    """The row of a line of JSON. A line that cannot be served is a row with an ``error``."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Row(index, name, error=f"not JSON: {error}")
    return row_of_object(index, name, values)


def row_of_object(index: int, name: str, values: Any) -> Row:
    """The row of a JSON object. What cannot be served is a row with an ``error``."""
    custom_id, row_format = None, "row"
    try:
        if not isinstance(values, dict):
            raise ValueError(f"must be a JSON object, given {shown(values)}")
        custom_id = check_custom_id(values.get("custom_id"))
        if values.keys() & OPENAI_KEYS:
            body = values.get("body")
            row_format = "chat" if isinstance(body, dict) and "messages" in body else "completion"
            return Row(index, name, custom_id=custom_id, **openai_fields(values))
        return Row(index, name, custom_id=custom_id, **_own_fields(values))
    except ValueError as error:
        return Row(index, name, custom_id=custom_id, format=row_format, error=str(error))  # type: ignore[arg-type]


def _own_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the ``Row`` of an object in our own format. ``ValueError`` with what is wrong."""
    for key in values:
        if key not in _OWN_KEYS:
            hint = name_hint(key, _OWN_KEYS, _ELSEWHERE)
            raise ValueError(f"unknown key: {key:.100}{hint and f' ({hint})'}; known are {', '.join(_OWN_KEYS)}")
    check_json("", values)
    given = [key for key in _PROMPTS if values.get(key) is not None]
    if len(given) != 1:
        raise ValueError(f"must have exactly one of {', '.join(_PROMPTS)}, given {', '.join(given) or 'none'}")
    fields: dict[str, Any] = {}
    priority = values.get("priority", 0)
    if priority != 0:
        integer("priority", priority, -(2**31), 2**31 - 1)
        fields["priority"] = priority
    if values.get("sampling_params") is not None:
        fields["sampling"] = checked_sampling(values["sampling_params"])
    options = [key for key in CHAT_OPTIONS if values.get(key) is not None]
    salt = {} if values.get("cache_salt") is None else {"cache_salt": values["cache_salt"]}
    if given[0] == "messages":
        if salt:
            raise ValueError("cache_salt goes with prompt and prompt_token_ids, given with messages")
        return {**fields, "messages": check_messages(values["messages"]), "chat_options": chat_options(values)}
    if options:
        raise ValueError(f"{', '.join(options)} must go with messages, given with {given[0]}")
    return {**fields, "prompt": {given[0]: values[given[0]], **salt}}
