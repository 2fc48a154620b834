"""The events of a stream that answers with a response, and that response, as OpenAI defines them: values of JSON.

https://platform.openai.com/docs/api-reference/responses-streaming. Both are made of the same parts of the answer.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compiled_llm.openai.response_tools import ToolName
from compiled_llm.parsing.events import ArgumentsDelta, CallBegins, CallEnds, ContentDelta, Event, ReasoningDelta

_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # status -> OpenAI's code of an error in a response
# Type of an item -> how its ids begin.
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class ResponseEvents:
    """Makes events of the parts of one answer.

    Args:
        response_id: "resp_" and more, of which ids of items are made.
        repeated: fields of the response that repeat what was asked for.
        tools: the name that the model has of a tool -> what the client calls it.

    Attributes:
        answer: the response as far as it is known; whole after ``finish``.
    """

    def __init__(
        self,
        response_id: str,
        model: str,
        num_prompt_tokens: int,
        repeated: Mapping[str, Any],
        tools: Mapping[str, ToolName],
    ) -> None:
        self._num_prompt_tokens, self._tools, self._num_events = num_prompt_tokens, tools, 0
        self._num_cached_tokens = 0
        self._item: dict[str, Any] | None = None  # that is open, the last one of the output
        self._arguments = ""  # of the call that is open
        self.answer: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "service_tier": "default",
            "truncation": "disabled",
            "usage": None,
            **repeated,
        }

    def start(self, num_cached_tokens: int) -> Iterator[dict[str, Any]]:
        self._num_cached_tokens = num_cached_tokens
        yield self._event("response.created", response={**self.answer, "output": []})
        yield self._event("response.in_progress", response={**self.answer, "output": []})

    def take(self, event: Event, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
        """The next part. ``logprobs``: of tokens up to it, for content."""
        if isinstance(event, ContentDelta):
            if event.text or self._is_open("message"):
                yield from self._content(event.text, list(logprobs))
        elif isinstance(event, ReasoningDelta):
            if not self._is_open("reasoning"):
                yield from self._open("reasoning", summary=[], content=[{"type": "reasoning_text", "text": ""}])
            assert self._item is not None
            self._item["content"][0]["text"] += event.text
            yield self._of_item("response.reasoning_text.delta", content_index=0, delta=event.text)
        elif isinstance(event, CallBegins):
            yield from self._begin_call(event)
        elif isinstance(event, ArgumentsDelta):
            assert self._item is not None
            self._arguments += event.text
            if self._item["type"] == "function_call":
                yield self._of_item("response.function_call_arguments.delta", delta=event.text)
        else:
            assert isinstance(event, CallEnds)
            yield from self._close("completed")

    def finish(
        self, finish_reason: str, stop_reason: int | str | None, num_output_tokens: int, num_reasoning_tokens: int
    ) -> Iterator[dict[str, Any]]:
        """The answer has ended."""
        status = "incomplete" if finish_reason == "length" else "completed"
        yield from self._close(status)
        self.answer |= {
            "status": status,
            "completed_at": int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": self._num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": self._num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": num_output_tokens,
                "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
                "total_tokens": self._num_prompt_tokens + num_output_tokens,
            },
        }
        yield self._event(f"response.{status}", response=self.answer)

    def fail(self, status: int, message: str) -> dict[str, Any]:
        """The event that ends a stream with an error, or because it was cancelled."""
        if self.answer["status"] != "cancelled":
            error = {"code": _CODES.get(status, "server_error"), "message": message}
            self.answer |= {"status": "failed", "error": error}
        return self._event("response.failed", response=self.answer)

    # -- Items

    def _content(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        if not self._is_open("message"):
            yield from self._open("message", role="assistant", content=[])
            assert self._item is not None
            part: dict[str, Any] = {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}
            self._item["content"].append(part)
            yield self._of_item("response.content_part.added", content_index=0, part={**part, "logprobs": []})
        assert self._item is not None
        part = self._item["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _begin_call(self, event: CallBegins) -> Iterator[dict[str, Any]]:
        tool = self._tools.get(event.name, ToolName(event.name))
        fields: dict[str, Any] = {"call_id": event.id, "name": tool.name}
        if tool.namespace is not None:
            fields["namespace"] = tool.namespace
        if tool.is_custom:
            yield from self._open("custom_tool_call", **fields, input="")
        else:
            yield from self._open("function_call", **fields, arguments="")

    def _is_open(self, kind: str) -> bool:
        return self._item is not None and self._item["type"] == kind

    def _open(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        yield from self._close("completed")
        output = self.answer["output"]
        item_id = f"{_PREFIXES[kind]}_{self.answer['id'].partition('_')[2]}{len(output):02x}"
        self._item, self._arguments = {"id": item_id, "type": kind, "status": "in_progress", **fields}, ""
        output.append(self._item)
        empty: dict[str, Any] = {"content": []} if "content" in fields else {}
        yield self._event("response.output_item.added", output_index=len(output) - 1, item={**self._item, **empty})

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """The open item, if there is one, has ended."""
        item = self._item
        if item is None:
            return
        if item["type"] == "message":
            (part,) = item["content"]
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._of_item("response.output_text.done", content_index=0, **done)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        elif item["type"] == "reasoning":
            yield self._of_item("response.reasoning_text.done", content_index=0, text=item["content"][0]["text"])
        elif item["type"] == "function_call":
            item["arguments"] = self._arguments
            done = {"name": item["name"], "arguments": self._arguments}
            yield self._of_item("response.function_call_arguments.done", **done)
        else:
            item["input"] = _input(self._arguments)
            yield self._of_item("response.custom_tool_call_input.delta", delta=item["input"])
            yield self._of_item("response.custom_tool_call_input.done", input=item["input"])
        item["status"] = status
        yield self._event("response.output_item.done", output_index=len(self.answer["output"]) - 1, item=dict(item))
        self._item = None

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of the open item."""
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=len(self.answer["output"]) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}


def _input(arguments: str) -> str:
    """The text that a custom tool gets. Arguments that were cut off stand as they are."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return arguments
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
