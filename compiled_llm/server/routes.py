"""The routes: FastAPI gets a request's body to the service, and its outputs into an answer."""

import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from compiled_llm.api.version import __version__
from compiled_llm.openai.requests import OpenAIRequest, read_request
from compiled_llm.server.answers import OpenAIAnswer
from compiled_llm.server.engine_client import EngineEndedError
from compiled_llm.server.errors import ApiError
from compiled_llm.server.http import (
    GONE_STATUS,
    ClientGoneError,
    EventStream,
    Guard,
    JsonResponse,
    error_response,
    event,
    read_json,
    unless_gone,
)
from compiled_llm.server.messages import Output
from compiled_llm.server.metrics import CONTENT_TYPE
from compiled_llm.server.openapi import body_of
from compiled_llm.server.page import add_page
from compiled_llm.server.service import Served, Service
from compiled_llm.server.tokens import text_of, tokens_of

_STATS_SECONDS = 2.0  # a step may take so long; then /metrics is without the engine's own counts
_FAULT = "the server failed: its log says how"
_DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")


def make_app(service: Service) -> Any:
    """The ASGI application."""
    app = FastAPI(title="compiled-llm", version=__version__, docs_url=None, redoc_url=None)

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        """Paths and methods that there are none of."""
        allowed = (error.headers or {}).get("Allow")
        what = f"{request.method} is not served there: {allowed} is" if allowed else "nothing is served there"
        return error_response(ApiError(error.status_code, f"{request.url.path[:200]!r}: {what}", error.headers))

    @app.exception_handler(ClientGoneError)
    async def forget(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=GONE_STATUS)  # for the log

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> Response:
        return error_response(ApiError(500, _FAULT))  # the guard shows the traceback

    _add_generation(app, service)
    _add_tokens(app, service)
    _add_models(app, service)
    _add_states(app, service)
    add_page(app)
    guarded: Any = Guard(app, service.settings)
    if service.settings.cors_origin:
        guarded = CORSMiddleware(
            guarded, allow_origins=service.settings.cors_origin, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return guarded


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", openapi_extra=body_of("chat"))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await _answer(service, request, "chat")

    @app.post("/v1/completions", openapi_extra=body_of("completion"))
    async def completions(request: Request) -> Response:
        """Complete texts."""
        return await _answer(service, request, "completion")


async def _answer(service: Service, request: Request, kind: Any) -> Response:
    _ = service.started  # before a long body is read
    body = await read_json(request, service.settings)
    try:
        asked = read_request(kind, body)
    except ValueError as error:
        raise ApiError.of(error) from error
    answer = _Answering(service, request, asked, service.check_model(asked.model))
    if asked.stream:
        return await unless_gone(request.receive, answer.stream())
    return await unless_gone(request.receive, answer.whole())


class _Answering:
    """One request for a completion or a chat, from its body to its answer."""

    def __init__(self, service: Service, request: Request, asked: OpenAIRequest, model: str) -> None:
        self._service, self._asked, self._model = service, asked, model
        self._request_id: str = request.state.request_id
        self._facts: dict[str, Any] = request.state.facts
        self._deadline = asyncio.get_running_loop().time() + service.settings.max_request_seconds

    async def whole(self) -> Response:
        with self._service.admitted(self._asked):
            answer = await self._in_time(self._begin())
            return JsonResponse(await self._in_time(answer.whole()))

    async def stream(self) -> Response:
        """Waits for the first event, so that what is wrong with the request is its status."""
        events = self._events()
        try:
            first = await anext(events)
        except BaseException:
            await events.aclose()  # type: ignore[attr-defined]
            raise
        settings = self._service.settings
        return EventStream(_after(first, events), settings.client_seconds, settings.keep_alive_seconds)

    async def _events(self) -> AsyncIterator[bytes]:
        """What goes over the line. An error is raised before the first event, and is the last one after that."""
        begun = False
        with self._service.admitted(self._asked):
            try:
                answer = await self._in_time(self._begin())
                chunks = answer.chunks()
                while (chunk := await self._in_time(anext(chunks, None))) is not None:
                    begun = True
                    yield event(chunk)
            except Exception as failure:
                if not begun:
                    raise
                error = failure if isinstance(failure, ApiError) else ApiError(500, _FAULT)
                if error is not failure:
                    traceback.print_exc()
                self._facts["error"] = error.status
                yield event(error.body())
        yield _DONE

    async def _in_time(self, work: Awaitable[Result]) -> Result:
        """``ApiError`` when the answer takes too long. (Each part of it alone is timed: other tasks take others.)"""
        try:
            async with asyncio.timeout_at(self._deadline):
                return await work
        except TimeoutError:
            # Clients would ask again, and it would take as long.
            given = f"the answer took more than {self._service.settings.max_request_seconds:g} s"
            raise ApiError(408, given, {"x-should-retry": "false"}) from None

    async def _begin(self) -> OpenAIAnswer:
        service, asked = self._service, self._asked
        served = await service.serve(asked, self._request_id)
        echoed = [service.text_of(prompt) for prompt in served.prompts] if asked.echo else []
        served.outputs = self._observed(served, served.outputs)
        return OpenAIAnswer(served, self._model, self._request_id, service.texts, echoed)

    async def _observed(self, served: Served, outputs: AsyncIterator[Output]) -> AsyncIterator[Output]:
        """The outputs, with what the log and the metrics have of them."""
        params, facts = served.params, self._facts
        observers = {
            prompt.request_id: self._service.metrics.observe(len(prompt.token_ids), params.max_tokens, params.n)
            for prompt in served.prompts
        }
        facts["prompt_tokens"] = sum(len(prompt.token_ids) for prompt in served.prompts)
        facts["output_tokens"] = 0
        try:
            async for output in outputs:
                observers[output.request_id].take(output)
                facts["output_tokens"] += sum(len(piece.token_ids) for piece in output.pieces)
                if output.times is not None and output.times.first is not None:
                    facts.setdefault("first_seconds", output.times.first)
                yield output
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]


async def _after(first: bytes, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for other in others:
            yield other
    finally:
        await others.aclose()  # type: ignore[attr-defined]


def _add_tokens(app: FastAPI, service: Service) -> None:
    async def answer(request: Request, make: Callable[[Service, Mapping[str, Any]], dict[str, Any]]) -> Response:
        _ = service.started
        body = await read_json(request, service.settings)
        try:
            return JsonResponse(await unless_gone(request.receive, service.in_thread(lambda: make(service, body))))
        except ValueError as error:
            raise ApiError.of(error) from error

    @app.post("/tokenize", openapi_extra=body_of("tokenize"))
    async def tokenize(request: Request) -> Response:
        """The tokens of a text, or of a conversation by the chat template."""
        return await answer(request, tokens_of)

    @app.post("/detokenize", openapi_extra=body_of("detokenize"))
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        return await answer(request, text_of)


def _add_models(app: FastAPI, service: Service) -> None:
    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "compiled-llm",
            "root": service.names[0],
            "parent": None,
            "max_model_len": service.started.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        """The names of the model that is served."""
        return JsonResponse({"object": "list", "data": [card(name) for name in service.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One of them."""
        return JsonResponse(card(service.check_model(name)))


def _add_states(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    @app.get("/ready")
    async def health() -> Response:
        """200 while requests are answered; 503 while the model loads, when the engine hangs, and before the end."""
        fault = service.fault
        if fault is not None:
            raise ApiError(503, fault)
        return JsonResponse({"status": "ok"})

    @app.get("/ping")
    @app.post("/ping")
    async def ping() -> Response:
        """200 as long as the server itself works, also while the model loads."""
        return JsonResponse({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        """This program's version."""
        return JsonResponse({"version": __version__})

    @app.get("/load")
    async def load() -> Response:
        """How many prompts are under way; of these the engine runs some, and others wait there."""
        client = service.client
        counts = {"running": client.num_running, "waiting": client.num_waiting}
        return JsonResponse({"server_load": service.num_admitted, **counts})

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        stats = None
        if service.client.started is not None:
            try:
                stats = await asyncio.wait_for(service.client.stats(), _STATS_SECONDS)
            except (EngineEndedError, TimeoutError):
                stats = None
        return Response(service.metrics.text(stats, service.client.started), headers={"Content-Type": CONTENT_TYPE})
