"""The routes: FastAPI gets a request's body to the service, and its outputs into an answer."""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match

from compiled_llm.api.version import __version__
from compiled_llm.openai.requests import read_request
from compiled_llm.server import schemas
from compiled_llm.server.adapter_routes import add_adapters
from compiled_llm.server.answering import answered, read_body
from compiled_llm.server.answers import OpenAIAnswer
from compiled_llm.server.direct_routes import DirectRoutes
from compiled_llm.server.errors import ApiError
from compiled_llm.server.http import (
    ClientGoneError,
    Guard,
    JsonResponse,
    answer_to,
    error_response,
    read_json,
    unless_gone,
)
from compiled_llm.server.message_routes import add_messages
from compiled_llm.server.metrics import CONTENT_TYPE
from compiled_llm.server.openapi import DescribedApp, described
from compiled_llm.server.page import add_page
from compiled_llm.server.response_routes import add_responses
from compiled_llm.server.scores import ScoreAnswer, read_score
from compiled_llm.server.server_routes import add_server
from compiled_llm.server.service import Served, Service
from compiled_llm.server.tokens import text_of, tokens_of


def make_app(service: Service) -> Any:
    """The ASGI application."""
    app = DescribedApp(service.model_names, title="compiled-llm", version=__version__, docs_url=None, redoc_url=None)

    async def answer(request: Request, error: Exception) -> Response:
        return answer_to(error, request.scope)

    for kind in (ApiError, ClientGoneError, Exception):  # the guard shows the traceback of the last
        app.add_exception_handler(kind, answer)

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        """Paths and methods that there are none of."""
        routes = [route for route in app.routes if route.matches(request.scope)[0] is Match.PARTIAL]
        allowed = ", ".join(sorted({method for route in routes for method in route.methods}))  # type: ignore[attr-defined]
        what = f"{request.method} is not served there: {allowed} is" if allowed else "nothing is served there"
        headers = {"Allow": allowed} if allowed else {}
        refused = ApiError(error.status_code, f"{request.url.path[:200]!r}: {what}", headers)
        return error_response(refused, request.scope)

    _add_generation(app, service)
    add_responses(app, service)
    add_messages(app, service)
    _add_tokens(app, service)
    _add_models(app, service)
    _add_states(app, service)
    add_server(app, service)
    if service.settings.allow_lora_updates:
        add_adapters(app, service)
    add_page(app)
    guarded: Any = Guard(DirectRoutes(app), service.settings)
    if service.settings.cors_origin:
        guarded = CORSMiddleware(
            guarded, allow_origins=service.settings.cors_origin, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return guarded


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/chat/completions",
        openapi_extra=described(schemas.ChatCompletion, "ChatCompletionRequest", chunk=schemas.ChatCompletionChunk),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await _answer(service, request, "chat")

    @app.post(
        "/v1/completions",
        openapi_extra=described(schemas.Completion, "CompletionRequest", chunk=schemas.CompletionChunk),
    )
    async def completions(request: Request) -> Response:
        """Complete texts."""
        return await _answer(service, request, "completion")

    @app.post("/score", openapi_extra=described(schemas.Scores, "ScoreRequest"))
    @app.post("/v1/score", openapi_extra=described(schemas.Scores, "ScoreRequest"))
    async def score(request: Request) -> Response:
        """How likely given continuations of prompts are."""
        most = service.client.config.max_logprobs
        asked = await read_body(service, request, lambda body: read_score(body, most))
        model, request_id = service.check_model(asked.model), request.state.request_id
        return await answered(
            service, request, asked, lambda served: ScoreAnswer(served, model, request_id, service.texts)
        )


async def _answer(service: Service, request: Request, kind: Any) -> Response:
    asked = await read_body(service, request, lambda body: read_request(kind, body))
    model = service.check_model(asked.model)

    def make(served: Served) -> OpenAIAnswer:
        echoed = [service.text_of(prompt) for prompt in served.prompts] if asked.echo else []
        return OpenAIAnswer(served, model, request.state.request_id, service.texts, echoed)

    return await answered(service, request, asked, make)


def _add_tokens(app: FastAPI, service: Service) -> None:
    async def answer(request: Request, make: Callable[[Service, Mapping[str, Any]], dict[str, Any]]) -> Response:
        _ = service.started
        body = await read_json(request, service.settings)
        try:
            return JsonResponse(await unless_gone(request.receive, service.in_thread(lambda: make(service, body))))
        except ValueError as error:
            raise ApiError.of(error) from error

    @app.post("/tokenize", openapi_extra=described(schemas.Tokens, "TokenizeTextRequest", "TokenizeChatRequest"))
    async def tokenize(request: Request) -> Response:
        """The tokens of a text, or of a conversation by the chat template."""
        return await answer(request, tokens_of)

    @app.post("/detokenize", openapi_extra=described(schemas.Text, "DetokenizeRequest"))
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        return await answer(request, text_of)


def _add_models(app: FastAPI, service: Service) -> None:
    def card(name: str) -> dict[str, Any]:
        adapter = service.adapters.get(name)
        return {
            "id": name,
            "object": "model",
            "created": service.created if adapter is None else adapter.created,
            "owned_by": "compiled-llm",
            "root": service.names[0] if adapter is None else adapter.ref.path,
            "parent": None if adapter is None else adapter.parent,
            "max_model_len": service.started.max_model_len,
        }

    @app.get("/v1/models", openapi_extra=described(schemas.Models))
    async def models() -> Response:
        """The names of the model that is served, and of its adapters."""
        return JsonResponse({"object": "list", "data": [card(name) for name in service.model_names()]})

    @app.get("/v1/models/{name:path}", openapi_extra=described(schemas.Model))
    async def model(name: str) -> Response:
        """One of them."""
        return JsonResponse(card(service.check_model(name)))


def _add_states(app: FastAPI, service: Service) -> None:
    @app.get("/health", openapi_extra=described(schemas.State))
    @app.get("/ready", openapi_extra=described(schemas.State))
    async def health() -> Response:
        """200 while an engine answers; 503 while the model loads, when all engines hang, and before the end.

        Of several engines it says how each is.
        """
        fault = service.fault
        if fault is not None:
            raise ApiError(503, fault)
        faults = service.client.faults()
        engines = {"engines": [one or "ok" for one in faults]} if len(faults) > 1 else {}
        return JsonResponse({"status": "ok", **engines})

    @app.get("/ping", openapi_extra=described(schemas.State))
    @app.post("/ping", openapi_extra=described(schemas.State))
    async def ping() -> Response:
        """200 as long as the server itself works, also while the model loads."""
        return JsonResponse({"status": "ok"})

    @app.get("/version", openapi_extra=described(schemas.Version))
    async def version() -> Response:
        """This program's version."""
        return JsonResponse({"version": __version__})

    @app.get("/load", openapi_extra=described(schemas.Load))
    async def load() -> Response:
        """How many prompts are under way; of these the engines run some, and others wait there."""
        client = service.client
        counts = {"running": client.num_running, "waiting": client.num_waiting}
        return JsonResponse({"server_load": service.num_admitted, **counts})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus."""
        client = service.client
        text = service.metrics.text(await client.stats(), client.started, client.counts)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})
