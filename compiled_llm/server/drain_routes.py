"""Routes by which requests go to other engines of this server, or from one server to another. See docs/roles.md."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from compiled_llm.api.argument_checks import integer
from compiled_llm.api.names import refuse_unknown_fields
from compiled_llm.api.readable import shown
from compiled_llm.openai.requests import OpenAIRequest
from compiled_llm.server import schemas
from compiled_llm.server.answering import read_body
from compiled_llm.server.errors import ApiError
from compiled_llm.server.http import EventStream, JsonResponse
from compiled_llm.server.messages import AdapterRef, Generate
from compiled_llm.server.openapi import DRAIN_FIELDS, described
from compiled_llm.server.service import Service
from compiled_llm.server.take_over import OtherServer, TakenOver, output_event
from compiled_llm.server.unread import EngineEndedError, RequestAbortedError


def add_drain(app: FastAPI, service: Service) -> None:
    taken = TakenOver()

    def facts() -> dict[str, str]:
        started = service.started
        model, capacity = str(service.client.config.model), str(started.capacity)
        return {"model": model, "key": started.token_key, "capacity": capacity, "server": taken.name}

    @app.post("/drain", openapi_extra=described(schemas.Drained, "DrainRequest"))
    async def drain(request: Request) -> Response:
        """Move the requests of an engine to others, which take what KV blocks are ready in time.

        With "to" another server gets them; without "engine" those of all, and this one ends when they are answered.
        """
        engine, seconds, to, key = await read_body(service, request, _drained)
        try:
            if to is None:
                assert engine is not None
                return JsonResponse({"moved": await service.client.drain(engine, seconds)})
            other = OtherServer(to, key, facts())
            await other.meet(*service.client.adapters_in_use)
            if engine is None:
                service.end_when_answered()
            return JsonResponse({"moved": await service.client.drain_to(other, engine, seconds)})
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            raise ApiError(400, f"to must name a server that answers, given {shown(to)}: {error!r:.200}") from error
        except ValueError as error:
            raise ApiError.of(error) from error

    @app.post("/undrain", openapi_extra=described(schemas.Drained, "UndrainRequest"))
    async def undrain(request: Request) -> Response:
        """Let requests go to an engine again."""

        def read(body: Mapping[str, Any]) -> None:
            refuse_unknown_fields(body, DRAIN_FIELDS[:1], {})
            integer("engine", body.get("engine"), 0, 2**20)
            service.client.undrain(int(body["engine"]))

        await read_body(service, request, read)
        return JsonResponse({"moved": 0})

    @app.post("/take_over", openapi_extra=described(schemas.TakenOver, "TakeOverRequest"))
    async def take_over(request: Request) -> Response:
        """Tell another server, which is to end, what is served here."""
        body = await read_body(service, request, dict)
        try:
            return JsonResponse(await taken.hello(body, facts(), _adapters(service)))
        except ValueError as error:
            raise ApiError.of(error) from error

    @app.post("/take_over/request", openapi_extra=described(str, "TakenRequest"))
    async def take(request: Request) -> Response:
        """Serve a request of that server to its end."""
        body = await read_body(service, request, dict)
        try:
            asked = taken.request(body, f"{request.state.request_id}-taken", _adapters(service))
        except PermissionError as error:
            raise ApiError(401, str(error)) from error
        except ValueError as error:
            raise ApiError.of(error) from error
        settings = service.settings
        return EventStream(_outputs(service, asked), settings.client_seconds, settings.keep_alive_seconds)


def _adapters(service: Service) -> dict[str, AdapterRef]:
    return {adapter.ref.name: adapter.ref for adapter in service.adapters}


async def _outputs(service: Service, asked: Generate) -> AsyncIterator[tuple[bytes, bool]]:
    """The events of a request of another server, which sees from the last one whether it was served to its end."""
    deadline = asyncio.get_running_loop().time() + service.settings.max_request_seconds
    counted = OpenAIRequest("completion", None, prompts=[{}], sampling={"n": asked.sampling.get("n", 1)})
    begun = False
    with service.admitted(counted):
        try:
            async with contextlib.aclosing(service.client.generate([asked], deadline)) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    begun = True
                    yield output_event(output), output.has_ended
        except (EngineEndedError, RequestAbortedError, TimeoutError) as error:
            if not begun:
                raise ApiError(503, str(error)) from error
    yield b"", True


def _drained(body: Mapping[str, Any]) -> tuple[int | None, float, str | None, str | None]:
    """Which engine, its seconds, the other server, and a key of that. ``ValueError``: the body has not these."""
    refuse_unknown_fields(body, DRAIN_FIELDS, {})
    engine, to, key = (body.get(name) for name in ("engine", "to", "to_api_key"))
    if engine is not None or to is None:
        integer("engine", engine, 0, 2**20)
    for name, text in (("to", to), ("to_api_key", key)):
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{name} must be a string, given {shown(text)}")
    if to is None and key is not None:
        raise ValueError("to_api_key must be None without to, the server that it is for")
    seconds = body.get("grace_seconds", 5.0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= 3600:
        raise ValueError(f"grace_seconds must be a number from 0 to 3600, given {shown(seconds)}")
    return engine, float(seconds), to, key
