"""This process: signals that stop it, and output streams that fail or that nobody reads."""

import contextlib
import io
import os
import select
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """SIGINT and SIGTERM, while it is entered. The first one raises ``KeyboardInterrupt(signal number)``.

    Within ``gracefully`` the first one is only noted, for the run to stop at a good moment, and the second one raises.
    What comes after one that raised ends the process at once, also while Python shuts down. A signal that is ignored at
    the start, because the parent process set that, stays ignored.

    Attributes:
        number: of the first signal; None: none came.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._is_graceful = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self._handlers = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
        for number in self._handlers:
            signal.signal(number, self._take)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._take:
                signal.signal(number, handler)

    @contextlib.contextmanager
    def gracefully(self) -> Iterator[None]:
        self._is_graceful = True
        try:
            yield
        finally:
            self._is_graceful = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        is_first, self.number = self.number is None, self.number or number
        if is_first and self._is_graceful:
            return
        for each in self._handlers:
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt(number)


class GuardedStream:
    """stdout or stderr whose writes never raise, so that a closed pipe or a full disk does not end a run.

    Characters that its encoding lacks are written as escapes.

    Attributes:
        failure: the first error of a write; from then on all text is dropped.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or open(os.devnull, "w")  # None: the process was started without it  # noqa: SIM115
        self.failure: OSError | None = None
        if isinstance(self._stream, io.TextIOWrapper):
            self._stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Discard all text, also what is still in the buffer: Python writes that at its end."""
        self.failure = self.failure or error
        with contextlib.suppress(OSError):  # it has no file descriptor
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


class UnwaitingStream(GuardedStream):
    """A log whose writes do not wait for a reader: what a pipe or a terminal has no room for is dropped.

    How many lines that were is said before the next one that finds room. A stream without a descriptor is only guarded.
    """

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__(stream)
        self._text, self._num_dropped, self._lock = "", 0, threading.RLock()
        self._descriptor: int | None = None
        self._poll = select.poll()
        with contextlib.suppress(OSError):
            self._descriptor = self._stream.fileno()
            self._poll.register(self._descriptor, select.POLLOUT)

    def write(self, text: str) -> int:
        if self._descriptor is None:
            return super().write(text)
        with self._lock:
            self._text += text
            if "\n" in text:
                self.flush()
        return len(text)

    def flush(self) -> None:
        super().flush()
        with self._lock:
            text, self._text = self._text, ""
            if text and self._num_dropped and self._poll.poll(0):
                text = f"{self._num_dropped} lines of this log are missing: nobody read it\n{text}"
                self._num_dropped = 0
            data = text.encode(errors="backslashreplace")
            for start in range(0, len(data), select.PIPE_BUF):  # a pipe that has room takes so many bytes
                if not self._poll.poll(0):
                    self._num_dropped += data.count(b"\n", start)
                    return
                self._send(data[start : start + select.PIPE_BUF])

    def _send(self, data: bytes) -> None:
        assert self._descriptor is not None
        try:
            os.write(self._descriptor, data)
        except OSError as error:
            self._drop(error)
