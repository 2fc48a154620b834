"""Requests that go to a route without FastAPI's way to it, and those that do not."""

import asyncio
from typing import Any

from fastapi import Depends, FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from compiled_llm.server.direct_routes import DirectRoutes


def test_routes_that_take_a_request_alone_are_direct() -> None:
    app = FastAPI()

    @app.post("/direct")
    async def direct(request: Request) -> Response:
        return PlainTextResponse("direct")

    @app.post("/of/{name}")
    async def with_a_variable(request: Request) -> Response:
        return PlainTextResponse("variable")

    @app.post("/parsed")
    async def with_a_parameter(request: Request, count: int) -> Response:
        return PlainTextResponse("parsed")

    @app.post("/dependent", dependencies=[Depends(lambda: None)])
    async def with_a_dependency(request: Request) -> Response:
        return PlainTextResponse("dependent")

    @app.get("/direct")
    async def of_another_method(request: Request) -> Response:
        return PlainTextResponse("get")

    async def instead(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("FastAPI")(scope, receive, send)

    routes = DirectRoutes(app)
    routes._app = instead  # type: ignore[assignment]

    def answer(method: str, path: str) -> str:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request"}

        scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
        asyncio.run(routes(scope, receive, send))
        return sent[-1]["body"].decode()

    assert answer("POST", "/direct") == "direct"
    for path in ("/of/a", "/parsed", "/dependent", "/direct/"):
        assert answer("POST", path) == "FastAPI"
    assert answer("GET", "/direct") == "FastAPI"
