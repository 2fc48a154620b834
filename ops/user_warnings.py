"""Warnings that point to the line of the user's program which called this package, however deep they come up."""

import sys
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple, TypeVar

_PACKAGE = "compiled_llm"

Result = TypeVar("Result")


class Place(NamedTuple):
    """A line of a program, as ``warnings.warn_explicit`` takes it."""

    filename: str
    line: int
    module: str
    registry: dict[Any, int]


# Where the call came from that a thread of this package works for: its own frames do not tell.
_CALLED_FROM: ContextVar[Place | None] = ContextVar("called_from", default=None)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """As ``warnings.warn``, at the line that called this package.

    That is the caller of the outermost frame of the package: torch, or a function that the user gave, may be between.
    """
    place = _users_line()
    warnings.warn_explicit(message, category, place.filename, place.line, place.module, place.registry)


def at_callers_line(function: Callable[..., Result]) -> Callable[..., Result]:
    """``function`` for another thread: what it warns of points to the line that called this package now."""
    place = _users_line()

    def call(*args: Any, **options: Any) -> Result:
        before = _CALLED_FROM.set(place)
        try:
            return function(*args, **options)
        finally:
            _CALLED_FROM.reset(before)

    return call


def _users_line() -> Place:
    known = _CALLED_FROM.get()
    if known is not None:
        return known
    found: FrameType = sys._getframe()
    frame: FrameType | None = found
    while frame is not None:
        package = str(frame.f_globals.get("__package__"))
        if package == _PACKAGE or package.startswith(f"{_PACKAGE}."):
            found = frame.f_back or frame
        frame = frame.f_back
    names = found.f_globals
    registry = names.setdefault("__warningregistry__", {})
    return Place(found.f_code.co_filename, found.f_lineno, str(names.get("__name__", "<string>")), registry)
