"""Converts ``tools`` and ``tool_choice`` of OpenAI's Responses to those of its chats."""

from __future__ import annotations

from typing import Any

from jserve.api.openai.tools import each_tool, nested
from jserve.errors import BadRequest, Unsupported, shown
from jserve.text.chat.tools import MAX_TOOLS

TOOLS = {
    "type": ["array", "null"],
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "required": ["type", "name"],
        "properties": {
            "type": {"const": "function"},
            "name": {"type": "string", "minLength": 1},
            "description": {"type": ["string", "null"]},
            "parameters": {"type": ["object", "null"]},
            "strict": {"type": ["boolean", "null"]},
        },
    },
}
CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "required": ["type", "name"],
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
        },
    ]
}


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Chat's ``tools``. Raises BadRequest, Unsupported: a tool of the wrong shape, named."""
    return each_tool(value, _tool)


def _tool(tool: Any, at: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind == "function":
        return nested(tool, at, "parameters")
    if isinstance(kind, str):
        raise Unsupported(f"{at}: tools of type {shown(kind)} are not run here", field=at)
    raise BadRequest(f"{at} must be a tool of type function", field=at)


def choice_of(value: Any, tools: bool) -> Any:
    """Chat's ``tool_choice``: a named function is one level deeper there, and "auto" needs
    tools."""
    if not tools and value == "auto":
        return None
    if isinstance(value, dict) and value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    return value
