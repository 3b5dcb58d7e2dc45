"""Converts OpenAI's ``tools`` to the plain values that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.errors import BadRequest, Unsupported
from jserve.text.chat.template import ChatTemplate

MAX_TOOLS = 128
MEMBERS = ("name", "description", "parameters", "return", "strict")
"""Of a tool's function."""


def tools_of(
    fields: Mapping[str, Any], template: ChatTemplate | None
) -> list[dict[str, Any]] | None:
    """``tools``, or None where there are none or none is to be called.

    Raises:
        BadRequest: a tool of the wrong shape, named; a choice without tools.
        Unsupported: the template has no tools.
    """
    value, choice = fields["tools"], fields["tool_choice"]
    if value is None:
        if choice not in (None, "none"):
            raise BadRequest("tool_choice needs tools", field="tool_choice")
        return None
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise BadRequest("tool_choice must be none, auto or required", field="tool_choice")
    if not isinstance(value, list) or not 0 < len(value) <= MAX_TOOLS:
        raise BadRequest(f"tools must be a list of 1 to {MAX_TOOLS}", field="tools")
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(value)]
    if template is not None and not template.takes_tools:
        raise Unsupported("this model's chat template has no tools", field="tools")
    return None if choice == "none" else tools


def _tool(tool: Any, at: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise BadRequest(f"{at} must be a tool of type function", field=at)
    if not isinstance(function.get("name"), str) or not function["name"]:
        where = f"{at}.function.name"
        raise BadRequest(f"{where} must be a string, and not empty", field=where)
    if function.get("strict") is not None and not isinstance(function["strict"], bool):
        where = f"{at}.function.strict"
        raise BadRequest(f"{where} must be true or false", field=where)
    if not isinstance(function.get("description", ""), str | None):
        where = f"{at}.function.description"
        raise BadRequest(f"{where} must be a string", field=where)
    for name in ("parameters", "return"):
        if not isinstance(function.get(name), dict | None):
            where = f"{at}.function.{name}"
            raise BadRequest(f"{where} must be an object", field=where)
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    # Templates print the whole of it, and walk the properties: a tool without any is common.
    members = {name: value for name, value in function.items() if name in MEMBERS}
    return {"type": "function", "function": members | {"parameters": parameters}}
