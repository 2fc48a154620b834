"""The client of ``bench serve``: streamed completions over HTTP/1.1, at a dozen microseconds of this process an event.

httptools parses HTTP and msgspec the events, on an event loop of uvloop: nothing is done for an event but to note when
it came. aiohttp takes twice as long and httpx five times (docs/log.md), on cores that the server may need.
"""

import asyncio
import math
import resource
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

from compiled_llm.bench.load import Served

_MOST_SHOWN = 300  # characters of an error


class Target(NamedTuple):
    """Where requests go.

    Attributes:
        headers: a line each, without the ends of lines.
    """

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None
    headers: tuple[str, ...]

    @classmethod
    def of(cls, url: str, headers: Sequence[str]) -> "Target":
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        tls = ssl.create_default_context() if secure else None
        return cls(parts.hostname or "", port, parts.path, tls, (f"Host: {parts.netloc}", *headers))

    def request(self, body: bytes) -> bytes:
        lines = (f"POST {self.path} HTTP/1.1", *self.headers, "Content-Type: application/json")
        return "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body


def drive(
    target: Target,
    bodies: Sequence[bytes],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
    *,
    progress: Callable[[], object] = lambda: None,
) -> tuple[list[Served], float, float]:
    """Send the requests as they are due, the earliest first; ``progress`` is called for each that ends.

    Returns:
        The times of each request, the seconds from the start until all had ended, and those of this process's CPU.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection is one
    return uvloop.run(_Load(target, max_concurrency or len(bodies), progress).run(bodies, arrivals))


class _Load:
    def __init__(self, target: Target, seats: int, progress: Callable[[], object]) -> None:
        self._target, self._seats, self._progress = target, asyncio.Semaphore(seats), progress
        self._idle: list[_Connection] = []

    async def run(self, bodies: Sequence[bytes], arrivals: Sequence[float]) -> tuple[list[Served], float, float]:
        requests = [self._target.request(body) for body in bodies]
        cpu, start = time.process_time(), time.monotonic()
        served = [Served(0, start + seconds) for seconds in arrivals]
        async with asyncio.TaskGroup() as tasks:
            for request, one in zip(requests, served, strict=True):
                await asyncio.sleep(max(0.0, one.arrival - time.monotonic()))
                tasks.create_task(self._send(request, one))
        seconds, cpu = time.monotonic() - start, time.process_time() - cpu
        for connection in self._idle:
            connection.transport.close()
        return served, seconds, cpu

    async def _send(self, request: bytes, served: Served) -> None:
        waits = self._seats.locked()
        async with self._seats:
            served.sent = time.monotonic() if waits else served.arrival
            try:
                await self._exchange(request, served)
            except (OSError, httptools.HttpParserError, msgspec.DecodeError) as error:
                served.error = f"{type(error).__name__}: {error}"
        self._progress()

    async def _exchange(self, request: bytes, served: Served) -> None:
        """Over a connection that is kept from a request before, or a new one."""
        target, loop = self._target, asyncio.get_running_loop()
        while True:
            kept = self._idle.pop() if self._idle else None
            connection = (
                kept or (await loop.create_connection(_Connection, target.host, target.port, ssl=target.tls))[1]
            )
            try:
                await connection.send(request, served)
            except ConnectionError:
                if kept is None or kept.has_answered:
                    raise
                continue  # the server has closed it meanwhile, as it may
            if connection.is_kept:
                self._idle.append(connection)
            return


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = ""
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoded = msgspec.json.Decoder(_Event).decode


class _Connection(asyncio.Protocol):
    """A connection to the server, for one request after the other. httptools calls the methods ``on_...``.

    Attributes:
        has_answered: a byte came since the last request.
        is_kept: it may have another request.
    """

    is_kept = has_answered = is_lost = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    async def send(self, request: bytes, served: Served) -> None:
        """Fills ``served`` with what comes, until the answer ends."""
        self._served, self._rest, self._texts = served, b"", list[str]()
        self._usage: _Usage | None = None
        self._last = math.nan  # when the last event with a choice came
        self._parser = httptools.HttpResponseParser(self)
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_kept = self.has_answered = False
        if self.is_lost:
            raise ConnectionError
        served.added = time.monotonic()
        self.transport.write(request)
        try:
            await self._end
        finally:
            if not self.is_kept:
                self.transport.close()
        self._conclude()

    def data_received(self, data: bytes) -> None:
        self._now, self.has_answered = time.monotonic(), True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:  # what a method below raised
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._fail(error or ConnectionError("the server closed the connection before the answer had ended"))

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._rest += body
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                self._take(_decoded(line[5:]))

    def on_message_complete(self) -> None:
        self.is_kept = self._parser.should_keep_alive()
        if not self._end.done():
            self._end.set_result(None)

    def _take(self, event: _Event) -> None:
        served = self._served
        if event.error is not None:
            served.error = str(event.error)[:_MOST_SHOWN]
        if event.usage is not None:
            self._usage = event.usage
        if event.choices:
            self._last = self._now
        text = "".join(_text_of(choice) for choice in event.choices)
        if text:
            self._texts.append(text)
            served.token_times.append(self._now)

    def _conclude(self) -> None:
        served, usage = self._served, self._usage
        status = self._parser.get_status_code()
        if not served.token_times:  # special tokens alone have no text
            served.token_times.append(self._last)
        served.finished, served.text = served.token_times[-1], "".join(self._texts)
        if status != 200:
            served.error = f"status {status}: {self._rest.decode(errors='replace')[:_MOST_SHOWN]}"
        elif usage is None:
            served.error = served.error or "the stream ended without usage, which counts the tokens"
        else:
            served.input_len, served.output_len = usage.prompt_tokens, usage.completion_tokens

    def _fail(self, error: BaseException) -> None:
        if hasattr(self, "_end") and not self._end.done():
            self._end.set_exception(error)


def _text_of(choice: _Choice) -> str:
    delta = choice.delta
    if delta is None:
        return choice.text or ""
    return (delta.content or "") + (delta.reasoning or delta.reasoning_content or "")
