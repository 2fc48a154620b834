"""What every request of the server goes through, as ASGI has it: keys, names, bounds, the line of the log, errors.

``Guard`` stands before the routes. ``read_json``, ``unless_gone`` and ``EventStream`` are for routes.
"""

import asyncio
import contextlib
import hashlib
import hmac
import math
import re
import secrets
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compiled_llm.anthropic.errors import OVERLOADED_STATUS, error_body
from compiled_llm.openai.requests import check_json
from compiled_llm.server.direct_body import EXTENSION, DirectBody
from compiled_llm.server.errors import FAULT, ApiError
from compiled_llm.server.page import PAGE_PATHS
from compiled_llm.server.settings import ServerSettings

# Paths that need no key: whether the server lives is not secret, nor is the page, which asks for the key itself. All
# others do, also those that do not exist.
PUBLIC_PATHS = frozenset(("/health", "/ready", "/ping", *PAGE_PATHS))
_UNLOGGED_PATHS = PUBLIC_PATHS | {"/metrics"}  # asked for every second or so
_NAME = re.compile(r"[\w.:-]{1,128}", re.ASCII)
# Of a body that is too large, so much is read and thrown away, so that its sender gets to read the answer.
_DISCARDED_TIMES = 16
_LONG_BODY = 2**16  # bytes; a longer one is read in another thread, so that others do not wait for it
GONE_STATUS = 499  # in the log: the client went away
_COMMENT = b": keep-alive\n\n"  # of an event stream

Result = TypeVar("Result")

encode_json = msgspec.json.Encoder().encode


class ClientGoneError(Exception):
    """The client has closed the connection: nobody reads the answer."""


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


def error_response(error: ApiError, scope: Scope) -> JsonResponse:
    """In the form of the dialect that the request's path belongs to."""
    if not _is_anthropic(scope):
        return JsonResponse(error.body(), error.status, error.headers)
    status = OVERLOADED_STATUS if error.status == 503 else error.status
    return JsonResponse(error_body(error.status, error.message), status, error.headers)


def answer_to(error: Exception, scope: Scope) -> Response:
    """What is answered where a route raises ``error`` and nothing has been sent yet."""
    if isinstance(error, ClientGoneError):
        return Response(status_code=GONE_STATUS)  # for the log
    return error_response(error if isinstance(error, ApiError) else ApiError(500, FAULT), scope)


def _is_anthropic(scope: Scope) -> bool:
    return scope["path"].startswith("/v1/messages")


class Guard:
    """Checks the key, gives each request a name, writes a line about it, and answers what a route raised."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._keys = [hashlib.sha256(key.encode()).digest() for key in settings.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _NAME.fullmatch(given) else secrets.token_hex(16)
        state = scope.setdefault("state", {})
        state["request_id"], state["send"], facts = request_id, send, state.setdefault("facts", {})
        names = (b"x-request-id", b"request-id") if _is_anthropic(scope) else (b"x-request-id",)
        started, status = time.monotonic(), 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = [(name, request_id.encode()) for name in names]
                message = {**message, "headers": [*message["headers"], *named]}
            await send(message)

        try:
            if self._keys and scope["path"] not in PUBLIC_PATHS and not self._has_key(headers):
                raise ApiError(401, "the request needs an API key: a bearer token, or the header x-api-key")
            await self._app(scope, receive, send_named)
        except Exception as error:
            if not status:
                await answer_to(error, scope)(scope, receive, send_named)
                if isinstance(error, ApiError | ClientGoneError):
                    return None
            traceback.print_exc()
            status = 500
        finally:
            if scope["path"] not in _UNLOGGED_PATHS:
                _log(scope, status or GONE_STATUS, request_id, time.monotonic() - started, facts)
        return None

    def _has_key(self, headers: Mapping[bytes, bytes]) -> bool:
        """Compares digests with every key, in the same time whether they are equal or not."""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(given).digest()
        return any([hmac.compare_digest(digest, key) for key in self._keys])  # noqa: C419 - all of them


def _log(scope: Scope, status: int, request_id: str, seconds: float, facts: Mapping[str, Any]) -> None:
    """One line without anything that the client wrote but the path, which is quoted."""
    more = "".join(f" {name}={value:.3f}" if isinstance(value, float) else f" {name}={value}"
                   for name, value in facts.items())  # fmt: skip
    line = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {status} {scope['method']} {scope['path'][:200]!r}"
    print(f"{line} seconds={seconds:.3f} id={request_id}{more}", file=sys.stderr, flush=True)


async def read_json(request: Request, settings: ServerSettings) -> dict[str, Any]:
    """The body of a request as an object of JSON. ``ApiError``: it is none, too large, or too long in coming."""
    length = request.headers.get("content-length", "")
    most, content, size = settings.max_body_bytes, bytearray(), 0
    try:
        async with asyncio.timeout(settings.client_seconds):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                size += len(message.get("body", b""))
                if size <= most:
                    content += message.get("body", b"")
                if not message.get("more_body") or size > _DISCARDED_TIMES * most:
                    break
    except TimeoutError:
        raise ApiError(
            408, f"the request did not come within {settings.client_seconds:g} s", {"Connection": "close"}
        ) from None
    if size > most:
        given = length if length.isdigit() else f"at least {size}"
        raise ApiError(413, f"a body may have {most} bytes at most, given {given}", {"Connection": "close"})
    if len(content) > _LONG_BODY:
        return await asyncio.to_thread(_object_of, content)
    return _object_of(content)


def _object_of(content: bytearray) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(content)
        check_json("", body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body must be JSON: {error}") from error
    except ValueError as error:
        raise ApiError.of(error) from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, given {type(body).__name__}")
    return body


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What ``work`` returns. When the client goes before, it is cancelled, and this raises ``ClientGoneError``.

    For after the body was read.
    """
    task, is_gone = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal is_gone
        with contextlib.suppress(Exception):  # of a connection that has ended
            while (await receive())["type"] != "http.disconnect":
                pass
        is_gone = True
        task.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:  # nobody else has cancelled it
            raise ClientGoneError from None
        raise
    finally:
        watching.cancel()


class EventStream(Response):
    """Server-sent events. What ``events`` raises before the first one is raised before anything is sent.

    ``events``: what goes over the line, and whether it is the last, which spares the end a write of its own. It is
    closed in the end, and when the client goes.

    A client that does not read for ``client_seconds`` is taken for gone. Where no event comes for
    ``keep_alive_seconds``, a comment does, which clients leave out; 0: none.

    ``on_open``: called with the stream when it has begun, if ``write_now`` can be used from then on.
    """

    background = None  # as FastAPI wants it
    raw_headers = [  # noqa: RUF012 - nobody changes it
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
        (b"content-type", b"text/event-stream; charset=utf-8"),
    ]

    def __init__(
        self,
        events: AsyncIterator[tuple[bytes, bool]],
        client_seconds: float,
        keep_alive_seconds: float,
        on_open: "Callable[[EventStream], None] | None" = None,
    ) -> None:
        self._events, self._client_seconds = events, client_seconds
        self._keep_alive_seconds = keep_alive_seconds
        self._on_open = on_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._body: DirectBody | None = scope.get("extensions", {}).get(EXTENSION)
        self._has_begun = False
        try:
            await unless_gone(receive, self._write(send, scope["state"]["send"]))
        except ClientGoneError:
            if not self._has_begun:
                raise
            scope["state"]["facts"]["client"] = "gone"
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]

    async def _write(self, send: Send, send_event: Send) -> None:
        """``send_event``: of the server itself. What stands before it has to do with the start of an answer alone."""
        data, is_last = await anext(self._events)
        self._has_begun = True
        try:
            async with asyncio.timeout(None) as limit:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                self._sent, self._sending_since = time.monotonic(), math.inf
                if self._on_open is not None and self._body is not None:
                    self._on_open(self)
                watching = asyncio.ensure_future(self._watch(send_event, limit))
                try:
                    while not is_last:
                        self._sending_since = time.monotonic()
                        await send_event({"type": "http.response.body", "body": data, "more_body": True})
                        self._sent, self._sending_since = self._sending_since, math.inf
                        data, is_last = await anext(self._events)
                    self._sending_since = time.monotonic()
                    await send_event({"type": "http.response.body", "body": data, "more_body": False})
                finally:
                    watching.cancel()
        except TimeoutError:
            raise ClientGoneError from None

    @property
    def is_writable(self) -> bool:
        """Whether ``write_now`` may be called, while nobody waits for an event to be sent."""
        return self._body is not None and self._body.is_writable

    def write_now(self, data: bytes) -> None:
        """Events besides those of the iterator, sent without waking anybody."""
        assert self._body is not None
        self._body.write(data)
        self._sent = time.monotonic()

    async def _watch(self, send_event: Send, limit: asyncio.Timeout) -> None:
        """Ends the stream of a client that reads nothing; comments where no event is sent for some time.

        Looks now and then, since timers and tasks for each event would cost as much as the event.
        """
        keep_alive = self._keep_alive_seconds or math.inf
        try:
            while time.monotonic() < self._sending_since + self._client_seconds:
                left = self._sent + keep_alive - time.monotonic()
                if left > 0 or self._sending_since < math.inf:
                    await asyncio.sleep(max(0.01, min(left, self._client_seconds / 8)))
                    continue
                async with asyncio.timeout(self._client_seconds):
                    await send_event({"type": "http.response.body", "body": _COMMENT, "more_body": True})
                self._sent = time.monotonic()
        except TimeoutError:
            pass
        limit.reschedule(0)  # long ago


def event(content: Mapping[str, Any]) -> bytes:
    """One event with an object of JSON, which is named by its type if it has one."""
    head = b"event: " + content["type"].encode() + b"\n" if "type" in content else b""
    return head + b"data: " + encode_json(content) + b"\n\n"
