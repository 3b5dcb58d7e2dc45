"""Parses the answer format: ``response_format``, ``structured_outputs`` and other engines' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jserve.api.request.declared import LABEL, Schema, ignored_member
from jserve.api.request.naming import renamed
from jserve.errors import BadRequest, Unsupported
from jserve.sampling import STRUCTURES, StructuredOutputs

TITLES: Schema = {"name": LABEL, "description": ignored_member(), "strict": LABEL}
"""Beside a JSON schema. Every schema is enforced, so ``strict`` asks for nothing."""

SCHEMALESS: tuple[Schema, ...] = (
    {"type": "null"},
    {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"enum": ["text", "json_object"]}},
    },
)
"""Formats that say all there is to say by their name."""

# Schemas of the fields and of their members; the functions below check the values.
FORMAT: Schema = {
    "anyOf": [
        *SCHEMALESS,
        {
            "type": "object",
            "required": ["type", "json_schema"],
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "required": ["schema"],
                    "properties": {"schema": {"type": "object"}, **TITLES},
                },
            },
        },
        {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"const": "structural_tag"},
                "structures": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["begin"],
                        "properties": {
                            "begin": {"type": "string"},
                            "schema": {"type": "object"},
                            "end": {"type": "string"},
                        },
                    },
                },
                "triggers": {"type": "array", "items": {"type": "string", "minLength": 1}},
                "format": {"type": "object"},
            },
        },
    ]
}
_FIELDS = ("response_format", "structured_outputs")
ALIASES = {
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""SGLang's and llama.cpp's names -> members of ``structured_outputs``."""
STRUCTURED: Schema = {
    "type": ["object", "null"],
    "additionalProperties": False,
    "properties": {
        "json": {"type": ["object", "string", "null"]},
        "regex": {"type": ["string", "null"]},
        "choice": {"type": ["array", "null"], "items": {"type": "string", "minLength": 1}},
        "grammar": {"type": ["string", "null"]},
        "json_object": {"type": ["boolean", "null"]},
        "structural_tag": {"type": ["object", "string", "null"]},
        "whitespace_pattern": {"type": ["string", "null"]},
        "disable_any_whitespace": {"type": ["boolean", "null"]},
        "disable_additional_properties": {"type": ["boolean", "null"]},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """The structure that the answer must have, and the request field that asked for it."""

    spec: StructuredOutputs | None = None
    field: str = "structured_outputs"
    """The request field of ``spec``, for errors found when it is compiled."""
    checks: tuple[tuple[str, StructuredOutputs], ...] = ()
    """(request field, its schema): parts of ``spec`` to be compiled apart, so that an error names
    its field."""
    calls: bool = False
    """True where the answer may hold tool calls."""

    @property
    def names(self) -> Mapping[str, str]:
        """The client's names of ``structured_outputs`` and of the one of its members that is set."""
        return structure_names(self.field)

    def under(self, name: Callable[[str], str]) -> AnswerFormat:
        """The same, with its fields as a dialect names them."""
        checks = tuple((name(field), spec) for field, spec in self.checks)
        return replace(self, field=name(self.field), checks=checks)


FREE = AnswerFormat()
"""An answer that may be anything."""


def structure_names(field: str) -> Mapping[str, str]:
    """Names for errors of a structure that came from the request field ``field``."""
    own = "structured_outputs"
    return {} if field == own else {own: field} | {f"{own}.{kind}": field for kind in STRUCTURES}


def format_of(values: Mapping[str, Any]) -> AnswerFormat:
    """The shape that the request's fields ask for, tools apart.

    Raises:
        BadRequest, Unsupported: a member of the wrong type, named; more than one of the fields.
    """
    given = [name for name in (*_FIELDS, *ALIASES) if _asks(name, values.get(name))]
    if len(given) > 1:
        raise BadRequest(f"{given[0]} and {given[1]} exclude each other", field=given[1])
    if not given:
        return FREE
    (name,) = given
    if name in ALIASES:
        return _alias(name, values[name])
    if name == "structured_outputs":
        return AnswerFormat(spec=_structured(values[name]))
    return _format(values[name])


def _asks(name: str, value: Any) -> bool:
    plain = isinstance(value, dict) and value.get("type") == "text"
    return value is not None and not (name == "response_format" and plain)


def _alias(name: str, value: Any) -> AnswerFormat:
    try:
        spec = StructuredOutputs(**{ALIASES[name]: value})
    except BadRequest as e:
        raise renamed(e, structure_names(name)) from None
    return AnswerFormat(spec=spec, field=name)


def _structured(value: Any) -> StructuredOutputs:
    if not isinstance(value, dict):
        raise BadRequest("structured_outputs must be an object", field="structured_outputs")
    for name, option in value.items():
        if option is not None and name not in STRUCTURED["properties"]:
            where = f"structured_outputs.{str(name)[:64]}"
            raise Unsupported(f"{where} is not supported", field=where)
    options = {name: option for name, option in value.items() if option is not None}
    for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
        _typed(options, name, bool)
    _typed(options, "whitespace_pattern", str)
    _typed(options, "choice", list)
    return StructuredOutputs(**options)


def _typed(options: dict[str, Any], name: str, kind: type) -> None:
    if name in options and not isinstance(options[name], kind):
        where = f"structured_outputs.{name}"
        raise BadRequest(f"{where} must be a {kind.__name__}", field=where)


def _format(value: Any) -> AnswerFormat:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "json_object":
        return AnswerFormat(spec=StructuredOutputs(json_object=True), field="response_format")
    if kind == "structural_tag":
        spec = StructuredOutputs(structural_tag={k: v for k, v in value.items() if k != "type"})
        return AnswerFormat(spec=spec, field="response_format")
    if kind != "json_schema":
        raise BadRequest(
            "response_format.type must be text, json_object, json_schema or structural_tag",
            field="response_format.type",
        )
    where = "response_format.json_schema"
    holder = value.get("json_schema")
    if not isinstance(holder, dict):
        raise BadRequest(f"{where} must be an object", field=where)
    schema = holder.get("schema")
    if not isinstance(schema, dict):
        raise BadRequest(f"{where}.schema must be an object", field=f"{where}.schema")
    return AnswerFormat(spec=StructuredOutputs(json=schema), field=f"{where}.schema")
