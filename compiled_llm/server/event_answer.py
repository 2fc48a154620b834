"""Outputs of the engine -> the answer of a dialect whose streams are events with types: messages and responses.

Whole answers are what the events of a stream make together.
"""

from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

from compiled_llm.openai.answers import TokenTexts, chat_logprobs
from compiled_llm.parsing.events import ContentDelta, Event
from compiled_llm.server.answers import found_logprobs
from compiled_llm.server.errors import ApiError
from compiled_llm.server.messages import Output, Piece
from compiled_llm.server.service import Served


class AnswerEvents(Protocol):
    """Makes events of the parts of one answer.

    Attributes:
        answer: as far as it is known.
    """

    answer: dict[str, Any]

    def start(self, num_cached_tokens: int) -> Iterator[dict[str, Any]]:
        """The first ones."""
        ...

    def take(self, event: Event, logprobs: list[dict[str, Any]] | None = None) -> Iterator[dict[str, Any]]:
        """Of the next part. ``logprobs``: of its tokens, as a chat's answer has them."""
        ...

    def finish(
        self, finish_reason: str, stop_reason: int | str | None, num_output_tokens: int, num_reasoning_tokens: int
    ) -> Iterator[dict[str, Any]]:
        """The last ones."""
        ...

    def fail(self, status: int, message: str) -> dict[str, Any]:
        """The last one, instead of the others."""
        ...


class EventAnswer:
    """The answer to a request for one completion of a chat."""

    last_event = b""

    def __init__(self, served: Served, events: AnswerEvents, texts: TokenTexts) -> None:
        self._outputs, self._params, self._events, self._texts = served.outputs, served.params, events, texts
        self._num_tokens = 0

    async def whole(self) -> dict[str, Any]:
        async for _ in self.chunks():
            pass
        return self._events.answer

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        has_started = False
        async for output in self._outputs:
            if not has_started:
                has_started = True
                for chunk in self._events.start(output.num_cached_tokens):
                    yield chunk
            for chunk in self._of_output(output):
                yield chunk

    def failure(self, error: ApiError) -> dict[str, Any]:
        return self._events.fail(error.status, error.message)

    def _of_output(self, output: Output) -> Iterator[dict[str, Any]]:
        for piece in output.pieces:
            self._num_tokens += len(piece.token_ids)
            if piece.text:
                yield from self._events.take(ContentDelta(piece.text), self._logprobs(piece))
            if piece.finish_reason is not None:
                yield from self._events.finish(piece.finish_reason, piece.stop_reason, self._num_tokens, 0)

    def _logprobs(self, piece: Piece) -> list[dict[str, Any]] | None:
        if piece.logprobs is None:
            return None
        rows = [found_logprobs(row) for row in piece.logprobs]
        return chat_logprobs(piece.token_ids, rows, self._params.logprobs or 0, self._texts)["content"]
