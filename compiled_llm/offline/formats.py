"""The formats of rows and of their answers: our own here, that of OpenAI's batches in openai_batch.py.

An object of JSON becomes a ``Row``; a result or an error becomes a line of the output file, in the format of its row.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from compiled_llm.api.argument_checks import integer
from compiled_llm.api.names import name_hint
from compiled_llm.api.outputs import CompletionOutput, RequestOutput
from compiled_llm.api.readable import shown
from compiled_llm.offline.openai_batch import OPENAI_KEYS, openai_answer, openai_error, openai_fields
from compiled_llm.offline.rows import Row, check_custom_id
from compiled_llm.openai.answers import TokenTexts, prompt_logprobs, readable
from compiled_llm.openai.requests import CHAT_OPTIONS, chat_options, check_json, check_messages, checked_sampling

_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_OWN_KEYS = (*_PROMPTS, *CHAT_OPTIONS, "cache_salt", "priority", "custom_id", "sampling_params", "lora")
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
    if values.get("lora") is not None:
        if not isinstance(values["lora"], str):
            raise ValueError(f"lora must be the name of an adapter, given {shown(values['lora'])}")
        fields["lora"] = values["lora"]
    if values.get("sampling_params") is not None:
        fields["sampling"] = checked_sampling(values["sampling_params"])
        if "output_kind" in fields["sampling"]:
            raise ValueError("output_kind must be left out of a row: an offline run writes whole results")
    options = [key for key in CHAT_OPTIONS if values.get(key) is not None]
    salt = {} if values.get("cache_salt") is None else {"cache_salt": values["cache_salt"]}
    if given[0] == "messages":
        if salt:
            raise ValueError("cache_salt goes with prompt and prompt_token_ids, given with messages")
        return {**fields, "messages": check_messages(values["messages"]), "chat_options": chat_options(values)}
    if options:
        raise ValueError(f"{', '.join(options)} must go with messages, given with {given[0]}")
    return {**fields, "prompt": {given[0]: values[given[0]], **salt}}


# -- Answers


# How a line begins, so that its row is known without reading all of it.
_LINE_START = re.compile(rb'\{"index": (\d{1,18})[,}]|\{"id": "batch_req_(\d{1,18})",')
LONGEST_START = 40  # bytes that ``index_of`` needs
_ERROR = b'"error": {"message": '
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def answer_line(row: Row, output: RequestOutput, texts: TokenTexts) -> bytes:
    """The line of a result, with its newline.

    Args:
        texts: of the engine that made ``output``.
    """
    return _line(_own_answer(row, output) if row.format == "row" else openai_answer(row, output, texts))


def error_line(row: Row, message: str, *, is_users: bool) -> bytes:
    """The line of a row without a result, with its newline.

    Args:
        is_users: the row cannot be served as it is; else serving it failed.
    """
    kind = "invalid_request_error" if is_users else "server_error"
    error = {"message": message, "type": kind}
    if row.format == "row":
        names = {} if row.custom_id is None else {"custom_id": row.custom_id}
        return _line({"index": row.index, **names, "error": error})
    return _line(openai_error(row, error, is_users=is_users))


def index_of(line: bytes) -> int:
    """The row that a line belongs to. ``ValueError`` if this module does not make such lines."""
    found = _LINE_START.match(line[:LONGEST_START])
    if found is None:
        raise ValueError(f"a line must begin with the number of its row, given {line[:LONGEST_START]!r}")
    return int(found[1] or found[2])


def is_error(line: bytes) -> bool:
    """Whether a whole line of this module is that of an error."""
    if _ERROR not in line:
        return False
    row = json.loads(line)
    response = row.get("response")
    return response.get("status_code") != 200 if isinstance(response, dict) else "error" in row


def _line(values: Mapping[str, Any]) -> bytes:
    # Halves of surrogate pairs, which JSON can spell and UTF-8 cannot, are spelled so again.
    text = _ENCODER.encode(values)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(values).encode() + b"\n"


def _own_answer(row: Row, output: RequestOutput) -> dict[str, Any]:
    names = {} if row.custom_id is None else {"custom_id": row.custom_id}
    answer = {"index": row.index, **names, "prompt": output.prompt, **_fields_of(output.outputs[0])}
    if len(output.outputs) > 1:
        answer["outputs"] = [_fields_of(completion) for completion in output.outputs]
    return answer | prompt_logprobs(output.prompt_logprobs)


def _fields_of(completion: CompletionOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        fields["cumulative_logprob"] = completion.cumulative_logprob
        fields["logprobs"] = [readable(logprobs) for logprobs in completion.logprobs]
    return fields
