"""Fields of a ``quantization_config``, checked: what is not understood is refused by name."""

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from compiled_llm.models.quantized.patterns import matches

_MOST_NAMES = 10_000
_REGEX = set("\\^$+{}()|")  # what makes a pattern without "re:" a regular expression
_REMEDY = "Quantise the model in another way, or load its unquantised weights"


def choice(config: Mapping[str, Any], name: str, allowed: Sequence[Any], default: Any = None) -> Any:
    """``config[name]``, which must be one of ``allowed``."""
    given = config.get(name, default)
    if not any(type(given) is type(one) and given == one for one in allowed):
        shown = " or ".join(repr(one) for one in allowed)
        raise ValueError(f"config.json: {name} of quantization_config must be {shown}, given {given!r:.200}. {_REMEDY}")
    return given


def whole(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """``config[name]``, which must be a whole number."""
    given = config.get(name, default)
    if type(given) is not int:
        raise ValueError(f"config.json: {name} of quantization_config must be a whole number, given {given!r:.200}")
    return given


def table(given: Any, name: str) -> Mapping[str, Any]:
    """``given``, which must be a table."""
    if not isinstance(given, dict):
        raise ValueError(f"config.json: {name} of quantization_config must be a table of fields, given {given!r:.200}")
    return given


def names(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """``config[name]``, a list of texts; none where it is null or not there."""
    given = config.get(name)
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) > _MOST_NAMES or not all(isinstance(x, str) and x for x in given):
        raise ValueError(
            f"config.json: {name} of quantization_config must be a list of at most {_MOST_NAMES} names of modules, "
            f"given {given!r:.200}"
        )
    return tuple(given)


def known(config: Mapping[str, Any], allowed: Collection[str], method: str) -> None:
    """``ValueError`` for a field that has a value and is not one of ``allowed``."""
    unknown = sorted(name for name in config.keys() - set(allowed) if config[name] not in (None, {}, [], False))
    if unknown:
        raise ValueError(
            f"config.json: {unknown[0]!r:.100} of quantization_config is not supported with {method}, given "
            f"{config[unknown[0]]!r:.200}; supported: {', '.join(sorted(allowed))}. {_REMEDY}"
        )


def check_patterns(patterns: Sequence[str]) -> None:
    """``ValueError`` for a regular expression that is not read."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            matches(pattern[3:], "")
        elif _REGEX & set(pattern):
            matches(pattern, "")


def is_named(module: str, patterns: Sequence[str]) -> bool:
    """Whether ``modules_to_not_convert`` names a module: itself, one around it, its end, or with ``*`` for anything."""
    parts = module.split(".")
    around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(module.endswith(pattern) or any(fnmatchcase(name, pattern) for name in around) for pattern in patterns)


def is_within(module: str, patterns: Sequence[str]) -> bool:
    """The same, and parts of the name that follow one another: ``self_attn`` names ``model.layers.0.self_attn.q_proj``.

    So vLLM, transformers before 5 and torchao take them; transformers 5 takes such parts from the name's beginning
    alone. A pattern that begins with ``re:`` is a regular expression of the whole name's beginning; one with other
    signs of a regular expression than ``.`` and ``*`` is one that ends where a part does, as transformers takes it.
    """
    for name in names_of(module):
        for pattern in patterns:
            if pattern.startswith("re:"):
                found = matches(pattern[3:], name)
            elif _REGEX & set(pattern):
                found = matches(f"(?:{pattern})(?:\\..*)?$", name)
            else:
                found = f".{pattern.strip('.')}." in f".{name}." or is_named(name, [pattern])
            if found:
                return True
    return False


def names_of(module: str) -> tuple[str, ...]:
    """Names of a language model's ``module``: its own, and those that it has in models with more than text."""
    root, _, rest = module.partition(".")
    return (
        module,
        f"language_model.{module}",
        *((f"{root}.language_model.{rest}", f"{root}.text_model.{rest}") if rest else ()),
    )
