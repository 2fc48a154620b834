"""Streams without a socket, whose buffers would take all of what a client does not read."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from compiled_llm.server.http import EventStream


def test_a_client_that_does_not_read_is_gone() -> None:
    closed, sent = [], []

    async def events() -> AsyncIterator[tuple[bytes, bool]]:
        try:
            while True:
                yield b"data: {}\n\n", False
        finally:
            closed.append(True)

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 4:
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    scope: Any = {"type": "http", "state": {"facts": {}, "send": send}}
    asyncio.run(asyncio.wait_for(EventStream(events(), 0.05, 0)(scope, receive, send), 10))
    assert len(sent) == 4
    assert closed == [True]
    assert scope["state"]["facts"] == {"client": "gone"}


def test_a_stream_that_waits_has_comments_and_none_after_its_end() -> None:
    sent: list[bytes] = []

    async def events() -> AsyncIterator[tuple[bytes, bool]]:
        yield b"data: 1\n\n", False
        while sent.count(b": keep-alive\n\n") < 3:
            await asyncio.sleep(0.01)
        yield b"data: 2\n\n", True

    async def send(message: Any) -> None:
        sent.append(message.get("body", b"head"))

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def run() -> None:
        await EventStream(events(), 5, 0.05)({"type": "http", "state": {"facts": {}, "send": send}}, receive, send)
        await asyncio.sleep(0.2)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert sent == [b"head", b"data: 1\n\n", *[b": keep-alive\n\n"] * 3, b"data: 2\n\n"]
