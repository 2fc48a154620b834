"""Arguments that a model writes as plain text or as Python's literals -> JSON."""

import ast
import json
from collections.abc import Mapping
from typing import Any

_COMPOSED = {"$ref", "allOf", "anyOf", "oneOf", "properties", "items", "enum", "const"}
_LITERALS = {"True": True, "False": False, "None": None}


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def is_plain_text(schema: Any) -> bool:
    """Whether a value between tags is text as it stands, by its schema; else it is JSON."""
    kinds = _types(schema)
    return "string" in kinds or not (kinds or (isinstance(schema, Mapping) and _COMPOSED & schema.keys()))


def of_schema(text: str, schema: Any) -> str:
    """A text as JSON: a string if ``schema`` lets it be one, else what it spells, else a string all the same."""
    kinds = _types(schema)
    if kinds == {"string"}:
        return dumps(text)
    plain = text.strip()
    try:
        value = _LITERALS[plain] if plain in _LITERALS else json.loads(plain, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return dumps(text)
    return dumps(text) if "string" in kinds and value is not None else dumps(value)


def of_python(text: str) -> str:
    """A literal of Python, or of JSON, as JSON; what is neither is a string."""
    for read in (json.loads, ast.literal_eval):
        try:
            return json.dumps(read(text), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return dumps(text)


def _types(schema: Any) -> set[str]:
    """The types that a schema names; empty: it names none."""
    if not isinstance(schema, Mapping):
        return set()
    found = schema.get("type", [])
    kinds = {found} if isinstance(found, str) else {kind for kind in found if isinstance(kind, str)}
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        for one in alternatives if isinstance(alternatives, list) else ():
            kinds |= _types(one)
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not kinds and isinstance(listed, list) and all(isinstance(one, str) for one in listed):
        return {"string"}
    return kinds


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no value of JSON")
