"""Values of a ``config.json``: sizes, ids and dtype, checked before anything is made of them, and types of all."""

import types
import typing
from typing import Any

from compiled_llm.models.config import DTYPES

# The largest value of each size. Checked before transformers sees them: its classes make lists of some lengths.
MOST = {
    "num_hidden_layers": 1024,
    "head_dim": 2**16,
    "hidden_size": 2**24,
    "intermediate_size": 2**24,
    "max_position_embeddings": 2**31 - 1,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "vocab_size": 2**24,
}


def check_size(name: str, value: Any, stated_as: str | None = None) -> None:
    """``ValueError`` unless ``value`` is an integer from 1 to the largest that ``name`` may be.

    ``stated_as``: the name that the file has for it, if another.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST[name]:
        raise ValueError(
            f"config.json: {stated_as or name} must be an integer from 1 to {MOST[name]}, given {value!r:.100}"
        )


def check_given_sizes(config: dict[str, Any], config_class: Any) -> None:
    """The same of each size that a parsed ``config.json`` gives, by the names of transformers' class or its usual one.

    Beforehand: the class makes lists of some lengths, of which null is left to it.
    """
    for name in MOST:
        for given in [
            one for one in dict.fromkeys((config_class.attribute_map.get(name, name), name)) if one in config
        ]:
            if config[given] is not None:
                check_size(name, config[given], given)


def eos_token_ids(config: dict[str, Any], generation: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The end-of-text ids of ``config.json`` and ``generation_config.json``. ``ValueError`` for one that is none."""
    ids = set()
    for name, source in (("config.json", config), ("generation_config.json", generation)):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"{name}: eos_token_id must be a token id or a list of them, from 0 to {vocab_size - 1} (one below "
                    f"config.json's vocab_size), given {value!r:.200}"
                )
            ids.add(token)
    return tuple(sorted(ids))


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
