"""EngineClient: the process of one engine as the server sees it. Requests go in, what each step gave comes out."""

import asyncio
import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from compiled_llm.api.config import EngineConfig
from compiled_llm.server.frames import Frames
from compiled_llm.server.messages import (
    VERSION,
    Abort,
    AdapterRef,
    Answer,
    Ask,
    DropAdapter,
    Failed,
    HandedOver,
    HandOver,
    Output,
    Outputs,
    ReadAdapter,
    Start,
    Started,
    ToEngine,
    check_version,
    decode_for_server,
    encode,
)
from compiled_llm.server.unread import EngineEndedError
from compiled_llm.system.child_process import described_end, with_package
from compiled_llm.system.resources import on_cores

_END_SECONDS = 10.0


class Place(NamedTuple):
    """Where an engine runs.

    Attributes:
        number: of the engine, from 0.
        number_of: engines of the server.
        cores: that its process may use; empty: as this one.
        environment: what its process has of its own.
    """

    number: int = 0
    number_of: int = 1
    cores: Sequence[int] = ()
    environment: Mapping[str, str] = {}


_ALONE = Place()


class EngineClient:
    """Starts a process with an engine of this ``config``, and speaks to it, all in one event loop.

    Attributes:
        config: its arguments.
        place: where it runs.
        started: what the engine says of itself; None until it serves.
        num_running, num_waiting: requests in the engine, as it last said.
        ended: how the process has ended; None while it runs.
        on_output: gets each output of a request that has not ended.
        on_end: gets its number, the ids of the requests that had not, and how, when the process has ended.
    """

    on_output: Callable[[Output], None]
    on_end: Callable[[int, Sequence[str], str], None]

    def __init__(self, config: EngineConfig, place: Place = _ALONE) -> None:
        self.config, self.place = config, place
        self.started: Started | None = None
        self.num_running = self.num_waiting = 0
        self.ended: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._frames: Frames | None = None
        self._unfinished: dict[str, None] = {}  # in the order in which they came
        self._questions: dict[int, asyncio.Future[Any]] = {}  # of ``Answer``, and of ``HandedOver``
        self._num_questions = 0
        self._heard_at = time.monotonic()

    async def start(self) -> None:
        """Start the process; it has read nothing yet."""
        own, theirs = socket.socketpair()
        with theirs, on_cores(self.place.cores):
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "compiled_llm.server.engine_process"],  # -P: no module of the directory
                stdin=theirs.fileno(),
                env=with_package(os.environ | self.place.environment),
            )
        await self._connect(own)

    async def restart(self) -> Started:
        """Start another process after the one that has ended, and wait until it serves. Errors as in ``ready``."""
        assert self._frames is not None
        self._frames.close()
        self.started, self.ended, self.num_running, self.num_waiting = None, None, 0, 0
        try:
            await self.start()
        except OSError as error:  # the system grants no process, or no memory or descriptor for it
            self.ended = f"{self._name} cannot be started: {error}"
            raise RuntimeError(self.ended) from error
        return await self.ready()

    async def _connect(self, own: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._first: asyncio.Future[Started | Failed] = loop.create_future()
        _, self._frames = await loop.create_connection(lambda: Frames(self._take), sock=own)
        config = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(self.config)}
        self._write(Start(VERSION, config, self.place.number_of))

    async def ready(self) -> Started:
        """Wait until the engine serves.

        Raises:
            ValueError: an engine argument, or what it leads to, does not allow it.
            RuntimeError: it could not be started for another reason.
        """
        assert self._frames is not None
        await asyncio.wait((self._first, self._frames.ended), return_when=asyncio.FIRST_COMPLETED)
        if not self._first.done():
            self.ended = await self._how_it_ended()
            raise RuntimeError(self.ended)
        message = self._first.result()
        if isinstance(message, Failed):
            self.ended = await self._how_it_ended()
            if message.kind in ("ValueError", "UnservableError"):
                raise ValueError(message.text)
            raise RuntimeError(f"{message.kind}: {message.text}")
        check_version(message.version)
        self.started = message
        self._ending = asyncio.create_task(self._end(self._frames))
        return message

    @property
    def serves(self) -> bool:
        return self.started is not None and self.ended is None

    @property
    def silent_seconds(self) -> float:
        """For how long the engine has said nothing while it had something to do. Each step is heard of."""
        return time.monotonic() - self._heard_at if self._unfinished else 0.0

    def send(self, request_id: str, frame: bytes) -> None:
        """Give a request to the engine, which serves. ``frame``: the request as a message."""
        assert self._frames is not None
        if not self._unfinished:
            self._heard_at = time.monotonic()
        self._unfinished[request_id] = None
        self._frames.write_frame(frame)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Requests of this engine get no output any more."""
        left = [request_id for request_id in request_ids if request_id in self._unfinished]
        for request_id in left:
            del self._unfinished[request_id]
        if left and self.ended is None:
            self._write(Abort(left))

    def forget(self, request_id: str) -> None:
        """A request that the engine has handed over is another one's."""
        self._unfinished.pop(request_id, None)

    async def stats(self) -> dict[str, Any]:
        """The engine's statistics, between two steps. ``EngineEndedError``: the process has ended."""
        return (await self._ask(Ask)).stats

    async def reset_prefix_cache(self) -> None:
        """Forget cached prompts.

        Raises:
            RuntimeError: requests have not ended.
            EngineEndedError: the process has ended.
        """
        error = (await self._ask(lambda number: Ask(number, resets_prefix_cache=True))).error
        if error is not None:
            raise RuntimeError(error)

    async def read_adapter(self, adapter: AdapterRef) -> None:
        """Have an adapter read, and checked.

        Raises:
            FileNotFoundError: it is not there.
            ValueError: it cannot be served, with the reason.
            EngineEndedError: the process has ended.
        """
        answer = await self._ask(lambda number: ReadAdapter(number, adapter))
        if answer.error is not None:
            raise (FileNotFoundError if answer.is_missing else ValueError)(answer.error)

    def drop_adapter(self, adapter: AdapterRef) -> None:
        """Have an adapter forgotten, but for the requests that have it."""
        if self.ended is None:
            self._write(DropAdapter(adapter))

    async def hand_over(self, seconds: float) -> HandedOver:
        """Have all requests end, to be served by others. ``EngineEndedError``: the process has ended."""
        return await self._ask(lambda number: HandOver(number, seconds))

    async def _ask(self, question: Callable[[int], Ask | ReadAdapter | HandOver]) -> Any:
        if self.ended is not None:
            raise EngineEndedError(self.ended)
        self._num_questions += 1
        answer = self._questions[self._num_questions] = asyncio.get_running_loop().create_future()
        self._write(question(self._num_questions))
        return await answer

    async def close(self) -> None:
        """End the process, whatever it does."""
        if self._frames is None:
            return
        self._frames.close()
        await asyncio.wait((self._frames.ended,), timeout=_END_SECONDS)  # it may read nothing
        try:
            await asyncio.to_thread(self._wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _wait(self, seconds: float | None = None) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    # -- Messages

    def _write(self, message: ToEngine) -> None:
        assert self._frames is not None
        self._frames.write(encode(message))

    async def _how_it_ended(self) -> str:
        return f"{self._name} has ended: {described_end(await asyncio.to_thread(self._wait))}"

    @property
    def _name(self) -> str:
        return "the engine's process" if self.place.number_of == 1 else f"the process of engine {self.place.number}"

    def _take(self, content: bytearray) -> None:
        """A message came."""
        message = decode_for_server(content)
        self._heard_at = time.monotonic()
        if isinstance(message, Outputs):
            self.num_running, self.num_waiting = message.num_running, message.num_waiting
            for output in message.outputs:
                self._hand_out(output)
        elif isinstance(message, Started | Failed):
            self._first.set_result(message)
        else:
            assert isinstance(message, Answer | HandedOver)
            question = self._questions.pop(message.number)
            if not question.done():
                question.set_result(message)

    async def _end(self, frames: Frames) -> None:
        """When the process ends, say so to everyone who waits."""
        await asyncio.wait((frames.ended,))
        self.ended = await self._how_it_ended()
        for question in self._questions.values():
            if not question.done():
                question.set_exception(EngineEndedError(self.ended))
        self._questions.clear()
        self.num_running = self.num_waiting = 0
        lost, self._unfinished = list(self._unfinished), {}
        self.on_end(self.place.number, lost, self.ended)

    def _hand_out(self, output: Output) -> None:
        if output.request_id not in self._unfinished:
            return  # aborted meanwhile
        if output.has_ended:
            del self._unfinished[output.request_id]
        output.engine = self.place.number
        self.on_output(output)

    async def wait_ended(self) -> None:
        """Until the process ends. For after ``ready``."""
        await asyncio.shield(self._ending)
