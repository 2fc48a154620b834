"""OpenAI's batch format: rows with ``custom_id``, ``method``, ``url`` and ``body``, and the lines of their answers.

https://platform.openai.com/docs/api-reference/batch/request-input; ``body`` has the fields of
chat completions or of completions. What this engine cannot do is refused by name. Sampling parameters that only vLLM's
server knows are taken too.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from compiled_llm.api.argument_checks import integer
from compiled_llm.api.outputs import CompletionOutput, Logprob, RequestOutput
from compiled_llm.api.readable import shown
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.offline.rows import CHAT_OPTIONS, Row, chat_options, check_json, check_messages, checked_sampling
from compiled_llm.text.output_text import OutputText
from compiled_llm.text.tokenizer import TokenBytes, Tokenizer

OPENAI_KEYS = {"body", "url", "method"}  # any of them tells the format
_URLS = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}

# Fields of either kind of body that are sampling parameters of the same name.
_SAMPLING = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name not in ("logprobs", "detokenize", "output_kind")
)
# Fields that change nothing in a batch: names of users, of the account's plan, and the like.
_WITHOUT_EFFECT = {
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("parallel_tool_calls", "request_id"),
}
# Fields of a body of which only the default is served: the values that mean it.
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
    used = {*_SAMPLING, *_WITHOUT_EFFECT, *_ONLY, "priority", "logprobs"}
    fields: dict[str, Any] = {"format": kind, "model": _model(body)}
    sampling = {name: body[name] for name in _SAMPLING if name in body}
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


# -- Answers: https://platform.openai.com/docs/api-reference/batch/request-output
# Log-probabilities of a prompt stand where vLLM's server has them: in the body of a chat, in a completion's choices.


_PART = "bytes:"  # of a completion's token that is no whole characters, as OpenAI's completions write it


class TokenTexts:
    """Tokens as OpenAI's answers have them: their bytes, their text where that is whole characters, their offsets.

    Args:
        tokenizer: None: the model has none, and tokens have names such as "token_id:7".
        skip_special_tokens: of the run's sampling parameters.
    """

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._bytes = None if tokenizer is None else TokenBytes(tokenizer)

    def bytes_of(self, token_id: int) -> bytes | None:
        return None if self._bytes is None else self._bytes.of(token_id)

    def text_of(self, token_id: int, mark: str = "") -> str:
        r"""The token as text. Bytes that are no whole characters are written as ``\xe4``, after ``mark``."""
        data = self.bytes_of(token_id)
        if data is None:
            return self.name_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return mark + data.decode("ascii", "backslashreplace")

    def name_of(self, token_id: int) -> str:
        """Another name of the token, which no other one has."""
        return f"token_id:{token_id}"

    def offsets_of(
        self, prompt_token_ids: Sequence[int], token_ids: Sequence[int], skip_special_tokens: bool | None = None
    ) -> list[int]:
        """For each token the place in the output's text of the character that it begins with, or is a part of.

        Args:
            skip_special_tokens: of the row; None: the run's.
        """
        if self._tokenizer is None:
            return [0] * len(token_ids)
        skips = self._skip_special_tokens if skip_special_tokens is None else skip_special_tokens
        text = OutputText(self._tokenizer, list(prompt_token_ids), SamplingParams(skip_special_tokens=skips))
        offsets, length = [], 0
        for token_id in token_ids:
            offsets.append(length)
            text.append(token_id)
            length += len(text.take(finished=False))
        return offsets


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
    return _body(row, output, "chatcmpl", "chat.completion", choices) | prompt_logprobs(output)


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
            **prompt_logprobs(output),
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


def prompt_logprobs(output: RequestOutput) -> dict[str, Any]:
    """The log-probabilities of the prompt's tokens, by name, where they were asked for."""
    if output.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": [logprobs and readable(logprobs) for logprobs in output.prompt_logprobs]}


def readable(logprobs: Mapping[int, Logprob]) -> dict[int, dict[str, Any]]:
    """Log-probabilities of one place, by token id, as values of JSON."""
    return {token_id: dataclasses.asdict(logprob) for token_id, logprob in logprobs.items()}
