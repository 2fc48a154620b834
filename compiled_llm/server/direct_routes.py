"""DirectRoutes: the way to routes that answer a body, without FastAPI's, whose layers do nothing for them."""

import inspect
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send


class DirectRoutes:
    """Stands before a FastAPI application, and gets requests to those of its routes that need nothing of it.

    Such a route has one method, POST, a path without variables, no dependencies, and ``request`` as its only argument,
    and returns a ``Response``. All other requests are for the application. Errors of a route are for the ``Guard`` to
    answer.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._endpoints: dict[str, Any] = {
            route.path: route.endpoint
            for route in app.routes
            if isinstance(route, APIRoute) and route.methods == {"POST"} and "{" not in route.path
            and not route.dependencies and list(inspect.signature(route.endpoint).parameters) == ["request"]
        }  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_direct = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._endpoints
        if not is_direct:
            return await self._app(scope, receive, send)
        response = await self._endpoints[scope["path"]](Request(scope, receive, send))
        await response(scope, receive, send)
        return None
