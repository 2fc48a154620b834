"""Frames: the messages of a ``Channel`` in an event loop, handed out as they come."""

import asyncio
from collections.abc import Callable
from typing import Any

from compiled_llm.system.child_process import LENGTH_BYTES, framed


class Frames(asyncio.Protocol):
    """The side of a socket that runs in the event loop.

    Args:
        on_content: gets the content of each message. An error in it ends the connection.

    Attributes:
        ended: done when the connection has ended.
    """

    def __init__(self, on_content: Callable[[bytearray], None]) -> None:
        self._on_content, self._data = on_content, bytearray()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.WriteTransport = transport  # uvloop's is of no class of asyncio's

    def data_received(self, data: bytes) -> None:
        found = self._data
        found += data
        while len(found) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(found[:LENGTH_BYTES], "little")
            if len(found) < end:
                break
            content = found[LENGTH_BYTES:end]
            del found[:end]
            self._on_content(content)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def write(self, content: bytes) -> None:
        """Send a message."""
        self.write_frame(framed(content))

    def write_frame(self, frame: bytes) -> None:
        """Send a message that is ``framed``. After the end of the connection it goes nowhere."""
        if not self.ended.done():  # uvloop's transport raises then
            self._transport.write(frame)

    def close(self) -> None:
        """End the connection, when all that was written has been sent."""
        self._transport.close()
