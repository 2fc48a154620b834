"""The events of a stream that answers with a message, and that message, as Anthropic defines them: values of JSON.

https://docs.anthropic.com/en/api/messages-streaming. Both are made of the same parts of the answer.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compiled_llm.anthropic.errors import error_body
from compiled_llm.parsing.events import ArgumentsDelta, CallBegins, CallEnds, ContentDelta, Event, ReasoningDelta

# Type of a block -> its first form, and the type and key of a delta to it.
_BLOCKS: Mapping[str, tuple[dict[str, Any], str, str]] = {
    "text": ({"text": ""}, "text_delta", "text"),
    "thinking": ({"thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    "tool_use": ({"input": {}}, "input_json_delta", "partial_json"),
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class MessageEvents:
    """Makes events of the parts of one answer.

    Attributes:
        answer: the message as far as it is known; whole after ``finish``.
    """

    def __init__(self, message_id: str, model: str, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._block: dict[str, Any] | None = None  # that is open, the last one of the content
        self._arguments = ""  # of the call that is open
        self.answer: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def start(self, num_cached_tokens: int) -> Iterator[dict[str, Any]]:
        """Tokens that were found in the prefix cache are counted apart from the others."""
        self.answer["usage"] = {
            "input_tokens": self._num_prompt_tokens - num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached_tokens,
            "output_tokens": 0,
        }
        yield {"type": "message_start", "message": {**self.answer, "content": []}}

    def take(self, event: Event, logprobs: Sequence[Any] = ()) -> Iterator[dict[str, Any]]:
        """The next part. A message has no log-probabilities."""
        if isinstance(event, ContentDelta):
            yield from self._delta("text", event.text)
        elif isinstance(event, ReasoningDelta):
            yield from self._delta("thinking", event.text)
        elif isinstance(event, CallBegins):
            yield from self._open("tool_use", id=event.id, name=event.name)
        elif isinstance(event, ArgumentsDelta):
            self._arguments += event.text
            yield from self._delta("tool_use", event.text)
        else:
            assert isinstance(event, CallEnds)
            yield from self._close()

    def finish(
        self, finish_reason: str, stop_reason: int | str | None, num_output_tokens: int, num_reasoning_tokens: int
    ) -> Iterator[dict[str, Any]]:
        """The answer has ended."""
        yield from self._close()
        content = self.answer["content"]
        reason, sequence = _STOP_REASONS[finish_reason], None
        if reason == "end_turn" and isinstance(stop_reason, str):
            reason, sequence = "stop_sequence", stop_reason
        elif reason == "end_turn" and any(block["type"] == "tool_use" for block in content):
            reason = "tool_use"
        self.answer["usage"] |= {"output_tokens": num_output_tokens}
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        self.answer |= delta
        yield {"type": "message_delta", "delta": delta, "usage": self.answer["usage"]}
        yield {"type": "message_stop"}

    def fail(self, status: int, message: str) -> dict[str, Any]:
        """The event that ends a stream with an error."""
        return error_body(status, message)

    # -- Blocks

    def _delta(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Of the open block, which is opened if it is of another type."""
        if self._block is None or self._block["type"] != kind:
            yield from self._open(kind)
        assert self._block is not None
        _, delta, key = _BLOCKS[kind]
        if key in self._block:
            self._block[key] += text
        yield self._event("content_block_delta", delta={"type": delta, key: text})

    def _open(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._block = {"type": kind, **fields, **_BLOCKS[kind][0]}
        self._arguments = ""
        self.answer["content"].append(self._block)
        yield self._event("content_block_start", content_block=dict(self._block))

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._block is None:
            return
        if self._block["type"] == "thinking":  # clients expect one, and send it back
            yield self._event("content_block_delta", delta={"type": "signature_delta", "signature": ""})
        elif self._block["type"] == "tool_use":
            self._block["input"] = _object(self._arguments)
        yield self._event("content_block_stop")
        self._block = None

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self.answer["content"]) - 1, **fields}


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call. Those that were cut off are no object, and stand in one as they are."""
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}
