"""OpenAI's fields that shape an answer: ``response_format``, ``tools`` and ``tool_choice``; vLLM's
``structured_outputs``.

Owns their shapes and how they combine into one ``StructuredOutputs``. Must not know parsers, masks
or whether a grammar compiles.

| tools   | tool_choice      | constrained to                                                |
|---------|------------------|---------------------------------------------------------------|
| none    |                  | what response_format or structured_outputs say                |
| given   | required, named  | calls                                                         |
| given   | auto             | calls or the JSON asked for; calls that fit, where a tool is  |
|         |                  | strict or only one call is allowed; else nothing              |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from jserve.api.declared import LABEL, Schema, ignored_member
from jserve.api.errors import Unsupported, shown
from jserve.api.speech import Speech
from jserve.errors import BadRequest
from jserve.grammar.spec import parsed
from jserve.grammar.tools import calls_grammar
from jserve.sampling import StructuredOutputs

_OPTIONS = frozenset(f.name for f in fields(StructuredOutputs))

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

# What the fields look like, and what members they have; the functions below judge the values.
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
            "required": ["type", "structures", "triggers"],
            "properties": {
                "type": {"const": "structural_tag"},
                "structures": {
                    "type": "array",
                    "items": {"properties": {key: {} for key in ("begin", "schema", "end")}},
                },
                "triggers": {"type": "array"},
            },
        },
    ]
}
STRUCTURED = {
    "type": ["object", "null"],
    "additionalProperties": False,
    "properties": {name: {} for name in sorted(_OPTIONS)},
}
CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "required": ["function"],
            "properties": {
                "type": {},
                "function": {"type": "object", "properties": {"name": {"type": "string"}}},
            },
        },
    ]
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the answer must look like, and the request field that said so."""

    spec: StructuredOutputs | None = None
    field: str = "structured_outputs"
    """Where ``spec`` came from, for errors found when it is compiled."""
    checks: tuple[tuple[str, StructuredOutputs], ...] = ()
    """(request field, its schema): parts of ``spec`` to be compiled apart, so that an error names
    its field."""
    calls: bool = False
    """Whether the answer may hold tool calls."""

    def under(self, name: Callable[[str], str]) -> Shape:
        """The same, with its fields as a dialect names them."""
        checks = tuple((name(field), spec) for field, spec in self.checks)
        return replace(self, field=name(self.field), checks=checks)


FREE = Shape()
"""An answer that may be anything."""


def shape_of(
    values: Mapping[str, Any], tools: list[dict[str, Any]] | None, speech: Speech
) -> Shape:
    """The shape that a chat or completion asks for.

    Args:
        values: the request's fields by name; those of chats may be missing.
        tools: as ``openai_messages`` read them; None without tools or with tool_choice "none".

    Raises:
        BadRequest, Unsupported: a field of the wrong shape, or two that exclude each other.
    """
    shape = _answer(values)
    if not tools:
        return shape
    choice = values.get("tool_choice")
    named = _chosen(tools, choice)
    single = values.get("parallel_tool_calls") is False
    required = choice not in (None, "auto")
    strict = any(tool["function"].get("strict") is True for _, tool in named)
    if not (required or strict or single or shape.spec is not None):
        return replace(shape, calls=speech.form is not None)
    if speech.form is None:
        raise Unsupported(
            "this model's way to call tools is not known, so it cannot be held to it",
            field="tool_choice" if required else "parallel_tool_calls" if single else "tools",
        )
    pairs = [(tool["function"]["name"], tool["function"]["parameters"]) for _, tool in named]
    grammar = calls_grammar(
        speech.form,
        pairs,
        many=not single and not isinstance(choice, dict),
        required=required,
        answer=_beside_calls(shape, speech, required=required),
    )
    checks = [
        (f"tools[{i}].function.parameters", StructuredOutputs(json=tool["function"]["parameters"]))
        for i, tool in named
    ]
    checks += [(shape.field, shape.spec)] if shape.spec is not None else []
    spec = StructuredOutputs(grammar=grammar)
    return Shape(spec=spec, field="tools", checks=tuple(checks), calls=True)


def _chosen(tools: list[dict[str, Any]], choice: Any) -> list[tuple[int, dict[str, Any]]]:
    """The tools that may be called, with their places."""
    numbered = list(enumerate(tools))
    if choice in (None, "auto", "required"):
        return numbered
    if not isinstance(choice, dict):
        raise BadRequest(
            "tool_choice must be none, auto, required or a function", field="tool_choice"
        )
    if choice.get("type", "function") != "function":
        raise Unsupported(
            f"tool_choice of type {shown(choice.get('type'))} is not supported",
            field="tool_choice.type",
        )
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    found = [(i, tool) for i, tool in numbered if tool["function"]["name"] == name]
    if not found:
        raise BadRequest(
            "tool_choice.function.name must be the name of one of the tools",
            field="tool_choice.function.name",
        )
    return found[:1]


def _beside_calls(shape: Shape, speech: Speech, *, required: bool) -> dict[str, Any] | None:
    if shape.spec is None:
        return None
    name = shape.field.split(".")[0]
    if required:
        raise BadRequest(f"tool_choice leaves no room for {name}", field=name)
    if speech.form is not None and speech.form.bare:
        raise Unsupported(
            f"{name} cannot stand beside the tools of this model, whose calls are plain JSON too",
            field=name,
        )
    if shape.spec.given[0] not in ("json", "json_object"):
        raise Unsupported(f"only JSON can stand beside tools in {name}", field=name)
    return {"type": "object"} if shape.spec.json is None else _schema(shape)


def _schema(shape: Shape) -> dict[str, Any]:
    assert shape.spec is not None
    return parsed(shape.spec.json, "json")


def _answer(values: Mapping[str, Any]) -> Shape:
    format_, extra = values.get("response_format"), values.get("structured_outputs")
    plain = isinstance(format_, dict) and format_.get("type") == "text"
    given = format_ is not None and not plain
    if given and extra is not None:
        raise BadRequest(
            "response_format and structured_outputs exclude each other",
            field="structured_outputs",
        )
    if extra is not None:
        return Shape(spec=_structured(extra))
    return _format(format_) if given else FREE


def _structured(value: Any) -> StructuredOutputs:
    if not isinstance(value, dict):
        raise BadRequest("structured_outputs must be an object", field="structured_outputs")
    for name, option in value.items():
        if option is not None and name not in _OPTIONS:
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


def _format(value: Any) -> Shape:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "json_object":
        return Shape(spec=StructuredOutputs(json_object=True), field="response_format")
    if kind == "structural_tag":
        spec = StructuredOutputs(structural_tag={k: v for k, v in value.items() if k != "type"})
        return Shape(spec=spec, field="response_format")
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
    return Shape(spec=StructuredOutputs(json=schema), field=f"{where}.schema")
