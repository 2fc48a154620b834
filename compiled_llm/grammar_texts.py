"""Checks what people give as JSON schemas, choices and grammars, and bounds it, before anything is compiled."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from compiled_llm.error_texts import shown

MAX_CHARACTERS = 65_536
MAX_WHITESPACE_PATTERN = 256
_MAX_CHOICES = 4096
_MAX_MULTIPLE = 10_000
# Attributes of a rule that only the library's own sampling loop honours, such as x[temperature=0.5]: /[a-z]+/
_UNSERVED_ATTRIBUTE = re.compile(
    r"^[^\S\n]*[?!]*[\w-]+[^\S\n]*\["
    r'(?:\s*\w+(?:\s*=\s*(?:"[^"\n]*"|/(?:\\.|[^/\\\n])*/|[\w.]+))?\s*,)*'
    r"\s*(temperature|stop)\s*=",
    re.MULTILINE,
)


def check_text(name: str, value: Any, most: int) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a non-empty string, given {shown(value)}")
    if len(value) > most:
        raise ValueError(f"{name} may have {most} characters at most, given {len(value)}")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise ValueError(f"{name} must be Unicode text, given half a surrogate pair")


def schema_text(value: Any) -> str:
    if not isinstance(value, str | Mapping):
        raise ValueError(f"json must be a JSON schema, as text or as a dict, given {type(value).__name__}")
    if isinstance(value, str):
        check_text("json", value, MAX_CHARACTERS)
    try:
        # So many keys of a dict alone are too long.
        given = value if isinstance(value, str) else dict(itertools.islice(value.items(), MAX_CHARACTERS))
        schema = _SCHEMAS.decode(given) if isinstance(given, str) else given
        text = _json_text(schema)
        schema = json.loads(text) if len(text) <= MAX_CHARACTERS else schema  # of JSON's own types
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"json must be a JSON schema, given what is not JSON: {error}") from error
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"json may have {MAX_CHARACTERS} characters at most, given more")
    check_text("json", text, MAX_CHARACTERS)
    if not isinstance(schema, dict):
        raise ValueError(f"json must be a JSON schema that is an object, given {text[:80]}")
    if "x-guidance" in schema:
        raise ValueError("json: x-guidance is not served; use whitespace_pattern or disable_any_whitespace")
    _check_multiples("json", schema)
    return text


def _json_text(schema: dict[str, Any]) -> str:
    """Compact JSON; of a longer one than may be, a part that is too long."""
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    pieces, length = [], 0
    for piece in encoder.iterencode(schema):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_CHARACTERS:
            break
    return "".join(pieces)


def check_grammar(value: Any) -> None:
    check_text("grammar", value, MAX_CHARACTERS)
    if attribute := _UNSERVED_ATTRIBUTE.search(value):
        raise ValueError(
            f"grammar: the attribute {attribute[1]} of a rule is not served; "
            "set the temperature in SamplingParams, and end a rule by suffix or lazy"
        )
    for start in re.finditer(r"%json\s*", value):
        try:
            schema, _ = _SCHEMAS.raw_decode(value, start.end())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"grammar: %json must be followed by a JSON schema: {error}") from error
        _check_multiples("grammar", schema)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"a key occurs twice among {shown([key for key, _ in pairs])}")
    return dict(pairs)


_SCHEMAS = json.JSONDecoder(object_pairs_hook=_unique_keys)


def _check_multiples(name: str, schema: Any) -> None:
    """Limit ``multipleOf``: the library makes a state for each remainder of each value, and of each set of values."""
    multiple, nodes = 1, [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            value = node.get("multipleOf")
            if isinstance(value, int | float) and 0 < value < math.inf:
                number = Decimal(str(value)).normalize().as_tuple()
                digits = int("".join(map(str, number.digits)))
                multiple = math.lcm(multiple, digits * 10 ** max(0, int(number.exponent)))
            nodes.extend(node.values())
        elif isinstance(node, list):
            nodes.extend(node)
        if multiple > _MAX_MULTIPLE:
            raise ValueError(
                f"{name}: the least common multiple of all multipleOf must be {_MAX_MULTIPLE} at most "
                "(without decimal points: 0.25 counts as 25)"
            )


def choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"choice must be a list of strings, given {shown(value)}")
    items = tuple(itertools.islice(value, _MAX_CHOICES + 1))
    if not 1 <= len(items) <= _MAX_CHOICES:
        raise ValueError(f"choice must hold 1 to {_MAX_CHOICES} strings, given {'more' if items else 'none'}")
    for item in items:
        check_text("choice", item, MAX_CHARACTERS)
    if sum(map(len, items)) > MAX_CHARACTERS:
        raise ValueError(f"choice may have {MAX_CHARACTERS} characters at most, given {sum(map(len, items))}")
    return items
