"""``ValueError`` for arguments out of their range: with the name, what is allowed and what was given."""

import dataclasses
import functools
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from compiled_llm.api.names import value_hint
from compiled_llm.api.readable import shown


def check_fields(owner: Any, whole: Mapping[str, tuple[int, int]], ranges: Mapping[str, tuple[float, float]]) -> None:
    """``ValueError`` unless the fields of a dataclass are as allowed, which defaults are.

    A field whose type is a ``Literal`` is one of its values, one whose default is a bool is a bool.

    Args:
        whole, ranges: by field: the least and the largest integer; the least and the largest number.
    """
    for name, default, allowed, is_flag in _described_fields(owner.__class__):
        value = getattr(owner, name)
        if value is default:
            continue
        if allowed:
            one_of(name, value, allowed)
        if name in whole:
            integer(name, value, *whole[name])
        if name in ranges:
            number(name, value, *ranges[name])
        if is_flag and not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, given {shown(value)}")


@functools.cache
def _described_fields(owner: type) -> list[tuple[str, Any, tuple[str, ...], bool]]:
    """Of each field: its name and default, the values of a ``Literal``, whether it is a bool."""
    return [
        (
            field.name,
            field.default,
            typing.get_args(field.type) if typing.get_origin(field.type) is Literal else (),
            isinstance(field.default, bool),
        )
        for field in dataclasses.fields(owner)
    ]


def number(name: str, value: Any, low: float, high: float) -> None:
    """``ValueError`` unless ``value`` is an int or float within ``low..high``."""
    # An integer may be too large for a float, and NaN lies nowhere.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low} to {high}, given {shown(value)}")


def integer(name: str, value: Any, low: int, high: int) -> None:
    """``ValueError`` unless ``value`` is an int within ``low..high``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, given {shown(value)}")


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """``ValueError`` unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, given {value!r}{value_hint(name, value)}"
        )


def integers(name: str, value: Any, low: int, high: int) -> tuple[int, ...]:
    """A list of different integers within ``low..high`` as a sorted tuple; it may be empty."""
    wanted = f"{name} must be a list of different integers from {low} to {high}"
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ValueError(f"{wanted}, given {value!r}")
    items = list(value)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or not low <= item <= high:
            raise ValueError(f"{wanted}, given {item!r} in {items!r}")
    if len(set(items)) < len(items):
        raise ValueError(f"{wanted}, given duplicates in {items!r}")
    return tuple(sorted(items))


def sizes(name: str, value: Any) -> tuple[int, ...]:
    """A list of bucket sizes as a sorted tuple: different positive integers, at least one."""
    items = integers(name, value, 1, 2**20)
    if not items:
        raise ValueError(f"{name} must hold at least one size, given an empty list")
    return items


def names(name: str, value: Any) -> tuple[str, ...]:
    """A list of non-empty strings as a tuple; it may be empty."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of names, given {shown(value)}")
    items = tuple(value)
    for item in items:
        if not isinstance(item, str) or not item:
            raise ValueError(f"{name} must be a list of names as non-empty str, given {shown(item)} in it")
    return items


class UnservableError(ValueError):
    """What every such request needs is missing or wrong: a tokenizer, a chat template, an end-of-text token.

    Methods that serve lists of prompts raise it. Any other ``ValueError`` of a prompt or its parameters ends that
    request alone.
    """
