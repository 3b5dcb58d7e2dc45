"""Converts Anthropic's ``tools`` and ``tool_choice`` to OpenAI's."""

from __future__ import annotations

from typing import Any

from jserve.api.openai.tools import each_tool, nested
from jserve.api.request.declared import LABEL
from jserve.errors import BadRequest, Unsupported, shown
from jserve.text.chat.tools import MAX_TOOLS

TOOLS = {
    "type": ["array", "null"],
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "required": ["name"],
        "properties": {
            "type": {"enum": ["custom", None]},
            "name": {"type": "string", "minLength": 1},
            "description": {"type": ["string", "null"]},
            "input_schema": {"type": ["object", "null"]},
            "strict": {"type": ["boolean", "null"]},
            "cache_control": LABEL,
        },
    },
}
CHOICE = {
    "type": ["object", "null"],
    "required": ["type"],
    "properties": {
        "type": {"enum": ["auto", "any", "tool", "none"]},
        "name": {"type": ["string", "null"]},
        "disable_parallel_tool_use": {"type": ["boolean", "null"]},
    },
}


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """OpenAI's ``tools``. Raises BadRequest, Unsupported: a tool of the wrong shape, named."""
    return each_tool(value, _tool)


def _tool(tool: Any, at: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise BadRequest(f"{at} must be an object", field=at)
    if tool.get("type") not in (None, "custom"):
        raise Unsupported(f"{at}: tools of type {shown(tool['type'])} are not run here", field=at)
    return nested(tool, at, "input_schema")


def choice_of(value: Any) -> tuple[Any, bool | None]:
    """OpenAI's (``tool_choice``, ``parallel_tool_calls``). Raises BadRequest."""
    if value is None:
        return None, None
    kind = value.get("type") if isinstance(value, dict) else None
    names = {"auto": "auto", "any": "required", "none": "none", "tool": "tool"}
    if not isinstance(kind, str) or kind not in names:
        raise BadRequest(
            "tool_choice.type must be auto, any, tool or none", field="tool_choice.type"
        )
    if kind != "tool" and value.get("name") is not None:
        raise BadRequest("tool_choice.name needs type tool", field="tool_choice.name")
    single = value.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        where = "tool_choice.disable_parallel_tool_use"
        raise BadRequest(f"{where} must be true or false", field=where)
    parallel = False if single else None
    if kind == "tool":
        return {"type": "function", "function": {"name": value.get("name")}}, parallel
    return names[kind], parallel
