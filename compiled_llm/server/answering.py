"""From a client's request to its answer, whole or as a stream of events, for the routes of every dialect."""

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar, cast

from fastapi import Request
from starlette.responses import Response

from compiled_llm.openai.requests import OpenAIRequest
from compiled_llm.server.errors import FAULT, ApiError
from compiled_llm.server.http import EventStream, JsonResponse, event, read_json, unless_gone
from compiled_llm.server.messages import Output
from compiled_llm.server.metrics import RequestObserver
from compiled_llm.server.service import Served, Service

Result = TypeVar("Result")


class Answer(Protocol):
    """The answer to one request in the form of its dialect."""

    async def whole(self) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        ...


class StreamedAnswer(Answer, Protocol):
    """One that may be streamed.

    Attributes:
        last_event: what goes over the line after the last chunk.
    """

    last_event: bytes

    def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream. What is wrong with the request is raised before the first one."""
        ...

    def events_of(self, output: Output) -> bytes:
        """The events of an output that is neither the first nor the last one of its request."""
        ...

    def failure(self, error: ApiError) -> dict[str, Any]:
        """The chunk that ends a stream with an error."""
        ...


MakeAnswer = Callable[[Served], Answer]


async def read_body(service: Service, request: Request, read: Callable[[dict[str, Any]], Result]) -> Result:
    """What ``read`` makes of a request's body. ``ApiError``: its ``ValueError``, or nothing can be served now."""
    _ = service.started  # before a long body is read
    body = await read_json(request, service.settings)
    try:
        return read(body)
    except ValueError as error:
        raise ApiError.of(error) from error


async def answered(service: Service, request: Request, asked: OpenAIRequest, make: MakeAnswer) -> Response:
    """Serve a request that was read. The client's going ends it."""
    answering, settings = _Answering(service, request, asked, make), service.settings
    if not asked.stream:
        return await unless_gone(request.receive, answering.whole())
    return EventStream(answering.events(), settings.client_seconds, settings.keep_alive_seconds, answering.open)


class _Answering:
    """One request for a completion or a chat, from its body to its answer."""

    def __init__(self, service: Service, request: Request, asked: OpenAIRequest, make: MakeAnswer) -> None:
        self._service, self._asked, self._make = service, asked, make
        self._request_id: str = request.state.request_id
        self._facts: dict[str, Any] = request.state.facts
        if asked.ignored_tools:  # a warning, in the log
            self._facts["ignored_tools"] = ",".join(asked.ignored_tools)
        self._headers = request.headers
        self._observers: dict[str, RequestObserver] = {}
        self._deadline = asyncio.get_running_loop().time() + service.settings.max_request_seconds

    async def whole(self) -> Response:
        async with self._admitted():
            answer = await self._begin()
            return JsonResponse(await answer.whole())

    def open(self, stream: EventStream) -> None:
        """From now on outputs between the first and the last one are events at once, without a task that is woken."""
        answer = cast(StreamedAnswer, self._answer)

        def write(output: Output) -> bool:
            if output.has_ended or not stream.is_writable:
                return False
            for piece in output.pieces:
                if piece.finish_reason is not None:
                    return False
            self._observers[output.request_id].take(output)
            events = answer.events_of(output)
            if events:
                stream.write_now(events)
            return True

        self._served.unread.at_once = write

    async def events(self) -> AsyncIterator[tuple[bytes, bool]]:
        """What goes over the line. An error is raised before the first event, and is the last one after that.

        All that follows from the end of the last prompt goes at once.
        """
        answer: StreamedAnswer | None = None
        begun, data = False, b""
        async with self._admitted():
            try:
                answer = cast(StreamedAnswer, await self._begin())
                async for chunk in answer.chunks():
                    begun = True
                    data += event(chunk)
                    if self._num_open:
                        yield data, False
                        data = b""
            except Exception as failure:
                if not begun:
                    raise
                error = failure if isinstance(failure, ApiError) else ApiError(500, FAULT)
                if error is not failure:
                    traceback.print_exc()
                self._facts["error"] = error.status
                assert answer is not None
                data += event(answer.failure(error))
        yield data + answer.last_event, True

    async def _begin(self) -> Answer:
        try:
            async with asyncio.timeout_at(self._deadline):
                served = await self._service.serve(self._asked, self._request_id, self._deadline)
        except TimeoutError:
            raise self._service.too_late from None
        if served.adapter is not None:
            self._facts["adapter"] = repr(served.adapter.name)
        self._served, params = served, served.params
        self._facts["prompt_tokens"] = sum(len(prompt.token_ids) for prompt in served.prompts)
        self._facts["output_tokens"] = 0  # until the end
        self._observers = {
            prompt.request_id: RequestObserver(
                self._service.metrics, len(prompt.token_ids), params.max_tokens, params.n
            )
            for prompt in served.prompts
        }
        served.outputs, self._num_open = self._observed(served.outputs), len(served.prompts)
        self._answer = self._make(served)
        return self._answer

    @contextlib.asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        """The request has its place within this. After it the engine serves none of it, and the log has its tokens.

        So does one whose client went away while an event was being sent, when nobody waited for outputs.
        """
        with self._service.admitted(self._asked):
            try:
                yield
            finally:
                if self._observers:
                    self._served.unread.at_once = None
                    await self._served.outputs.aclose()  # type: ignore[attr-defined]
                    self._facts["output_tokens"] = sum(one.num_tokens for one in self._observers.values())

    async def _observed(self, outputs: AsyncIterator[Output]) -> AsyncIterator[Output]:
        try:
            async for output in outputs:
                self._observe(output)
                self._num_open -= output.has_ended
                yield output
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    def _observe(self, output: Output) -> None:
        """What the log and the metrics have of an output."""
        observer, times = self._observers[output.request_id], output.times
        observer.take(output)
        if times is None:
            return
        if self._service.traces is not None:
            served = self._served
            name = None if served.adapter is None else served.adapter.name
            counts = observer.num_prompt_tokens, observer.num_tokens
            request_id, seconds = output.request_id, observer.seconds
            self._service.traces.add(self._headers, request_id, served.params, *counts, seconds, times, name)
        if times.first is not None:
            self._facts.setdefault("first_seconds", times.first)
