"""Forty and more JSON schemas as people write them: tool arguments, records, unions, formats."""

from __future__ import annotations

from typing import Any

import jsonschema

Schema = dict[str, Any]
S: Schema = {"type": "string", "maxLength": 8}
I: Schema = {"type": "integer", "minimum": 0, "maximum": 999}  # noqa: E741


FORMATS = jsonschema.FormatChecker(("date", "uuid", "ipv4", "email"))
"""The formats that jsonschema judges as the standard does; its "time" wants one without an offset."""


def obj(required: list[str] | None = None, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def arr(items: Schema, low: int = 0, high: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


SCHEMAS: dict[str, Schema] = {
    "city": obj(city=S),
    "city_days": obj(city=S, days={"type": "integer", "minimum": 1, "maximum": 9}),
    "empty": obj(),
    "optional": obj(["a"], a=S, b=I),
    "all_optional": obj([], a=S, b=I, c={"type": "boolean"}),
    "nested": obj(user=obj(name=S, age=I), ok={"type": "boolean"}),
    "deep": obj(a=obj(b=obj(c=obj(d=I)))),
    "list_of_strings": arr(S),
    "list_of_objects": arr(obj(id=I, tag=S), 1, 2),
    "matrix": arr(arr(I, 2, 2), 1, 2),
    "tuple": {
        "type": "array",
        "prefixItems": [S, I],
        "items": False,
        "minItems": 2,
        "maxItems": 2,
    },
    "enum": {"enum": ["red", "green", "blue"]},
    "enum_mixed": {"enum": [1, "one", None, True]},
    "const": {"const": "fixed"},
    "const_object": {"const": {"a": [1, 2]}},
    "integer": {"type": "integer", "minimum": -5, "maximum": 5},
    "exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 4},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "nullable": {"type": ["string", "null"], "maxLength": 4},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
    "pattern_inside": obj(code={"type": "string", "pattern": "^(a|b)+$", "maxLength": 6}),
    "date": obj(when={"type": "string", "format": "date"}),
    "date_time": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "uuid": obj(id={"type": "string", "format": "uuid"}),
    "ipv4": {"type": "string", "format": "ipv4"},
    "any_of": {"anyOf": [I, obj(name=S)]},
    "any_of_nested": obj(value={"anyOf": [S, I, {"type": "null"}]}),
    "one_of_kinds": {
        "oneOf": [obj(kind={"const": "cat"}, lives=I), obj(kind={"const": "dog"}, barks=I)]
    },
    "all_of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    "defs": {
        "$defs": {"point": obj(x=I, y=I)},
        **obj(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "recursive": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": I,
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "map_of_integers": {
        "type": "object",
        "additionalProperties": I,
        "maxProperties": 2,
    },
    "pattern_properties": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "min_properties": {
        "type": "object",
        "properties": {"a": I, "b": I},
        "additionalProperties": False,
        "minProperties": 1,
    },
    "unicode_keys": obj(größe=I, 日本={"type": "boolean"}),
    "quotes_in_keys": obj(**{'say "hi"': I, "back\\slash": I}),
    "many_fields": obj(**{f"field_{i}": {"type": "boolean"} for i in range(8)}),
    "long_enum": {"enum": [f"value number {i}" for i in range(60)]},
    "person": obj(
        name=S,
        email={"type": "string", "format": "email", "maxLength": 20},
        roles=arr({"enum": ["admin", "user"]}, 1, 2),
    ),
}
