"""InOrder: lines that come in any order are written in the order of the rows."""

from collections.abc import Callable
from typing import Protocol


class Rows(Protocol):
    def __contains__(self, index: int, /) -> bool: ...


class InOrder:
    """Holds a line until the lines of all rows before it are written.

    So it may hold as many as the rows that run reach ahead: those of the window in which rows are ordered for speed.

    Args:
        write: takes a row's number, its line, and whether that is of an error.
        done: rows whose lines are written already.
    """

    def __init__(self, write: Callable[[int, bytes, bool], None], done: Rows) -> None:
        self._write, self._done = write, done
        self._held: dict[int, tuple[bytes, bool]] = {}
        self._next = 0

    def add(self, index: int, line: bytes, failed: bool) -> None:
        """A line, and whether it is that of an error."""
        self._held[index] = line, failed
        while True:
            if self._next in self._held:
                self._write(self._next, *self._held.pop(self._next))
            elif self._next not in self._done:
                return
            self._next += 1
