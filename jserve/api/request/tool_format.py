"""Combines ``tools`` and ``tool_choice`` with the answer format.

| tools   | tool_choice      | constrained to                                                |
|---------|------------------|---------------------------------------------------------------|
| none    |                  | what response_format or structured_outputs say                |
| given   | required, named  | calls, whatever response_format says                          |
| given   | auto             | calls or the JSON asked for; calls that fit, where a tool is  |
|         |                  | strict or only one call is allowed; else nothing              |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jserve.api.request.formats import AnswerFormat, format_of
from jserve.errors import BadRequest, Unsupported, shown
from jserve.grammar.spec import parsed
from jserve.grammar.tools import calls_grammar
from jserve.sampling import StructuredOutputs
from jserve.text.chat.speech import Speech

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


def shape_of(
    values: Mapping[str, Any], tools: list[dict[str, Any]] | None, speech: Speech
) -> AnswerFormat:
    """The shape that a chat or completion asks for.

    Args:
        values: the request's fields by name; those of chats may be missing.
        tools: as ``openai_messages`` read them; None without tools or with tool_choice "none".

    Raises:
        BadRequest, Unsupported: a field of the wrong shape, or two that exclude each other.
    """
    shape = format_of(values)
    if not tools:
        return shape
    choice = values.get("tool_choice")
    named = chosen(tools, choice)
    single = values.get("parallel_tool_calls") is False
    required = choice not in (None, "auto")
    strict = any(tool["function"].get("strict") is True for _, tool in named)
    if not (required or strict or single or shape.spec is not None):
        return replace(shape, calls=speech.calls != "none")
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
    if shape.spec is not None and not required:
        checks.append((shape.field, shape.spec))
    spec = StructuredOutputs(grammar=grammar)
    return AnswerFormat(spec=spec, field="tools", checks=tuple(checks), calls=True)


def chosen(tools: list[dict[str, Any]], choice: Any) -> list[tuple[int, dict[str, Any]]]:
    """The tools that ``tool_choice`` lets an answer call, with their places.

    Raises:
        BadRequest, Unsupported: no choice, or of no tool.
    """
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


def _beside_calls(shape: AnswerFormat, speech: Speech, *, required: bool) -> dict[str, Any] | None:
    if shape.spec is None:
        return None
    name = shape.field.split(".")[0]
    if required and name == "response_format":
        return None
    if required:
        raise BadRequest(f"tool_choice leaves no room for {name}", field=name)
    if speech.form is not None and speech.form.bare:
        raise Unsupported(
            f"{name} cannot be used with the tools of this model, whose calls are plain JSON too",
            field=name,
        )
    if shape.spec.given[0] not in ("json", "json_object"):
        raise Unsupported(f"only JSON can be used with tools in {name}", field=name)
    return {"type": "object"} if shape.spec.json is None else _schema(shape)


def _schema(shape: AnswerFormat) -> dict[str, Any]:
    assert shape.spec is not None
    return parsed(shape.spec.json, "json")
