"""Streams without a socket, whose buffers would take all of what a client does not read."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from compiled_llm.server.errors import ApiError
from compiled_llm.server.http import ClientGoneError, EventStream, unless_gone


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
    num_comments = sent.count(b": keep-alive\n\n")  # one more where the machine does much else
    assert num_comments >= 3
    assert sent == [b"head", b"data: 1\n\n", *[b": keep-alive\n\n"] * num_comments, b"data: 2\n\n"]


async def _stays() -> Any:
    await asyncio.Event().wait()


def test_the_end_goes_with_the_last_event_and_an_error_before_the_first_one_is_raised_before_the_head() -> None:
    sent: list[Any] = []

    async def events(error: Exception | None) -> AsyncIterator[tuple[bytes, bool]]:
        if error is not None:
            raise error
        yield b"data: 1\n\n", False
        yield b"data: 2\n\n", True

    async def send(message: Any) -> None:
        sent.append(message)

    async def run(error: Exception | None) -> None:
        await EventStream(events(error), 5, 5)({"type": "http", "state": {"facts": {}, "send": send}}, _stays, send)

    asyncio.run(asyncio.wait_for(run(None), 30))
    assert [(message.get("body"), message.get("more_body")) for message in sent] == [
        (None, None),
        (b"data: 1\n\n", True),
        (b"data: 2\n\n", False),
    ]
    sent.clear()
    with pytest.raises(ApiError):
        asyncio.run(asyncio.wait_for(run(ApiError(400, "no")), 30))
    assert not sent


def test_work_ends_when_the_client_goes_and_a_cancellation_stays_one() -> None:
    ended: list[str] = []

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def goes() -> Any:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def breaks() -> Any:
        raise OSError

    async def run() -> None:
        task, before = asyncio.current_task(), asyncio.all_tasks()
        for receive in (goes, breaks):
            with pytest.raises(ClientGoneError):
                await unless_gone(receive, work(receive.__name__))
        assert task is not None
        assert not task.cancelling()
        other = asyncio.ensure_future(unless_gone(_stays, work("stays")))
        await asyncio.sleep(0.01)
        other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await other
        assert await unless_gone(_stays, asyncio.sleep(0.01, "done")) == "done"
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before

    asyncio.run(asyncio.wait_for(run(), 30))
    assert ended == ["goes", "breaks", "stays"]
