"""What the server does with outputs of the engine that nobody has read yet."""

import asyncio

import pytest

from compiled_llm.server.messages import Output, Piece, Times
from compiled_llm.server.unread import EngineEndedError, Unread


def test_what_is_awaited_is_taken_at_once_and_else_waits() -> None:
    async def check() -> None:
        unread, taken = Unread(), []

        def take(output: Output) -> bool:
            if not output.pieces:
                raise RuntimeError("no pieces")
            taken.append(output)
            return output.request_id == "a"

        unread.at_once = take
        first, second = Output("a", [Piece(0, "x", [1])]), Output("b", [Piece(0, "y", [2])])
        unread.put(first)
        assert not taken, "nobody waits for it: what came before may not be read"
        assert await unread.next() == first
        waiting = asyncio.create_task(unread.next())
        await asyncio.sleep(0)
        unread.put(first)
        assert taken == [first]
        unread.put(second)
        unread.put(first)
        assert taken == [first, second], "the one before it was not read"
        assert await waiting == second
        assert await unread.next() == first
        waiting = asyncio.create_task(unread.next())
        await asyncio.sleep(0)
        unread.put(Output("a", []))
        unread.put(Output("a", [Piece(0, "z", [3], None, "stop")], times=Times(0.1, 0.2, 0.3, 0)))
        with pytest.raises(RuntimeError, match="no pieces"):  # and no end of an answer that lacks a part
            await waiting
        unread, taken = Unread(), []
        unread.at_once = take
        waiting = asyncio.create_task(unread.next())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        unread.put(first)
        assert not taken, "its reader is gone"

    asyncio.run(check())


def test_unread_deltas_grow_into_one() -> None:
    async def check() -> None:
        unread = Unread()
        unread.put(Output("a", [Piece(0, "x", [1], [[(1, -1.0, 1, "x")]])], 2, [None]))
        unread.put(Output("b", [Piece(0, "other", [9])]))
        unread.put(Output("a", [Piece(1, "z", [7])], 2))
        unread.put(
            Output("a", [Piece(0, "y", [2], [[(2, -2.0, 1, "y")]], "stop", 2)], 2, times=Times(0.1, 0.2, 0.3, 0))
        )
        first, second = await unread.next(), await unread.next()
        rows = [[(1, -1.0, 1, "x")], [(2, -2.0, 1, "y")]]
        pieces = [Piece(0, "xy", [1, 2], rows, "stop", 2), Piece(1, "z", [7])]
        assert first == Output("a", pieces, 2, [None], Times(0.1, 0.2, 0.3, 0))
        assert second == Output("b", [Piece(0, "other", [9])])
        unread.put(second)
        unread.fail(EngineEndedError("gone"))
        assert await unread.next() == second, "what is there is read first"
        with pytest.raises(EngineEndedError, match="gone"):
            await unread.next()

    asyncio.run(check())
