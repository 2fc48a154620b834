"""Engines of Ray Serve as the server sees them, played by the test: what a death does to a request."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from compiled_llm.ray_serve.deployed_engines import DeployedEngines, config_digest
from compiled_llm.server.messages import AdapterRef, Generate, Output, Piece, encode
from compiled_llm.server.settings import ServerSettings
from compiled_llm.server.unread import EngineEndedError
from tests.server.test_replicas import PIECE, STARTED, TIMES, asked, collected, runs, settle

CONFIG: dict[str, Any] = {"num_kv_blocks": 64}


class LostError(Exception):
    """As Ray has it: a line, and identifiers in others."""


class Call:
    """One call of ``generate``, as Ray Serve's ``DeploymentResponseGenerator``."""

    def __init__(self) -> None:
        self._outputs: asyncio.Queue[Output | None] = asyncio.Queue()
        self.is_cancelled = False

    def give(self, request_id: str, *pieces: Piece, ends: bool = False) -> None:
        self._outputs.put_nowait(Output(request_id, list(pieces), times=TIMES if ends else None, engine=1))
        if ends:
            self._outputs.put_nowait(None)

    def lose(self) -> None:
        self._outputs.put_nowait(None)
        self.is_lost = True

    is_lost = False

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> bytes:
        output = await self._outputs.get()
        if output is not None:
            return encode(output)
        if self.is_lost:
            raise LostError("The actor died.\nactor_id: 1")
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """As Ray Serve's ``DeploymentHandle``."""

    def __init__(self, *answers: Any) -> None:
        self.calls: list[Call] = []
        self.digests: list[str] = []
        self.asked: list[tuple[Any, ...]] = []
        self._answers = answers
        self.describe = self.generate = self

    def options(self, stream: bool) -> "Handle":
        assert stream
        return self

    def remote(self, *arguments: Any) -> Any:
        self.digests.append(arguments[-1])
        if len(arguments) == 1:

            async def described() -> bytes:
                return encode(STARTED)

            return described()
        self.calls.append(Call())
        return self.calls[-1]

    def broadcast(self, *arguments: Any) -> "Handle":
        self.asked.append(arguments)
        return self

    async def results_async(self) -> list[Any]:
        for answer in self._answers:
            if isinstance(answer, Exception):
                raise answer
        return list(self._answers)


@contextlib.asynccontextmanager
async def deployed(*answers: Any, **settings: Any) -> AsyncIterator[tuple[DeployedEngines, Handle]]:
    handle = Handle(*answers)
    engines = DeployedEngines(handle, CONFIG, ServerSettings(**settings))
    await engines.ready()
    yield engines, handle
    await settle()
    assert engines.unfinished == []
    assert engines.num_running == 0, "what was counted is counted off"
    assert set(handle.digests) == {config_digest(CONFIG)}


@runs
async def test_a_request_is_a_call_and_its_outputs_come_as_they_are() -> None:
    async with deployed(data_parallel_size=3) as (engines, handle):
        assert engines.max_num_seqs == 3 * STARTED.max_num_seqs
        task = asyncio.create_task(collected(engines, asked("a"), asked("b")))
        await settle()
        assert engines.num_running == 2
        handle.calls[0].give("a", PIECE)
        await settle()
        handle.calls[1].give("b", PIECE, ends=True)
        handle.calls[0].give("a", PIECE, ends=True)
        found = await task
        assert isinstance(found, list)
        assert [(one.request_id, one.engine) for one in found] == [("a", 1), ("b", 1), ("a", 1)]
        assert engines.num_served_again == 0


@runs
async def test_what_was_not_read_is_asked_for_again_once_and_has_its_seed() -> None:
    async with deployed() as (engines, handle):
        frames: list[bytes] = []
        remote = handle.remote
        handle.remote = lambda *arguments: (frames.append(arguments[0]), remote(*arguments))[1]  # type: ignore[method-assign]
        task = asyncio.create_task(collected(engines, asked("a")))
        await settle()
        handle.calls[0].lose()
        await settle()
        handle.calls[1].give("a", PIECE, ends=True)
        found = await task
        assert isinstance(found, list)
        assert [len(one.pieces) for one in found] == [1]
        assert engines.num_served_again == 1
        assert frames[0] == frames[1]
        assert b"seed" in frames[0], "the same tokens the second time"

        task = asyncio.create_task(collected(engines, asked("b")))
        await settle()
        handle.calls[2].lose()
        await settle()
        handle.calls[3].lose()
        error = await task
        assert isinstance(error, EngineEndedError)
        assert str(error) == "an engine was lost: The actor died"
        assert len(handle.calls) == 4


@runs
async def test_a_stream_goes_on_and_each_token_comes_once() -> None:
    async with deployed() as (engines, handle):
        task = asyncio.create_task(collected(engines, asked("a")))
        await settle()
        handle.calls[0].give("a", PIECE)
        await settle()
        handle.calls[0].lose()
        await settle()
        handle.calls[1].give("a", PIECE, Piece(0, "y", [6], finish_reason="length"), ends=True)
        found = await task
        assert isinstance(found, list)
        pieces = [piece for output in found for piece in output.pieces]
        assert [(piece.text, piece.token_ids) for piece in pieces] == [("x", [5]), ("y", [6])]
        assert engines.num_served_again == 1
        assert len(handle.calls) == 2


@runs
async def test_a_client_that_goes_cancels_the_call() -> None:
    async with deployed() as (engines, handle):
        task = asyncio.create_task(collected(engines, asked("a")))
        await settle()
        task.cancel()
        await settle()
        assert handle.calls[0].is_cancelled
        assert len(handle.calls) == 1


@runs
async def test_what_is_asked_of_all() -> None:
    async with deployed((2, {"x": 1}), (0, {"x": 2})) as (engines, _):
        assert await engines.stats() == [{"x": 2}, None, {"x": 1}]
    async with deployed((False, None), (True, "no such file")) as (engines, handle):
        with pytest.raises(FileNotFoundError, match="no such file"):
            await engines.read_adapter(AdapterRef("a", "/a"))
        assert handle.asked == [("read_adapter", "a", "/a")]
    async with deployed(None, "requests have not ended") as (engines, _):
        with pytest.raises(RuntimeError, match="not ended"):
            await engines.reset_prefix_cache()
    async with deployed(LostError("gone\nid")) as (engines, _):
        assert await engines.stats() == [None]
        with pytest.raises(EngineEndedError, match=r"^gone$"):
            await engines.read_adapter(AdapterRef("a", "/a"))


def test_other_arguments_have_another_digest() -> None:
    assert config_digest({**CONFIG, "dtype": "float32"}) != config_digest(CONFIG)
    assert isinstance(asked("a"), Generate)
