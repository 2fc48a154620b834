"""Which cases of a sweep the ordinary run takes: a sample with each value of each axis. A battery has the others."""

import random
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def drawn(values: Mapping[str, Collection[str]], count: int) -> set[str]:
    """Names of ``count`` cases or more, always the same ones. ``values``: name of a case -> its value on each axis.

    Each value is one of a case that is drawn.
    """
    order = random.Random(0).sample(sorted(values), len(values))
    seen: set[str] = set()
    names: list[str] = []
    for name in order:
        if not seen.issuperset(values[name]):
            names.append(name)
            seen.update(values[name])
    others = [name for name in order if name not in names]
    return {*names, *others[: max(0, count - len(names))]}


def parts_of(names: Iterable[str]) -> dict[str, list[str]]:
    """For names that are made of values: ``decode-gqa4-h64`` has the values ``decode``, ``gqa4`` and ``h64``."""
    return {name: name.split("-") for name in names}


def cases(values: Mapping[str, Collection[str]], count: int, arguments: Mapping[str, tuple[Any, ...]]) -> list[Any]:
    """Arguments of ``pytest.mark.parametrize`` for all cases, those that are not drawn marked as a battery."""
    ordinary = drawn(values, count)
    marks = {name: () if name in ordinary else pytest.mark.battery for name in values}
    return [pytest.param(*arguments[name], id=name, marks=marks[name]) for name in values]


def marked(names: Iterable[str], ordinary: Collection[str]) -> list[Any]:
    """Values of ``pytest.mark.parametrize`` for all ``names``, those that are not ``ordinary`` marked as a battery."""
    names = list(names)
    assert set(ordinary) <= set(names), f"no such cases: {set(ordinary) - set(names)}"
    return [pytest.param(name, id=name, marks=() if name in ordinary else pytest.mark.battery) for name in names]


def ids_in_this_run(request: pytest.FixtureRequest, function: str) -> list[str]:
    """The ids of the cases of ``function``, a test of the same file, that this run has."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    return [item.callspec.id for item in items if item.originalname == function]
