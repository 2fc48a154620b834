"""JSON schemas of the kinds that people ask for, to test structured output with: pairs of name and schema."""

from typing import Any

_ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "maxLength": 40},
        "city": {"type": "string", "minLength": 1, "maxLength": 20},
        "zip": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"},
    },
    "required": ["street", "city"],
    "additionalProperties": False,
}

_FLAGS = {f"flag_{index:02}": {"type": "boolean"} for index in range(20)}

SCHEMAS: list[tuple[str, dict[str, Any]]] = [
    (
        "person",
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "email": {"type": "string", "format": "email"},
            },
            "required": ["name", "age"],
            "additionalProperties": False,
        },
    ),
    (
        "order",
        {
            "type": "object",
            "properties": {
                "id": {"type": "integer", "minimum": 1},
                "customer": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "address": _ADDRESS},
                    "required": ["name", "address"],
                    "additionalProperties": False,
                },
                "lines": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 5,
                    "items": {
                        "type": "object",
                        "properties": {
                            "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                            "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                            "price": {"type": "number", "minimum": 0},
                        },
                        "required": ["sku", "quantity", "price"],
                        "additionalProperties": False,
                    },
                },
            },
            "required": ["id", "customer", "lines"],
            "additionalProperties": False,
        },
    ),
    ("enum of strings", {"type": "string", "enum": ["positive", "negative", "neutral"]}),
    ("enum of mixed values", {"enum": ["a", 1, 2.5, None, True, ["x", 2], {"k": "v"}]}),
    (
        "shapes told apart by a const",
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0}},
                    "required": ["kind", "radius"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {
                        "kind": {"const": "rectangle"},
                        "width": {"type": "number", "minimum": 0},
                        "height": {"type": "number", "minimum": 0},
                    },
                    "required": ["kind", "width", "height"],
                    "additionalProperties": False,
                },
            ]
        },
    ),
    (
        "tree in $defs",
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "integer"},
                        "children": {"type": "array", "maxItems": 3, "items": {"$ref": "#/$defs/node"}},
                    },
                    "required": ["value", "children"],
                    "additionalProperties": False,
                }
            },
        },
    ),
    (
        "list that refers to itself",
        {
            "type": "object",
            "properties": {"head": {"type": "boolean"}, "tail": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
            "required": ["head", "tail"],
            "additionalProperties": False,
        },
    ),
    (
        "integers with bounds",
        {
            "type": "object",
            "properties": {
                "percent": {"type": "integer", "minimum": 0, "maximum": 100},
                "offset": {"type": "integer", "exclusiveMinimum": -17, "exclusiveMaximum": 17},
                "step": {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 25},
            },
            "required": ["percent", "offset", "step"],
            "additionalProperties": False,
        },
    ),
    (
        "numbers with bounds",
        {
            "type": "object",
            "properties": {
                "latitude": {"type": "number", "minimum": -90, "maximum": 90},
                "longitude": {"type": "number", "minimum": -180, "exclusiveMaximum": 180},
                "probability": {"type": "number", "minimum": 0, "maximum": 1},
            },
            "required": ["latitude", "longitude", "probability"],
            "additionalProperties": False,
        },
    ),
    (
        "strings with lengths",
        {
            "type": "object",
            "properties": {
                "code": {"type": "string", "minLength": 4, "maxLength": 4},
                "summary": {"type": "string", "minLength": 1, "maxLength": 80},
            },
            "required": ["code", "summary"],
            "additionalProperties": False,
        },
    ),
    (
        "strings with patterns",
        {
            "type": "object",
            "properties": {
                "phone": {"type": "string", "pattern": "^\\+[1-9][0-9]{6,14}$"},
                "colour": {"type": "string", "pattern": "^#[0-9a-f]{6}$"},
                "version": {"type": "string", "pattern": "^v(0|[1-9][0-9]{0,3})\\.(0|[1-9][0-9]{0,3})$"},
            },
            "required": ["phone", "colour", "version"],
            "additionalProperties": False,
        },
    ),
    (
        "strings with formats",
        {
            "type": "object",
            "properties": {
                "id": {"type": "string", "format": "uuid"},
                "day": {"type": "string", "format": "date", "pattern": "^20"},
                "host": {"type": "string", "format": "ipv4"},
            },
            "required": ["id", "day", "host"],
            "additionalProperties": False,
        },
    ),
    ("map to integers", {"type": "object", "additionalProperties": {"type": "integer"}}),
    (
        "values that may be null",
        {
            "type": "object",
            "properties": {
                "nickname": {"type": ["string", "null"]},
                "score": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                "nothing": {"type": "null"},
            },
            "required": ["nickname", "score", "nothing"],
            "additionalProperties": False,
        },
    ),
    (
        "tuple",
        {
            "type": "array",
            "prefixItems": [{"type": "string", "maxLength": 10}, {"type": "integer"}, {"type": "boolean"}],
            "items": False,
            "minItems": 3,
        },
    ),
    (
        "unicode names and values",
        {
            "type": "object",
            "properties": {
                "größe": {"type": "integer"},
                "城市": {"enum": ["北京", "上海"]},
                "emoji 🚀": {"const": 'naïve "quoted" \\ tab\t🌍'},
            },
            "required": ["größe", "城市", "emoji 🚀"],
            "additionalProperties": False,
        },
    ),
    (
        "everything optional, others allowed",
        {
            "type": "object",
            "properties": {"title": {"type": "string"}, "year": {"type": "integer"}, "tags": {"type": "array"}},
        },
    ),
    (
        "allOf",
        {
            "allOf": [
                {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
                {
                    "type": "object",
                    "properties": {"id": {"minimum": 10, "maximum": 20}, "label": {"enum": ["x", "y"]}},
                    "required": ["label"],
                },
            ]
        },
    ),
    (
        "tool call",
        {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {
                            "name": {"const": "get_weather"},
                            "arguments": {
                                "type": "object",
                                "properties": {
                                    "city": {"type": "string"},
                                    "unit": {"enum": ["celsius", "fahrenheit"], "default": "celsius"},
                                },
                                "required": ["city"],
                                "additionalProperties": False,
                            },
                        },
                        "required": ["name", "arguments"],
                        "additionalProperties": False,
                    },
                    {
                        "type": "object",
                        "properties": {"name": {"const": "stop"}, "arguments": {"type": "object", "maxProperties": 0}},
                        "required": ["name", "arguments"],
                        "additionalProperties": False,
                    },
                ]
            },
        },
    ),
    (
        "many properties",
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "Settings",
            "description": "Twenty flags, most of them optional, and a list of levels.",
            "type": "object",
            "properties": {**_FLAGS, "levels": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 4}},
            "required": ["flag_00", "flag_19", "levels"],
            "additionalProperties": False,
        },
    ),
]
