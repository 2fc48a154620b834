"""Budget: what the rendering of a chat template may cost, counted as it goes along."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sized
from copy import copy
from typing import Any

from jinja2 import TemplateRuntimeError
from jinja2.runtime import LoopContext

_MAX_DEPTH = 64  # of lists in lists
_MAX_INTEGER_BITS = 64
_CHARACTERS_PER_STEP = 64  # that an operation reads
BYTES_PER_ITEM = 8  # of a list; a byte costs as much as a character
ESCAPED = 12  # characters that one may become, in JSON, in a repr or in HTML
ITERATOR: type = type(iter([]))


class Budget:
    """Steps and characters that one rendering may still use. Running out of either is a ``TemplateRuntimeError``."""

    def __init__(self, steps: int, characters: int) -> None:
        self._steps = steps
        self._characters = characters

    def step(self, steps: int = 1) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise TemplateRuntimeError("it takes too many steps for messages of this size")

    def fits(self, characters: int) -> None:
        """Refuse what would be more text than is left, before it is made."""
        if characters > self._characters:
            raise TemplateRuntimeError("it makes too much text for messages of this size")

    def use(self, characters: int) -> None:
        self.fits(characters)
        self._characters -= characters

    def make(self, value: Any) -> Any:
        """Pay for a new value and return it. An iterator is run to its end, and one over its items is returned."""
        if isinstance(value, Iterator) and not isinstance(value, ITERATOR):
            return iter(self.make(list(value)))
        self.use(size_in_bytes(value))
        check_integer(value)
        return value

    def glance(self, value: Any) -> None:
        """Pay for going through the items of ``value``, or its text, once."""
        count = count_items(value)
        self.step(count // _CHARACTERS_PER_STEP if isinstance(value, str) else count)

    def read(self, value: Any, depth: int = 0) -> int:
        """Pay for a look at all that is in ``value``. Returns the characters that it has as text, at most."""
        self.step()
        if depth > _MAX_DEPTH:
            raise TemplateRuntimeError(f"it puts lists into lists more than {_MAX_DEPTH} deep")
        if isinstance(value, str):
            self.glance(value)
            return len(value) if depth == 0 else ESCAPED * len(value) + 4
        if isinstance(value, Mapping):
            return 64 + sum(self.read(key, depth + 1) + self.read(item, depth + 1) for key, item in value.items())
        if count_items(value):
            # Of an iterator a copy, so that it stays where it is.
            items: Any = copy(value) if type(value) is ITERATOR else value
            return 64 + sum(self.read(item, depth + 1) for item in items)
        return 64


def size_in_bytes(value: Any) -> int:
    """Of what ``value`` holds itself, not of what is in its items."""
    if isinstance(value, str):
        return len(value)
    return BYTES_PER_ITEM * len(value) if isinstance(value, list | tuple | set | dict) else 0


def check_integer(value: Any) -> None:
    if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
        raise TemplateRuntimeError(f"it uses an integer of more than {_MAX_INTEGER_BITS} bits")


def count_items(value: Any) -> int:
    """Items of a list, a dict and the like, or characters."""
    if isinstance(value, LoopContext):  # its items cannot be seen without taking them
        raise TemplateRuntimeError("it uses 'loop' as a value")
    if isinstance(value, ITERATOR):
        return operator.length_hint(value)
    return len(value) if isinstance(value, Sized) and isinstance(value, Iterable) else 0
