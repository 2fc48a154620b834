"""EngineClient: the engine's process as the server sees it. Requests go in, what each step gave comes out."""

import asyncio
import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from compiled_llm.api.config import EngineConfig
from compiled_llm.server.messages import (
    VERSION,
    Abort,
    AdapterRef,
    Answer,
    Ask,
    DropAdapter,
    Failed,
    Generate,
    Output,
    Outputs,
    Piece,
    ReadAdapter,
    Start,
    Started,
    ToEngine,
    check_version,
    decode_for_server,
    encode,
)
from compiled_llm.system.child_process import LENGTH_BYTES, described_end, framed, with_package

_END_SECONDS = 10.0


class EngineEndedError(Exception):
    """The engine's process has ended, and serves nothing any more."""


class RequestAbortedError(Exception):
    """Somebody else than its client has ended a request."""


class EngineClient:
    """Starts a process with an engine of this ``config``, and speaks to it, all in one event loop.

    Attributes:
        config: its arguments.
        started: what the engine says of itself; None until it serves.
        num_running, num_waiting: requests in the engine, as it last said.
        ended: how the process has ended; None while it runs.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.started: Started | None = None
        self.num_running = self.num_waiting = 0
        self.ended: str | None = None
        self._unread: dict[str, _Unread] = {}  # of requests that have not ended
        self._questions: dict[int, asyncio.Future[Answer]] = {}
        self._num_questions = 0
        self._heard_at = time.monotonic()

    async def start(self) -> None:
        """Start the process; it has read nothing yet."""
        own, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "compiled_llm.server.engine_process"],  # -P: no module of the directory
                stdin=theirs.fileno(),
                env=with_package(os.environ),
            )
        await self._connect(own)

    async def restart(self) -> Started:
        """Start another process after the one that has ended, and wait until it serves. Errors as in ``ready``."""
        self._writer.close()
        self.started, self.ended, self.num_running, self.num_waiting = None, None, 0, 0
        await self.start()
        return await self.ready()

    async def _connect(self, own: socket.socket) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=own)
        config = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(self.config)}
        self._send(Start(VERSION, config))

    async def ready(self) -> Started:
        """Wait until the engine serves. From then on its messages are read.

        Raises:
            ValueError: an engine argument, or what it leads to, does not allow it.
            RuntimeError: it could not be started for another reason.
        """
        try:
            message = await self._receive()
        except EngineEndedError as error:
            raise RuntimeError(str(error)) from error
        if isinstance(message, Failed):
            await asyncio.to_thread(self._process.wait)
            if message.kind in ("ValueError", "UnservableError"):
                raise ValueError(message.text)
            raise RuntimeError(f"{message.kind}: {message.text}")
        assert isinstance(message, Started)
        check_version(message.version)
        self.started = message
        self._reading = asyncio.create_task(self._read())
        return message

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._unread)

    @property
    def silent_seconds(self) -> float:
        """For how long the engine has said nothing while it had something to do. Each step is heard of."""
        return time.monotonic() - self._heard_at if self._unread else 0.0

    async def generate(self, requests: Sequence[Generate], deadline: float) -> AsyncIterator[Output]:
        """What each step gives one of the requests, until all have ended. Leaving the iteration aborts them.

        What a slow reader has not read of a request is one output, which grows.

        Raises:
            EngineEndedError: the process has ended, or ``fail_all`` was called.
            RequestAbortedError: ``abort`` was called for one of them.
            TimeoutError: ``deadline``, of the event loop's clock, has come.
            OverflowError: an integer among the sampling parameters has more than 64 bits.
        """
        if self.ended is not None:
            raise EngineEndedError(self.ended)
        frames = [framed(encode(request)) for request in requests]
        if not self._unread:
            self._heard_at = time.monotonic()
        unread, open_ids = _Unread(), {request.request_id for request in requests}
        assert not open_ids & self._unread.keys(), open_ids
        self._unread |= dict.fromkeys(open_ids, unread)
        # One timer for all: a timeout around each wait would cost as much as what is waited for.
        timer = asyncio.get_running_loop().call_at(deadline, unread.fail, TimeoutError())
        writer = self._writer
        writer.writelines(frames)
        try:
            while open_ids:
                output = await unread.next()
                if output.has_ended:
                    open_ids.remove(output.request_id)
                yield output
        finally:
            timer.cancel()
            left = [request_id for request_id in open_ids if self._unread.pop(request_id, None) is not None]
            if left and self.ended is None and self._writer is writer and not writer.is_closing():
                self._send(Abort(left))  # to the process that has them: another one may have been started

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests, if they have not ended: they raise a ``RequestAbortedError``."""
        for request_id in request_ids:
            if request_id in self._unread:
                self._unread[request_id].fail(RequestAbortedError())

    @property
    def unfinished(self) -> list[str]:
        """Ids of requests that have not ended."""
        return list(self._unread)

    def fail_all(self, reason: str) -> None:
        """All requests raise an ``EngineEndedError`` with this reason, and the engine drops them."""
        for unread in self._unread.values():
            unread.fail(EngineEndedError(reason))

    async def stats(self) -> dict[str, Any]:
        """The engine's statistics, between two steps. ``EngineEndedError`` as ``generate``."""
        return (await self._ask(Ask)).stats

    async def reset_prefix_cache(self) -> None:
        """Forget cached prompts.

        Raises:
            RuntimeError: requests have not ended.
            EngineEndedError: as ``generate``.
        """
        error = (await self._ask(lambda number: Ask(number, resets_prefix_cache=True))).error
        if error is not None:
            raise RuntimeError(error)

    async def read_adapter(self, adapter: AdapterRef) -> None:
        """Have an adapter read, and checked.

        Raises:
            FileNotFoundError: it is not there.
            ValueError: it cannot be served, with the reason.
            EngineEndedError: as ``generate``.
        """
        answer = await self._ask(lambda number: ReadAdapter(number, adapter))
        if answer.error is not None:
            raise (FileNotFoundError if answer.is_missing else ValueError)(answer.error)

    def drop_adapter(self, adapter: AdapterRef) -> None:
        """Have an adapter forgotten, but for the requests that have it."""
        if self.ended is None:
            self._send(DropAdapter(adapter))

    async def _ask(self, question: Callable[[int], Ask | ReadAdapter]) -> Answer:
        if self.ended is not None:
            raise EngineEndedError(self.ended)
        self._num_questions += 1
        answer = self._questions[self._num_questions] = asyncio.get_running_loop().create_future()
        self._send(question(self._num_questions))
        return await answer

    async def close(self) -> None:
        """End the process, whatever it does."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        try:
            await asyncio.to_thread(self._process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()

    # -- Messages

    def _send(self, message: ToEngine) -> None:
        self._writer.write(framed(encode(message)))

    async def _receive(self) -> Any:
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
            return decode_for_server(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EngineEndedError(await self._how_it_ended()) from error

    async def _how_it_ended(self) -> str:
        return f"the engine's process has ended: {described_end(await asyncio.to_thread(self._process.wait))}"

    async def _read(self) -> None:
        """Hand out messages until the process ends; then say so to everyone who waits."""
        try:
            while True:
                message = await self._receive()
                self._heard_at = time.monotonic()
                if isinstance(message, Outputs):
                    self.num_running, self.num_waiting = message.num_running, message.num_waiting
                    for output in message.outputs:
                        self._hand_out(output)
                else:
                    assert isinstance(message, Answer)
                    question = self._questions.pop(message.number)
                    if not question.done():
                        question.set_result(message)
        except EngineEndedError as error:
            self.ended = str(error)
            self.fail_all(self.ended)
            for question in self._questions.values():
                if not question.done():
                    question.set_exception(error)
            self._questions.clear()

    def _hand_out(self, output: Output) -> None:
        unread = self._unread.get(output.request_id)
        if unread is None:
            return  # aborted meanwhile
        if output.has_ended:
            del self._unread[output.request_id]
        unread.put(output)

    async def wait_ended(self) -> None:
        """Until the process ends. For after ``ready``."""
        await asyncio.shield(self._reading)


class _Unread:
    """Outputs that were not read yet, one for each engine's request of a client."""

    def __init__(self) -> None:
        self._outputs: dict[str, Output] = {}
        self._error: EngineEndedError | RequestAbortedError | TimeoutError | None = None
        self._news = asyncio.Event()

    def put(self, output: Output) -> None:
        earlier = self._outputs.get(output.request_id)
        self._outputs[output.request_id] = output if earlier is None else _joined(earlier, output)
        self._news.set()

    def fail(self, error: EngineEndedError | RequestAbortedError | TimeoutError) -> None:
        self._error = error
        self._news.set()

    async def next(self) -> Output:
        while not self._outputs and self._error is None:
            self._news.clear()
            await self._news.wait()
        if self._outputs and not isinstance(self._error, TimeoutError):
            return self._outputs.pop(next(iter(self._outputs)))
        assert self._error is not None
        raise self._error


def _joined(earlier: Output, later: Output) -> Output:
    """Two deltas as one."""
    pieces = {piece.index: piece for piece in earlier.pieces}
    for piece in later.pieces:
        first = pieces.get(piece.index)
        pieces[piece.index] = piece if first is None else _joined_pieces(first, piece)
    return Output(
        later.request_id,
        list(pieces.values()),
        later.num_cached_tokens,
        earlier.prompt_logprobs or later.prompt_logprobs,
        later.times,
        later.error,
        later.is_fault,
    )


def _joined_pieces(first: Piece, second: Piece) -> Piece:
    logprobs = None
    if second.logprobs is not None:
        logprobs = [*(first.logprobs or []), *second.logprobs]
    return Piece(
        first.index,
        first.text + second.text,
        [*first.token_ids, *second.token_ids],
        logprobs,
        second.finish_reason,
        second.stop_reason,
    )
