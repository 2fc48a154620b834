"""Values of a ``config.json`` by their type: what is no number, no list or no name where one must be is refused."""

import types
import typing
from typing import Any

from compiled_llm.models.config import DTYPES

_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", types.NoneType: "null"}


def check_own_types(config_class: type, values: dict[str, Any]) -> None:
    """``ValueError`` unless every value has the type that the dataclass ``config_class`` declares for its name."""
    declared = typing.get_type_hints(config_class)
    for name, value in values.items():
        allowed = typing.get_args(declared[name]) if _is_union(declared[name]) else (declared[name],)
        if not any(_has_type(value, kind) for kind in allowed):
            words = " or ".join(_WORDS.get(kind, "a list") for kind in allowed)
            raise ValueError(f"config.json: {name} must be {words}, given {value!r:.200}")


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _has_type(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is tuple:
        element = typing.get_args(kind)[0]
        return isinstance(value, tuple) and all(_has_type(x, element) for x in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is not int or not isinstance(value, bool))


def stated_dtype(config: dict[str, Any], default: str) -> str:
    """The dtype of a parsed ``config.json``, which may be written as "torch.float32"; ``default`` where it has none.

    Raises:
        ValueError: it is none that the engine computes in; the message names the field.
    """
    for name in ("dtype", "torch_dtype"):
        given = config.get(name)
        if given is None:
            continue
        dtype = given.removeprefix("torch.") if isinstance(given, str) else given
        if dtype not in DTYPES:
            raise ValueError(f"config.json: {name} must be one of {', '.join(DTYPES)}, given {given!r:.100}")
        return str(dtype)
    return default
