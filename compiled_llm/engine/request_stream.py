"""RequestStream: the outputs of one request, one a token, as an iterator that owns the request."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator

from compiled_llm.api.outputs import RequestOutput


class RequestStream(Iterator[RequestOutput]):
    """What ``CompiledEngine.stream`` returns. Closing it early, or dropping it, aborts the request."""

    def __init__(self, advance: Callable[[], None], end: Callable[[], None]) -> None:
        self.outputs: deque[RequestOutput] = deque()  # filled by the engine as it steps
        self._advance = advance
        self._end: Callable[[], None] | None = end

    def __repr__(self) -> str:
        return f"<RequestStream: {'ended' if self._end is None else 'running'}, {len(self.outputs)} outputs not read>"

    def __next__(self) -> RequestOutput:
        while not self.outputs:
            if self._end is None:
                raise StopIteration
            self._advance()
        output = self.outputs[0]
        if output.finished:
            self._finish()
        del self.outputs[0]  # last, so that an interrupt loses no output
        return output

    def close(self) -> None:
        """Abort the request, if it is not finished. Further outputs are not yielded."""
        self._finish()
        self.outputs.clear()

    def _finish(self) -> None:
        if self._end is not None:
            self._end()
            self._end = None


class StreamReference(weakref.ref[RequestStream]):
    """A weak reference to a stream. When the stream is garbage collected, this is appended to ``dropped``.

    The garbage collector may find that out at any moment, in the middle of a step too. An interrupt raised in a
    ``__del__`` would be ignored, and the stream forgotten; appending to a deque is no Python code, so none is.
    """

    def __new__(cls, stream: RequestStream, request_id: str, dropped: "deque[StreamReference]") -> "StreamReference":
        return super().__new__(cls, stream, dropped.append)

    def __init__(self, stream: RequestStream, request_id: str, dropped: "deque[StreamReference]") -> None:
        self.request_id = request_id
