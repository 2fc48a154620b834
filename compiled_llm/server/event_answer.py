"""Outputs of the engine -> the answer of a dialect whose streams are events with types: messages and responses.

Whole answers are what the events of a stream make together.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol

from compiled_llm.openai.answers import TokenTexts, chat_logprobs
from compiled_llm.parsing.events import ContentDelta, Event
from compiled_llm.server.answer_formats import AnswerReader
from compiled_llm.server.answers import found_logprobs
from compiled_llm.server.errors import ApiError
from compiled_llm.server.http import event
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

    def take(self, event: Event, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Of the next part. ``logprobs``: of tokens up to it, for content, as a chat's answer has them."""
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
    """The answer to a request for one completion of a chat.

    Args:
        ended: called with the answer when it is whole, or has failed after its start.

    Attributes:
        request_ids: the engine's.
    """

    last_event = b""

    def __init__(
        self,
        served: Served,
        events: AnswerEvents,
        texts: TokenTexts,
        ended: Callable[[dict[str, Any]], None] = lambda answer: None,
    ) -> None:
        self._outputs, self._params, self._events, self._texts = served.outputs, served.params, events, texts
        self.request_ids = [prompt.request_id for prompt in served.prompts]
        self._reader, self._num_tokens = AnswerReader(served.plan), 0
        self._untold: list[dict[str, Any]] = []  # log-probabilities of tokens that are no part of an event yet
        self.ended = ended

    @property
    def answer(self) -> dict[str, Any]:
        """As far as it is known."""
        return self._events.answer

    async def whole(self) -> dict[str, Any]:
        async for _ in self.chunks():
            pass
        return self.answer

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        has_started = False
        async for output in self._outputs:
            if not has_started:
                has_started = True
                for chunk in self._events.start(output.num_cached_tokens):
                    yield chunk
            for chunk in self._of_output(output):
                yield chunk
        self.ended(self.answer)

    def failure(self, error: ApiError) -> dict[str, Any]:
        chunk = self._events.fail(error.status, error.message)
        self.ended(self.answer)
        return chunk

    def events_of(self, output: Output) -> bytes:
        """The events of an output that is neither the first nor the last one of its request."""
        return b"".join(map(event, self._of_output(output)))

    def _of_output(self, output: Output) -> Iterator[dict[str, Any]]:
        for piece in output.pieces:
            self._num_tokens += len(piece.token_ids)
            self._untold += self._logprobs(piece)
            for part in self._reader.read(piece):
                yield from self._take(part)
            if piece.finish_reason is not None:
                if self._untold:  # of tokens without a text of their own
                    yield from self._take(ContentDelta(""))
                counts = self._num_tokens, self._reader.num_reasoning_tokens or 0
                yield from self._events.finish(piece.finish_reason, piece.stop_reason, *counts)

    def _take(self, event: Event) -> Iterator[dict[str, Any]]:
        """As in a chat, all tokens have log-probabilities, also those of reasoning and calls; content has them."""
        told: list[dict[str, Any]] = []
        if isinstance(event, ContentDelta):
            told, self._untold = self._untold, told
        return self._events.take(event, told)

    def _logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        if piece.logprobs is None:
            return []
        rows = [found_logprobs(row) for row in piece.logprobs]
        return chat_logprobs(piece.token_ids, rows, self._params.logprobs or 0, self._texts)["content"]
