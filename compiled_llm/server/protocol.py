"""uvicorn's HTTP with a limit of a request's head, in bytes and in time, and of connections."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from compiled_llm.server.direct_body import EXTENSION, DirectBody
from compiled_llm.server.errors import ApiError
from compiled_llm.server.http import encode_json

_STATUS = {408: b"408 Request Timeout", 431: b"431 Request Header Fields Too Large", 503: b"503 Service Unavailable"}


def bounded_protocol(max_header_bytes: int, client_seconds: float, max_connections: int) -> type[asyncio.Protocol]:
    """The class for uvicorn's ``http`` argument.

    Without it the line and headers of a request may be as long, and take as long, as their sender likes, and
    connections may take all descriptors, without which the server cannot start the processes that it needs.
    """

    class BoundedProtocol(HttpToolsProtocol):
        """``_in_head``: the next byte belongs to a head; ``_timer``: until which it must be complete."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._in_head, self._head_bytes = True, 0
            self._timer: asyncio.TimerHandle | None = self.loop.call_later(client_seconds, self._refuse_slow)
            if len(self.connections) > max_connections:
                self._refuse(503, f"{max_connections} connections are open, as many as may be")

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                if self._timer is None:
                    self._timer = self.loop.call_later(client_seconds, self._refuse_slow)
                room = max_header_bytes - self._head_bytes
                first, data = data[:room], data[room:]
                self._head_bytes += len(first)
                super().data_received(first)
                if self._in_head and data and not self.transport.is_closing():
                    self._refuse(431, f"the headers may have {max_header_bytes} bytes at most")
                if not data or self.transport.is_closing():
                    return
            super().data_received(data)

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._end_timer()
            super().on_headers_complete()
            self.scope["extensions"] = {EXTENSION: DirectBody(self.cycle)}  # type: ignore[dict-item]

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._in_head, self._head_bytes = True, 0

        def _end_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _refuse_slow(self) -> None:
            if not self.transport.is_closing():
                self._refuse(408, f"the headers did not come within {client_seconds:g} s")

        def _refuse(self, status: int, message: str) -> None:
            body = encode_json(ApiError(status, message).body())
            length = str(len(body)).encode()
            head = b"HTTP/1.1 " + _STATUS[status] + b"\r\nconnection: close\r\ncontent-type: application/json\r\n"
            self.transport.write(head + b"content-length: " + length + b"\r\n\r\n" + body)
            self.transport.close()

    return BoundedProtocol
