"""TextSource: a text that comes in pieces, read by generators that wait for more of it.

Each method that may wait is a generator: ``found = yield from source.next(marks)``. It yields where it needs more text,
and what it returns does not depend on how the text was cut.
"""

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

Result = TypeVar("Result")
Waiting = Generator[None, None, Result]


class TextSource:
    """Attributes:
    rest: what has come and was not read yet.
    has_ended: no more text comes.
    """

    def __init__(self) -> None:
        self.rest, self.has_ended = "", False
        self._kept: list[str] | None = None

    def keep(self, text: str = "") -> None:
        """Remember ``text`` and what is read from now on, for the case that it turns out to be something else."""
        self._kept = [text]

    def kept(self) -> str:
        """What is remembered; it is forgotten now."""
        text, self._kept = "".join(self._kept or ()), None
        return text

    def until(self, marks: Sequence[str], show: Callable[[str], None]) -> Waiting[str | None]:
        """Read up to the first of ``marks`` and past it, and return it; None: the text ended before.

        Args:
            show: gets the text before it, as it comes; only an end that may become a mark is held back.
        """
        pattern, beginnings = _prepared(tuple(marks))
        longest = max(map(len, marks), default=0)
        while True:
            length = len(self.rest)
            found = pattern.search(self.rest)
            ends = range(max(0, length - longest + 1), length)
            held = length if self.has_ended else next((at for at in ends if self.rest[at:] in beginnings), length)
            if found is not None and (found.start() < held or self.has_ended):
                self._show(found.start(), show)
                return self._read(len(found[0]))
            self._show(held, show)
            if self.has_ended:
                return None
            yield

    def taken_until(self, marks: Sequence[str]) -> Waiting[tuple[str, str | None]]:
        """(the text before the first of ``marks``, that mark), as ``until``."""
        pieces: list[str] = []
        mark = yield from self.until(marks, pieces.append)
        return "".join(pieces), mark

    def next(self, marks: Sequence[str]) -> Waiting[str | None]:
        """Read past white space and the one of ``marks`` that comes after it, and return it; None: none does."""
        while True:
            start = len(self.rest) - len(self.rest.lstrip())
            text = self.rest[start:]
            for mark in marks:
                if text.startswith(mark):
                    self._read(start + len(mark))
                    return mark
            if self.has_ended or (text and not any(mark.startswith(text) for mark in marks)):
                return None
            yield

    def match(self, whole: re.Pattern[str], begun: re.Pattern[str]) -> Waiting[str | None]:
        """Read past what ``whole`` matches next, and return it; None: it does not.

        Args:
            begun: matches all that may still become such a text.
        """
        while True:
            found = whole.match(self.rest)
            if found is not None:
                return self._read(found.end())
            if self.has_ended or not begun.fullmatch(self.rest):
                return None
            yield

    def value(self, show: Callable[[str], None], quotes: str = '"', ends: str = "<") -> Waiting[None]:
        """Read a value of JSON, as it is written, but for white space before it. ``show`` gets it as it comes.

        It ends after its last bracket or quote; before one of ``ends`` outside of a string, where a value that is not
        complete is followed by a mark; or, if it has neither brackets nor quotes, before what may follow a value.

        Args:
            quotes: that may be around strings.
        """
        depth, quote, is_escaped, is_begun = 0, "", False, False
        yield from self.next(())
        self._read(len(self.rest) - len(self.rest.lstrip()))
        while True:
            for at, character in enumerate(self.rest):
                if quote:
                    if is_escaped or character == "\\":
                        is_escaped = not is_escaped
                    elif character == quote:
                        quote = ""
                        if not depth:
                            return self._show(at + 1, show)
                elif character in ends or (not depth and is_begun and character in ",)]} \t\r\n"):
                    return self._show(at, show)
                elif character in quotes:
                    quote = character
                elif character in "[{(":
                    depth += 1
                elif character in ")]}":
                    depth -= 1
                    if depth <= 0:
                        return self._show(at + (depth == 0), show)
                is_begun = True
            self._show(len(self.rest), show)
            if self.has_ended:
                return None
            yield

    def taken_value(self, quotes: str = '"', ends: str = "<") -> Waiting[str]:
        """A value as ``value`` reads it, when it has come."""
        pieces: list[str] = []
        yield from self.value(pieces.append, quotes, ends)
        return "".join(pieces).strip()

    def is_cut(self, marks: Sequence[str]) -> bool:
        """Where ``next`` found none of ``marks``: whether the text has ended before or amid one."""
        return any(mark.startswith(self.rest.strip()) for mark in marks)

    def back(self, text: str) -> None:
        """``text`` was read last, and is to be read again."""
        self.rest = text + self.rest
        if self._kept is not None:
            self._kept[-1] = self._kept[-1].removesuffix(text)

    def _show(self, length: int, show: Callable[[str], None]) -> None:
        if length:
            show(self._read(length))

    def _read(self, length: int) -> str:
        text, self.rest = self.rest[:length], self.rest[length:]
        if self._kept is not None:
            self._kept.append(text)
        return text


@lru_cache(maxsize=256)
def _prepared(marks: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str]]:
    """What finds the marks, the longest first, and all their beginnings."""
    pattern = "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or "(?!)"
    return re.compile(pattern), frozenset(mark[:length] for mark in marks for length in range(1, len(mark)))
