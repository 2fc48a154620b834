"""Interrupts: signals wait while the engine changes its state. They are taken between two steps, not two lines.

Python runs the handler of a signal in the main thread, between any two instructions. The one of Ctrl-C raises
``KeyboardInterrupt`` there. Code that moves a request from one queue to another, or counts references of blocks, cannot
be written so that it may end at any instruction. So the engine delays signals while it does such work.
"""

import _signal  # type: ignore[import-not-found]  # what ``signal`` is made of, whose own calls make enums of handlers
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

Handler = Callable[[int, FrameType | None], object]

# Those by which programs are interrupted or timed. Of others the handlers are not expected to raise.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))
# A signal that comes again after so long is not held back any more: the step may never end.
_PATIENCE_SECONDS = 10.0


class Interrupts:
    """``with interrupts:`` holds signals back until its end, or until ``take``. It may be nested.

    Only handlers written in Python are held back, and only in the main thread, since Python runs them nowhere else. A
    signal that comes a second time, 10 seconds or more after the first, is not held back: so a step that hangs can be
    ended. What that interrupts has to be treated as broken.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._handlers: dict[int, Handler] = {}  # the handlers that are replaced
        self._waiting: dict[int, tuple[Handler, float]] = {}  # signals that came: their handlers, and when

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            if self._depth == 0:
                self._replace_handlers()
            self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._depth == 0:
                self._restore_handlers()
                self.take()

    def take(self) -> None:
        """Run the handlers of the signals that came meanwhile: here they may raise."""
        while self._waiting:
            number = next(iter(self._waiting))
            handler, _ = self._waiting.pop(number)
            handler(number, sys._getframe())

    def _replace_handlers(self) -> None:
        try:
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):  # not the system's own, and not one written in C
                    self._handlers[number] = handler
                    _signal.signal(number, self._hold_back)
        except BaseException:  # a signal whose handler was not replaced yet
            self._restore_handlers()
            raise

    def _restore_handlers(self) -> None:
        try:
            self._put_back()
        finally:
            self._put_back()  # the rest, if the first handler that was put back was called at once, and raised

    def _put_back(self) -> None:
        while self._handlers:
            number, handler = next(iter(self._handlers.items()))
            if _signal.getsignal(number) == self._hold_back:  # else it was given another one meanwhile
                _signal.signal(number, handler)
            del self._handlers[number]

    def _hold_back(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        handler, since = self._waiting.get(number) or (self._handlers[number], now)
        if now - since >= _PATIENCE_SECONDS:
            self._waiting.pop(number, None)
            handler(number, frame)
        else:
            self._waiting[number] = handler, since
