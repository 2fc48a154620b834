"""DirectBody: the body of an answer that uvicorn is sending, written without its ``send``.

``send`` is a coroutine for a task, which has to be woken. On a CPU whose caches and cores the engine uses, that costs
several times as much as the event of a stream itself.
"""

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "compiled_llm.direct_body"  # where it is in the extensions of ASGI's scope


class DirectBody:
    """Of one request."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_writable(self) -> bool:
        """Whether the answer has begun in chunks, and its client reads what is sent."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (cycle.flow.write_paused or cycle.disconnected)

    def write(self, data: bytes) -> None:
        """A chunk of bytes, one at least, after those that ``send`` was given. For while it ``is_writable``."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
