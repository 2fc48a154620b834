"""OpenAI's batch format: rows with ``custom_id``, ``method``, ``url`` and ``body``, and the lines of their answers.

https://platform.openai.com/docs/api-reference/batch/request-input; ``body`` has the fields of chat completions or of
completions, as openai/requests.py reads them. What this engine cannot do is refused by name. Sampling parameters that
only vLLM's server knows are taken too.
"""

import time
from collections.abc import Mapping
from typing import Any

from compiled_llm.api.outputs import RequestOutput
from compiled_llm.api.readable import shown
from compiled_llm.offline.rows import Row
from compiled_llm.openai.answers import TokenTexts, chat_logprobs, completion_logprobs, prompt_logprobs, usage
from compiled_llm.openai.requests import Kind, check_json, read_request

OPENAI_KEYS = {"body", "url", "method"}  # any of them tells the format
_URLS: Mapping[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
# Fields of a body that ask for what only a server does.
_OF_A_SERVER = ("stream", "echo", "return_token_ids", "kv_transfer_params")


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
    try:
        return _fields(_URLS[url], body)
    except ValueError as error:
        raise ValueError(f"body: {error}") from error


def _fields(kind: Kind, body: Mapping[str, Any]) -> dict[str, Any]:
    for name in _OF_A_SERVER:
        if body.get(name) not in (None, False):
            raise ValueError(f"{name} must be False, all that is served here, given {shown(body[name])}")
    if body.get("tool_choice") not in (None, "auto", "none"):  # a call stays text here, and none is forced
        given = shown(body["tool_choice"])
        raise ValueError(f"tool_choice must be 'auto' or 'none', all that is served here, given {given}")
    asked = read_request(kind, body)
    fields = {"format": kind, "model": asked.model, "sampling": asked.sampling, "priority": asked.priority}
    if kind == "chat":
        if asked.cache_salt:
            raise ValueError("cache_salt is not served in a chat: leave it out")
        return {**fields, "messages": asked.messages, "chat_options": asked.chat_options}
    if len(asked.prompts) != 1 or isinstance(body["prompt"], list) != ("prompt_token_ids" in asked.prompts[0]):
        raise ValueError("prompt must be one prompt, a str or a list of token ids, given a list of prompts")
    salt = {"cache_salt": asked.cache_salt} if asked.cache_salt else {}
    return {**fields, "prompt": {**asked.prompts[0], **salt}}


# -- Answers: https://platform.openai.com/docs/api-reference/batch/request-output


def openai_answer(row: Row, output: RequestOutput, texts: TokenTexts) -> dict[str, Any]:
    """The answer to a row that has a result, as values of JSON."""
    body = _completion_body(row, output, texts) if row.format == "completion" else _chat_body(row, output, texts)
    return _answer(row, 200, body)


def openai_error(row: Row, error: Mapping[str, str], *, is_users: bool) -> dict[str, Any]:
    """The answer to a row without a result, as values of JSON.

    Args:
        error: its message and type.
        is_users: the row cannot be served as it is; else serving it failed.
    """
    return _answer(row, 400 if is_users else 500, {"error": {**error, "param": None, "code": None}})


def _answer(row: Row, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{row.index}", "body": body}
    return {"id": f"batch_req_{row.index}", "custom_id": row.custom_id, "response": response, "error": None}


def _chat_body(row: Row, output: RequestOutput, texts: TokenTexts) -> dict[str, Any]:
    choices = []
    for completion in output.outputs:
        logprobs = None
        if completion.logprobs is not None:
            most = row.sampling.get("logprobs", 0)
            logprobs = chat_logprobs(completion.token_ids, completion.logprobs, most, texts)
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        choices.append(
            {
                "index": completion.index,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": completion.finish_reason,
            }
        )
    return _body(row, output, "chatcmpl", "chat.completion", choices) | prompt_logprobs(output.prompt_logprobs)


def _completion_body(row: Row, output: RequestOutput, texts: TokenTexts) -> dict[str, Any]:
    choices = []
    for completion in output.outputs:
        logprobs = None
        if completion.logprobs is not None:
            offsets = texts.offsets(output.prompt_token_ids, row.sampling.get("skip_special_tokens"))
            logprobs = completion_logprobs(completion.token_ids, completion.logprobs, offsets, texts)
            # A stop string is cut off.
            logprobs["text_offset"] = [min(offset, len(completion.text)) for offset in logprobs["text_offset"]]
        choices.append(
            {
                "index": completion.index,
                "text": completion.text,
                "logprobs": logprobs,
                "finish_reason": completion.finish_reason,
                **prompt_logprobs(output.prompt_logprobs),
            }
        )
    return _body(row, output, "cmpl", "text_completion", choices)


def _body(row: Row, output: RequestOutput, prefix: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    num_output = sum(len(completion.token_ids) for completion in output.outputs)
    return {
        "id": f"{prefix}-{row.index}",
        "object": kind,
        "created": int(time.time()),
        "model": row.model,
        "choices": choices,
        "usage": usage(len(output.prompt_token_ids), num_output, output.num_cached_tokens),
    }
