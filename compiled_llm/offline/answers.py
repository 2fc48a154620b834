"""Results and errors -> lines of the output file, each in the format of its row."""

import dataclasses
import json
import re
import time
from collections.abc import Mapping
from typing import Any

from compiled_llm.api.outputs import CompletionOutput, Logprob, RequestOutput
from compiled_llm.offline.rows import Row
from compiled_llm.offline.token_texts import TokenTexts

# How a line begins, so that its row is known without reading all of it.
_LINE_START = re.compile(rb'\{"index": (\d{1,18})[,}]|\{"id": "batch_req_(\d{1,18})",')
LONGEST_START = 40  # bytes that ``index_of`` needs
_ERROR = b'"error": {"message": '
_PART = "bytes:"  # of a completion's token that is no whole characters, as OpenAI's completions write it
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def answer_line(row: Row, output: RequestOutput, texts: TokenTexts) -> bytes:
    """The line of a result, with its newline.

    Args:
        texts: of the engine that made ``output``.
    """
    if row.format == "row":
        return _line(_own_answer(row, output))
    body = _completion_body(row, output, texts) if row.format == "completion" else _chat_body(row, output, texts)
    return _line(_batch_line(row, 200, body))


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
    body = {"error": {**error, "param": None, "code": None}}
    return _line(_batch_line(row, 400 if is_users else 500, body))


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


# -- Our own rows


def _own_answer(row: Row, output: RequestOutput) -> dict[str, Any]:
    names = {} if row.custom_id is None else {"custom_id": row.custom_id}
    answer = {"index": row.index, **names, "prompt": output.prompt, **_fields_of(output.outputs[0])}
    if len(output.outputs) > 1:
        answer["outputs"] = [_fields_of(completion) for completion in output.outputs]
    return answer | _of_prompt(output)


def _of_prompt(output: RequestOutput) -> dict[str, Any]:
    """The log-probabilities of the prompt's tokens, by name, where they were asked for."""
    if output.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": [logprobs and _readable(logprobs) for logprobs in output.prompt_logprobs]}


def _fields_of(completion: CompletionOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        fields["cumulative_logprob"] = completion.cumulative_logprob
        fields["logprobs"] = [_readable(logprobs) for logprobs in completion.logprobs]
    return fields


def _readable(logprobs: Mapping[int, Logprob]) -> dict[int, dict[str, Any]]:
    return {token_id: dataclasses.asdict(logprob) for token_id, logprob in logprobs.items()}


# -- OpenAI's batches: https://platform.openai.com/docs/api-reference/batch/request-output
# Log-probabilities of a prompt stand where vLLM's server has them: in the body of a chat, in a completion's choices.


def _batch_line(row: Row, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{row.index}", "body": body}
    return {"id": f"batch_req_{row.index}", "custom_id": row.custom_id, "response": response, "error": None}


def _chat_body(row: Row, output: RequestOutput, texts: TokenTexts) -> dict[str, Any]:
    choices = []
    for completion in output.outputs:
        logprobs = None
        if completion.logprobs is not None:
            pairs = zip(completion.token_ids, completion.logprobs, strict=True)
            content = [_chat_logprob(row, token_id, found, texts) for token_id, found in pairs]
            logprobs = {"content": content, "refusal": None}
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        choices.append(
            {
                "index": completion.index,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": completion.finish_reason,
            }
        )
    return _body(row, output, "chatcmpl", "chat.completion", choices) | _of_prompt(output)


def _chat_logprob(row: Row, token_id: int, found: Mapping[int, Logprob], texts: TokenTexts) -> dict[str, Any]:
    """The token that was chosen, and as many of the most likely ones as the row asks for, most likely first."""
    most = row.sampling.get("logprobs", 0)
    most_likely = sorted((other for other in found if found[other].rank <= most), key=lambda other: found[other].rank)
    top = [_token(other, found[other], texts) for other in most_likely]
    return {**_token(token_id, found[token_id], texts), "top_logprobs": top}


def _token(token_id: int, logprob: Logprob, texts: TokenTexts) -> dict[str, Any]:
    data = texts.bytes_of(token_id)
    return {
        "token": texts.text_of(token_id),
        "logprob": logprob.logprob,
        "bytes": None if data is None else list(data),
    }


def _completion_body(row: Row, output: RequestOutput, texts: TokenTexts) -> dict[str, Any]:
    choices = [
        {
            "index": completion.index,
            "text": completion.text,
            "logprobs": _completion_logprobs(row, output, completion, texts),
            "finish_reason": completion.finish_reason,
            **_of_prompt(output),
        }
        for completion in output.outputs
    ]
    return _body(row, output, "cmpl", "text_completion", choices)


def _completion_logprobs(
    row: Row, output: RequestOutput, completion: CompletionOutput, texts: TokenTexts
) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    token_ids = completion.token_ids
    chosen = [found[token_id] for token_id, found in zip(token_ids, completion.logprobs, strict=True)]
    skips = row.sampling.get("skip_special_tokens")
    offsets = texts.offsets_of(output.prompt_token_ids, token_ids, skips)
    return {
        "tokens": [texts.text_of(token_id, _PART) for token_id in token_ids],
        "token_logprobs": [logprob.logprob for logprob in chosen],
        "top_logprobs": [_by_text(found, texts) for found in completion.logprobs],
        "text_offset": [min(offset, len(completion.text)) for offset in offsets],  # a stop string is cut off
    }


def _by_text(found: Mapping[int, Logprob], texts: TokenTexts) -> dict[str, float]:
    """Log-probabilities by the texts of tokens. The chosen one comes first; a later one of equal text has a name."""
    named: dict[str, float] = {}
    for token_id, logprob in found.items():
        text = texts.text_of(token_id, _PART)
        named[texts.name_of(token_id) if text in named else text] = logprob.logprob
    return named


def _body(row: Row, output: RequestOutput, prefix: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    num_prompt = len(output.prompt_token_ids)
    num_output = sum(len(completion.token_ids) for completion in output.outputs)
    return {
        "id": f"{prefix}-{row.index}",
        "object": kind,
        "created": int(time.time()),
        "model": row.model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        },
    }
