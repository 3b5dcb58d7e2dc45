"""OpenAI's chat messages and tools, as the plain values that chat templates read.

Owns what a message may hold and how it is normalised: parts become text, null becomes "", arguments
of tool calls become objects. Must not know templates beyond asking what one reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from jserve.api.chat import Chat, ChatTemplate
from jserve.api.declared import LABEL, Schema, refused_member
from jserve.api.errors import Unsupported, shown
from jserve.errors import BadRequest

MAX_MESSAGES = 2048
MAX_PARTS = 4096
MAX_TOOLS = 128
MAX_VARIABLE_CHARS = 1024
ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_TEXTS = ("text", "input_text", "output_text")

# What the fields look like, and what members they have; the functions below judge the values.
_PART = {
    "type": "object",
    "required": ["type"],
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"enum": list(_TEXTS)},
                "text": {"type": "string"},
                "cache_control": LABEL,
                "annotations": LABEL,
                "logprobs": LABEL,
            },
        },
        {
            "type": "object",
            "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}},
        },
    ],
}
_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": ["string", "null"]},
        "type": {},
        "index": LABEL,
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}, "arguments": {}},
        },
    },
}
MESSAGES = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "maxItems": MAX_PARTS, "items": _PART},
                    {"type": "null"},
                ]
            },
            "tool_calls": {"type": ["array", "null"], "maxItems": MAX_TOOLS, "items": _CALL},
            "tool_call_id": {"type": ["string", "null"]},
            "name": {"type": ["string", "null"]},
            **{key: {"type": ["string", "null"]} for key in (*_THOUGHTS, "refusal")},
            "annotations": LABEL,
            "audio": refused_member(),
            "function_call": refused_member(),
        },
    },
}
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
                    "description": {},
                    "parameters": {"type": ["object", "null"]},
                    "return": {},
                    "strict": {"type": ["boolean", "null"]},
                },
            },
        },
    },
}
KWARGS = {
    "type": ["object", "null"],
    "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
}


def chat_of(fields: Mapping[str, Any], template: ChatTemplate | None) -> Chat:
    """The chat that the request's fields describe, for ``template``.

    Raises:
        BadRequest: a message, tool or option of the wrong shape, named.
        Unsupported: something the template cannot express, named.
    """
    go_on = bool(fields["continue_final_message"])
    generate = fields["add_generation_prompt"]
    if go_on and generate:
        raise BadRequest(
            "add_generation_prompt and continue_final_message exclude each other",
            field="continue_final_message",
        )
    return Chat(
        messages=_messages(fields["messages"], template),
        tools=_tools(fields, template),
        documents=_documents(fields["documents"], template),
        variables=_variables(fields, template),
        add_generation_prompt=generate is not False and not go_on,
        continue_final_message=go_on,
    )


def _messages(value: Any, template: ChatTemplate | None) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list, and not empty", field="messages")
    if len(value) > MAX_MESSAGES:
        raise BadRequest(f"messages may hold at most {MAX_MESSAGES}", field="messages")
    return [_message(m, f"messages[{i}]", template) for i, m in enumerate(value)]


def _message(value: Any, at: str, template: ChatTemplate | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{at} must be an object", field=at)
    role = value.get("role")
    if role not in ROLES:
        raise BadRequest(f"{at}.role must be one of {', '.join(ROLES)}", field=f"{at}.role")
    if role == "developer" and (template is None or not template.knows_role("developer")):
        role = "system"
    message: dict[str, Any] = {"role": role, "content": _content(value, role, at)}
    for name in ("name", "tool_call_id"):
        if value.get(name) is not None:
            message[name] = _string(value[name], f"{at}.{name}")
    message |= _reasoning(value, at)
    if value.get("tool_calls"):
        message["tool_calls"] = _tool_calls(value["tool_calls"], f"{at}.tool_calls")
    return message


def _reasoning(value: dict[str, Any], at: str) -> dict[str, str]:
    """A past answer's thoughts, under both names that templates read."""
    for name in _THOUGHTS:
        if value.get(name) is not None:
            text = _string(value[name], f"{at}.{name}")
            return {"reasoning_content": text, "thinking": text}
    return {}


def _content(value: dict[str, Any], role: str, at: str) -> str:
    content, at = value.get("content"), f"{at}.content"
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            refusal = value.get("refusal")
            return "" if refusal is None else _string(refusal, at.replace("content", "refusal"))
        raise BadRequest(f"{at} must not be null", field=at)
    if not isinstance(content, list) or len(content) > MAX_PARTS:
        raise BadRequest(f"{at} must be a string or a list of parts", field=at)
    return "\n".join(_part(part, f"{at}[{i}]") for i, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXTS:
        return _string(part.get("text"), f"{at}.text")
    if kind == "refusal":
        return _string(part.get("refusal"), f"{at}.refusal")
    if isinstance(kind, str):
        raise Unsupported(f"{at}: this model takes text only, not {shown(kind)}", field=at)
    raise BadRequest(f"{at} must be a content part with a type", field=at)


def _string(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{at} must be a string", field=at)
    return value


def _tool_calls(value: Any, at: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise BadRequest(f"{at} must be a list of at most {MAX_TOOLS}", field=at)
    return [_tool_call(call, f"{at}[{i}]") for i, call in enumerate(value)]


def _tool_call(call: Any, at: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadRequest(f"{at} must hold a function", field=at)
    name = _string(function.get("name"), f"{at}.function.name")
    arguments = _arguments(function.get("arguments"), f"{at}.function.arguments")
    found: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    if call.get("id") is not None:
        found["id"] = _string(call["id"], f"{at}.id")
    return found


def _arguments(value: Any, at: str) -> Any:
    """Templates want an object; text that is none (a model's slip, sent back) stays text."""
    if value is None or isinstance(value, dict):
        return value or {}
    text = _string(value, at)
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return parsed if isinstance(parsed, dict) else text


def _tools(fields: Mapping[str, Any], template: ChatTemplate | None) -> list[dict[str, Any]] | None:
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
    if not _string(function.get("name"), f"{at}.function.name"):
        raise BadRequest(f"{at}.function.name must not be empty", field=f"{at}.function.name")
    if function.get("strict") is not None and not isinstance(function["strict"], bool):
        where = f"{at}.function.strict"
        raise BadRequest(f"{where} must be true or false", field=where)
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise BadRequest(f"{at}.function.parameters must be an object", field=at)
    # Templates print the whole of it, and walk the properties: a tool without any is common.
    known = TOOLS["items"]["properties"]["function"]["properties"]
    told = {name: value for name, value in function.items() if name in known}
    return {"type": "function", "function": told | {"parameters": parameters}}


def _documents(value: Any, template: ChatTemplate | None) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list) or any(not isinstance(d, dict) for d in value):
        raise BadRequest("documents must be a list of objects", field="documents")
    if template is not None and not template.takes_documents:
        raise Unsupported("this model's chat template has no documents", field="documents")
    return value


def _variables(fields: Mapping[str, Any], template: ChatTemplate | None) -> dict[str, Any]:
    """Scalars for the template: ``chat_template_kwargs`` and ``reasoning_effort``."""
    given = fields["chat_template_kwargs"]
    if given is not None and not isinstance(given, dict):
        raise BadRequest("chat_template_kwargs must be an object", field="chat_template_kwargs")
    found = {str(name): _variable(name, value, template) for name, value in (given or {}).items()}
    effort = fields["reasoning_effort"]
    if effort is None:
        return found
    if effort not in EFFORTS:
        raise BadRequest(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}", field="reasoning_effort"
        )
    if template is not None and not template.takes("reasoning_effort"):
        raise Unsupported("this model has no reasoning_effort", field="reasoning_effort")
    return found | {"reasoning_effort": effort}


def _variable(name: str, value: Any, template: ChatTemplate | None) -> Any:
    at = f"chat_template_kwargs.{name}"
    if not isinstance(value, str | int | float | bool | None):
        raise BadRequest("chat_template_kwargs values must be scalars", field=at)
    if isinstance(value, str) and len(value) > MAX_VARIABLE_CHARS:
        raise BadRequest(
            f"chat_template_kwargs texts may have {MAX_VARIABLE_CHARS} characters", field=at
        )
    if template is not None and not template.takes(name):
        raise Unsupported(f"the chat template does not read {shown(name)}", field=at)
    return value
