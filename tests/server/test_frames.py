"""Messages of a channel as an event loop gets them: in pieces, several at once, and the end."""

import asyncio
import socket

import pytest
import uvloop

from compiled_llm.server.frames import Frames
from compiled_llm.system.child_process import Channel, framed

CONTENTS = [b"first", b"", b"x" * 70_000, b"last"]


@pytest.mark.parametrize("size", [1, 7, 8, 4096, 1 << 20])
def test_frames_come_whole_however_they_are_cut(size: int) -> None:
    async def received() -> list[bytes]:
        found: list[bytes] = []
        frames = Frames(lambda content: found.append(bytes(content)))
        stream = b"".join(map(framed, CONTENTS))
        for start in range(0, len(stream), size):
            frames.data_received(stream[start : start + size])
        return found

    assert asyncio.run(received()) == CONTENTS


def test_messages_go_both_ways_until_the_other_side_ends() -> None:
    async def check() -> None:
        own, theirs = socket.socketpair()
        channel = Channel(theirs)
        found: list[bytearray] = []
        _, frames = await asyncio.get_running_loop().create_connection(lambda: Frames(found.append), sock=own)
        frames.write(b"to there")
        assert await asyncio.to_thread(channel.receive) == b"to there"
        channel.send(b"from there")
        assert not frames.ended.done()
        theirs.close()
        await asyncio.wait_for(frames.ended, 10)
        assert found == [b"from there"]
        await asyncio.sleep(0)
        frames.write(b"until its end is known, requests still come")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the server's
        runner.run(check())
