"""The schema of OpenAI's ``tools``, and other dialects' tools converted to it.

It owns the declaration and the conversion; ``text.chat.tools`` checks the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jserve.api.request.declared import Schema
from jserve.errors import BadRequest
from jserve.text.chat.tools import MAX_TOOLS

TOOLS: Schema = {
    "type": ["array", "null"],
    "minItems": 1,
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "required": ["function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "minLength": 1},
                    "description": {"type": ["string", "null"]},
                    "parameters": {"type": ["object", "null"]},
                    "return": {"type": ["object", "null"]},
                    "strict": {"type": ["boolean", "null"]},
                },
            },
        },
    },
}


def each_tool(
    value: Any, read: Callable[[Any, str], dict[str, Any]]
) -> list[dict[str, Any]] | None:
    """Applies ``read`` to every tool and its place in a dialect's ``tools``; None where there are
    none. Raises BadRequest."""
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise BadRequest("tools must be a list", field="tools")
    return [read(tool, f"tools[{i}]") for i, tool in enumerate(value)]


def nested(tool: dict[str, Any], at: str, schema: str) -> dict[str, Any]:
    """OpenAI's tool for a dialect's flat one, whose parameters are called ``schema``.

    Raises:
        BadRequest: a member of the wrong type, under the dialect's name.
    """
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise BadRequest(f"{at}.name must be a string, and not empty", field=f"{at}.name")
    parameters, strict = tool.get(schema), tool.get("strict")
    if parameters is not None and not isinstance(parameters, dict):
        raise BadRequest(f"{at}.{schema} must be an object", field=f"{at}.{schema}")
    if strict is not None and not isinstance(strict, bool):
        raise BadRequest(f"{at}.strict must be true or false", field=f"{at}.strict")
    members = {
        key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None
    }
    return {"type": "function", "function": members | {"parameters": parameters or {}}}
