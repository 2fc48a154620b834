"""StructuredOutputsParams: what an output must look like, checked and bounded before any grammar is compiled."""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from compiled_llm.api.names import refuse_unknown_names
from compiled_llm.api.readable import shown

_MAX_CHARACTERS = 65_536
_MAX_WHITESPACE_PATTERN = 256
_MAX_CHOICES = 4096
_MAX_MULTIPLE = 10_000
# Attributes of a rule that only the library's own sampling loop honours, such as x[temperature=0.5]: /[a-z]+/
_UNSERVED_ATTRIBUTE = re.compile(
    r"^[^\S\n]*[?!]*[\w-]+[^\S\n]*\["
    r'(?:\s*\w+(?:\s*=\s*(?:"[^"\n]*"|/(?:\\.|[^/\\\n])*/|[\w.]+))?\s*,)*'
    r"\s*(temperature|stop)\s*=",
    re.MULTILINE,
)


@refuse_unknown_names("field of structured_outputs", {})
@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What a generation must look like: exactly one of the first five. Otherwise: ``ValueError``.

    Attributes:
        json: a JSON schema, as text or as a dict; kept as compact JSON text. Properties come in the schema's order.
        regex: the whole text matches it, in the syntax of Rust's regex crate, without anchors inside, look-around and
            backreferences.
        choice: strings, one of which is the whole text.
        grammar: a context-free grammar in llguidance's variant of the Lark language; the rule ``start`` is the text.
        json_object: True: any JSON object.
        whitespace_pattern: of json and json_object: a regex of the whitespace that may be wherever JSON allows some.
            None: up to 64 of JSON's whitespace characters.
        disable_any_whitespace: of json and json_object: no whitespace between JSON's tokens.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"structured outputs: exactly one of {', '.join(kinds)} must be given, given {given}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.regex is not None:
            _check_text("regex", self.regex, _MAX_CHARACTERS)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.grammar is not None:
            _check_grammar(self.grammar)
        if self.json_object is not None and self.json_object is not True:
            raise ValueError(f"json_object must be True or None, given {shown(self.json_object)}")
        if not isinstance(self.disable_any_whitespace, bool):
            given_flag = shown(self.disable_any_whitespace)
            raise ValueError(f"disable_any_whitespace must be True or False, given {given_flag}")
        if self.whitespace_pattern is not None:
            _check_text("whitespace_pattern", self.whitespace_pattern, _MAX_WHITESPACE_PATTERN)
            if self.disable_any_whitespace:
                raise ValueError("give whitespace_pattern or disable_any_whitespace, not both")
        asks_for_whitespace = self.whitespace_pattern is not None or self.disable_any_whitespace
        if asks_for_whitespace and given[0] not in ("json", "json_object"):
            raise ValueError(f"whitespace options belong to json and json_object, given {given[0]}")


def _check_text(name: str, value: Any, most: int) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a non-empty string, given {shown(value)}")
    if len(value) > most:
        raise ValueError(f"{name} may have {most} characters at most, given {len(value)}")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise ValueError(f"{name} must be Unicode text, given half a surrogate pair")


def _schema_text(value: Any) -> str:
    if not isinstance(value, str | Mapping):
        raise ValueError(f"json must be a JSON schema, as text or as a dict, given {type(value).__name__}")
    if isinstance(value, str):
        _check_text("json", value, _MAX_CHARACTERS)
    try:
        # So many keys of a dict alone are too long.
        given = value if isinstance(value, str) else dict(itertools.islice(value.items(), _MAX_CHARACTERS))
        schema = _SCHEMAS.decode(given) if isinstance(given, str) else given
        text = _json_text(schema)
        schema = json.loads(text) if len(text) <= _MAX_CHARACTERS else schema  # of JSON's own types
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"json must be a JSON schema, given what is not JSON: {error}") from error
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"json may have {_MAX_CHARACTERS} characters at most, given more")
    _check_text("json", text, _MAX_CHARACTERS)
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
        if length > _MAX_CHARACTERS:
            break
    return "".join(pieces)


def _check_grammar(value: Any) -> None:
    _check_text("grammar", value, _MAX_CHARACTERS)
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


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"choice must be a list of strings, given {shown(value)}")
    items = tuple(itertools.islice(value, _MAX_CHOICES + 1))
    if not 1 <= len(items) <= _MAX_CHOICES:
        raise ValueError(f"choice must hold 1 to {_MAX_CHOICES} strings, given {'more' if items else 'none'}")
    for item in items:
        _check_text("choice", item, _MAX_CHARACTERS)
    if sum(map(len, items)) > _MAX_CHARACTERS:
        raise ValueError(f"choice may have {_MAX_CHARACTERS} characters at most, given {sum(map(len, items))}")
    return items
