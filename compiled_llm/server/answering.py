"""From a client's request to its answer, whole or as a stream of events, for the routes of every dialect."""

import asyncio
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from fastapi import Request
from starlette.responses import Response

from compiled_llm.openai.requests import OpenAIRequest
from compiled_llm.server.errors import ApiError
from compiled_llm.server.http import EventStream, JsonResponse, event, read_json, unless_gone
from compiled_llm.server.messages import Output
from compiled_llm.server.metrics import RequestObserver
from compiled_llm.server.service import Served, Service

FAULT = "the server failed: its log says how"

Result = TypeVar("Result")


class Answer(Protocol):
    """The answer to one request in the form of its dialect."""

    async def whole(self) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        ...


@runtime_checkable
class StreamedAnswer(Answer, Protocol):
    """One that may be streamed.

    Attributes:
        last_event: what goes over the line after the last chunk.
    """

    last_event: bytes

    def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream. What is wrong with the request is raised before the first one."""
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
    answering = _Answering(service, request, asked, make)
    return await unless_gone(request.receive, answering.stream() if asked.stream else answering.whole())


class _Answering:
    """One request for a completion or a chat, from its body to its answer."""

    def __init__(self, service: Service, request: Request, asked: OpenAIRequest, make: MakeAnswer) -> None:
        self._service, self._asked, self._make = service, asked, make
        self._request_id: str = request.state.request_id
        self._facts: dict[str, Any] = request.state.facts
        if asked.ignored_tools:  # a warning, in the log
            self._facts["ignored_tools"] = ",".join(asked.ignored_tools)
        self._headers = request.headers
        self._deadline = asyncio.get_running_loop().time() + service.settings.max_request_seconds

    async def whole(self) -> Response:
        with self._service.admitted(self._asked):
            answer = await self._begin()
            return JsonResponse(await answer.whole())

    async def stream(self) -> Response:
        """Waits for the first event, so that what is wrong with the request is its status."""
        return await streamed(self._service, self._events())

    async def _events(self) -> AsyncIterator[bytes]:
        """What goes over the line. An error is raised before the first event, and is the last one after that."""
        answer: StreamedAnswer | None = None
        begun = False
        with self._service.admitted(self._asked):
            try:
                made = await self._begin()
                assert isinstance(made, StreamedAnswer)
                answer = made
                async for chunk in answer.chunks():
                    begun = True
                    yield event(chunk)
            except Exception as failure:
                if not begun:
                    raise
                error = failure if isinstance(failure, ApiError) else ApiError(500, FAULT)
                if error is not failure:
                    traceback.print_exc()
                self._facts["error"] = error.status
                assert answer is not None
                yield event(answer.failure(error))
        if answer is not None and answer.last_event:
            yield answer.last_event

    async def _begin(self) -> Answer:
        try:
            async with asyncio.timeout_at(self._deadline):
                served = await self._service.serve(self._asked, self._request_id, self._deadline)
        except TimeoutError:
            raise self._service.too_late from None
        if served.adapter is not None:
            self._facts["adapter"] = repr(served.adapter.name)
        served.outputs = self._observed(served, served.outputs)
        return self._make(served)

    async def _observed(self, served: Served, outputs: AsyncIterator[Output]) -> AsyncIterator[Output]:
        """The outputs, with what the log and the metrics have of them."""
        params, facts, traces = served.params, self._facts, self._service.traces
        num_prompt_tokens = {prompt.request_id: len(prompt.token_ids) for prompt in served.prompts}
        observers = {
            request_id: RequestObserver(self._service.metrics, count, params.max_tokens, params.n)
            for request_id, count in num_prompt_tokens.items()
        }
        facts["prompt_tokens"] = sum(num_prompt_tokens.values())
        facts["output_tokens"] = 0
        try:
            async for output in outputs:
                observer, request_id = observers[output.request_id], output.request_id
                observer.take(output)
                if traces is not None and output.times is not None:
                    counts = num_prompt_tokens[request_id], observer.num_tokens
                    name = None if served.adapter is None else served.adapter.name
                    traces.add(self._headers, request_id, params, *counts, observer.seconds, output.times, name)
                facts["output_tokens"] += sum(len(piece.token_ids) for piece in output.pieces)
                if output.times is not None and output.times.first is not None:
                    facts.setdefault("first_seconds", output.times.first)
                yield output
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]


async def streamed(service: Service, events: AsyncIterator[bytes]) -> Response:
    """A stream of events, once the first one is there."""
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()  # type: ignore[attr-defined]
        raise
    return EventStream(_after(first, events), service.settings.client_seconds, service.settings.keep_alive_seconds)


async def _after(first: bytes, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for other in others:
            yield other
    finally:
        await others.aclose()  # type: ignore[attr-defined]
