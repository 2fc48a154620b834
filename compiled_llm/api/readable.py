"""How values are shown to people: in error messages, and in the ``repr`` of the objects that a user prints."""

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

_MAX_CHARACTERS = 200


class _Brief(reprlib.Repr):
    """``repr`` that looks at the first items and characters only."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _MAX_CHARACTERS
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = self.maxfrozenset = self.maxdeque = 20

    def repr_str(self, x: Any, level: int) -> str:
        return repr(x) if len(x) <= _MAX_CHARACTERS else f"{x[:_MAX_CHARACTERS]!r}..."

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write integers of more than 4300 digits, and takes long for shorter ones.
        return repr(x) if x.bit_length() <= 512 else f"an integer of {x.bit_length()} bits"

    repr_bytes = repr_bytearray = repr_str


_BRIEF = _Brief()


def shown(value: Any) -> str:
    """``repr(value)``, cut after some 200 characters; never takes longer for a larger value."""
    text = _BRIEF.repr(value)
    return text if len(text) <= _MAX_CHARACTERS + 5 else f"{text[:_MAX_CHARACTERS]}..."


# -- repr of the objects that a user prints


_MAX_TEXT = 200  # characters of a text
_MAX_ITEMS = 16  # of a list or a dict of plain values
_MAX_NESTED = 4  # of a list or a dict of lists, dicts or objects


def readable_repr(instance: Any) -> str:
    """The ``__repr__`` of a dataclass, ``Name(field=value, ...)``.

    Fields with the value of their default are left out. Of a long text the beginning is shown, of a long list the first
    items, each with how much there is.
    """
    fields = (
        f"{field.name}={_brief(getattr(instance, field.name))}"
        for field in dataclasses.fields(instance)
        if field.repr and not _is_default(field, getattr(instance, field.name))
    )
    return f"{type(instance).__name__}({', '.join(fields)})"


def table(title: str, rows: Mapping[str, str]) -> str:
    """``title``, and a line for each row, the texts below each other."""
    width = max(map(len, rows), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows.items())])


def _is_default(field: dataclasses.Field, value: Any) -> bool:
    if field.default is dataclasses.MISSING:
        return False
    # A check may make an empty tuple of None.
    return bool(type(value) is type(field.default) and value == field.default) or (
        field.default is None and value == ()
    )


def _brief(value: Any) -> str:
    if isinstance(value, str | bytes) and len(value) > _MAX_TEXT:
        unit = "characters" if isinstance(value, str) else "bytes"
        return f"{value[:_MAX_TEXT]!r}... ({len(value):,} {unit})"
    if type(value) is list:
        return f"[{_items(value, len(value))}]"
    if type(value) is tuple:
        return f"({_items(value, len(value))}{',' * (len(value) == 1)})"
    if type(value) is dict:
        pairs = (f"{_brief(key)}: {_brief(item)}" for key, item in value.items())
        return f"{{{_joined(pairs, len(value), _most(value.values()))}}}"
    return repr(value)


def _items(values: Iterable[Any], count: int) -> str:
    return _joined(map(_brief, values), count, _most(values))


def _most(values: Iterable[Any]) -> int:
    first = next(iter(values), None)
    return _MAX_ITEMS if first is None or isinstance(first, str | bytes | int | float) else _MAX_NESTED


def _joined(texts: Iterable[str], count: int, most: int) -> str:
    # One item beyond the most is shorter than the words that say so.
    first = [text for _, text in zip(range(count if count <= most + 1 else most), texts, strict=False)]
    return ", ".join(first if len(first) == count else [*first, f"... {count:,} in all"])
