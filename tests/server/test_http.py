"""A stream to a client that does not read, without a socket, whose buffers would take all of it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from compiled_llm.server.http import EventStream


def test_a_client_that_does_not_read_is_gone() -> None:
    closed, sent = [], []

    async def events() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"data: {}\n\n"
        finally:
            closed.append(True)

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 4:
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    scope: Any = {"type": "http", "state": {"facts": {}}}
    asyncio.run(asyncio.wait_for(EventStream(events(), 0.05)(scope, receive, send), 10))
    assert len(sent) == 4
    assert closed == [True]
    assert scope["state"]["facts"] == {"client": "gone"}
