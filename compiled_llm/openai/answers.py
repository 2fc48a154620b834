"""Parts of the answers to completions and chats, as OpenAI and vLLM define them, as values of JSON.

Log-probabilities of a prompt stand where vLLM's server has them: in the body of a chat, in a completion's choices.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from compiled_llm.api.outputs import Logprob
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.parsing.events import ArgumentsDelta, CallBegins, ContentDelta, Event, ReasoningDelta
from compiled_llm.text.output_text import OutputText
from compiled_llm.text.tokenizer import TokenBytes, Tokenizer

_PART = "bytes:"  # of a completion's token that is no whole characters, as OpenAI's completions write it
LEAST = -9999.0  # stands for minus infinity, which JSON lacks


class TokenTexts:
    """Tokens as OpenAI's answers have them: their bytes, their text where that is whole characters, their offsets.

    Args:
        tokenizer: None: the model has none, and tokens have names such as "token_id:7".
        skip_special_tokens: where a request does not say.
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

    def offsets(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool | None = None) -> "TextOffsets":
        """Where the tokens of an output begin in its text.

        Args:
            skip_special_tokens: of the request; None: as by default.
        """
        skips = self._skip_special_tokens if skip_special_tokens is None else skip_special_tokens
        return TextOffsets(self._tokenizer, prompt_token_ids, skips)


class TextOffsets:
    """For each token of an output, as they come, the place in its text of the character that it begins or is a part of.

    Without a tokenizer there is no text, and each place is 0.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._text: OutputText | None = None
        if tokenizer is not None:
            params = SamplingParams(skip_special_tokens=skip_special_tokens)
            self._text = OutputText(tokenizer, list(prompt_token_ids), params)
        self._length = 0

    def next(self, token_ids: Iterable[int]) -> list[int]:
        """Of the tokens that come next."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._length)
            if self._text is not None:
                self._text.append(token_id)
                self._length += len(self._text.take(finished=False))
        return offsets


def chat_delta(events: Iterable[Event]) -> dict[str, Any]:
    """What is new of a message. Its reasoning has the older and the newer of vLLM's names."""
    content, reasoning = "", ""
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, ContentDelta):
            content += event.text
        elif isinstance(event, ReasoningDelta):
            reasoning += event.text
        elif isinstance(event, CallBegins):
            function = {"name": event.name, "arguments": ""}
            calls[event.index] = {"index": event.index, "id": event.id, "type": "function", "function": function}
        elif isinstance(event, ArgumentsDelta):
            call = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += event.text
    delta: dict[str, Any] = {"content": content} if content or not (reasoning or calls) else {}
    if reasoning:
        delta |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def chat_message(events: Iterable[Event]) -> dict[str, Any]:
    """A whole message. Beside calls its content is null, unless there is some."""
    delta = chat_delta(events)
    for call in delta.get("tool_calls", ()):
        del call["index"]
    content = delta.pop("content", None if "tool_calls" in delta else "")
    return {"role": "assistant", "content": content, **delta}


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]], most: int, texts: TokenTexts
) -> dict[str, Any]:
    """Each token that was chosen, and as many of the most likely ones as ``most``, most likely first."""
    content = []
    for token_id, found in zip(token_ids, logprobs, strict=True):
        likely = sorted((other for other in found if found[other].rank <= most), key=lambda other: found[other].rank)
        top = [_token(other, found[other], texts) for other in likely]
        content.append({**_token(token_id, found[token_id], texts), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _token(token_id: int, logprob: Logprob, texts: TokenTexts) -> dict[str, Any]:
    data = texts.bytes_of(token_id)
    return {
        "token": texts.text_of(token_id),
        "logprob": max(logprob.logprob, LEAST),
        "bytes": None if data is None else list(data),
    }


def completion_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob] | None], offsets: TextOffsets, texts: TokenTexts
) -> dict[str, Any]:
    """Four lists, with an item for each token. ``logprobs``: None for the first token of a prompt."""
    pairs = list(zip(token_ids, logprobs, strict=True))
    return {
        "tokens": [texts.text_of(token_id, _PART) for token_id in token_ids],
        "token_logprobs": [found and max(found[token_id].logprob, LEAST) for token_id, found in pairs],
        "top_logprobs": [found and _by_text(found, texts) for found in logprobs],
        "text_offset": offsets.next(token_ids),
    }


def _by_text(found: Mapping[int, Logprob], texts: TokenTexts) -> dict[str, float]:
    """Log-probabilities by the texts of tokens. The chosen one comes first; a later one of equal text has a name."""
    named: dict[str, float] = {}
    for token_id, logprob in found.items():
        text = texts.text_of(token_id, _PART)
        named[texts.name_of(token_id) if text in named else text] = max(logprob.logprob, LEAST)
    return named


def prompt_logprobs(logprobs: Sequence[Mapping[int, Logprob] | None] | None) -> dict[str, Any]:
    """The log-probabilities of a prompt's tokens, by name, where they were asked for."""
    if logprobs is None:
        return {}
    return {"prompt_logprobs": [found and readable(found) for found in logprobs]}


def readable(logprobs: Mapping[int, Logprob]) -> dict[int, dict[str, Any]]:
    """Log-probabilities of one place, by token id, as values of JSON."""
    return {token_id: dataclasses.asdict(logprob) for token_id, logprob in logprobs.items()}


def usage(
    num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int, num_reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """How many tokens a request had. ``num_reasoning_tokens``: None: it is not known, or there is no such."""
    reasoning = {"reasoning_tokens": num_reasoning_tokens}
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        **({} if num_reasoning_tokens is None else {"completion_tokens_details": reasoning}),
    }
