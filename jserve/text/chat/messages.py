"""Converts OpenAI's chat messages to the plain values that chat templates read.

It owns how a message is checked and normalised: parts become text, null becomes "", arguments of tool calls become
objects.
"""

from __future__ import annotations

from typing import Any

import orjson

from jserve.errors import BadRequest, Unsupported, shown
from jserve.text.chat.template import ChatTemplate

MAX_MESSAGES = 2048
MAX_PARTS = 4096
MAX_CALLS = 128
ROLES = ("system", "developer", "user", "assistant", "tool")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of a past answer's thoughts."""
MEDIA = ("image", "image_url", "input_image", "input_audio", "video_url", "document", "input_file")
"""Types of parts that are no text, in all dialects."""
TEXTS = ("text", "input_text", "output_text")
"""Types of a part that is text."""


def messages_of(value: Any, template: ChatTemplate | None) -> list[dict[str, Any]]:
    """``messages``, for ``template``.

    Raises:
        BadRequest: a message of the wrong shape, named.
        Unsupported: a part that is no text, named.
    """
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
    if role == "developer" and (template is None or not template.mentions("developer")):
        role = "system"
    thoughts = _reasoning(value, at)
    message: dict[str, Any] = {"role": role, "content": _content(value, role, at)}
    for name in ("name", "tool_call_id"):
        if value.get(name) is not None:
            message[name] = _string(value[name], f"{at}.{name}")
    message |= thoughts
    if value.get("tool_calls"):
        message["tool_calls"] = _tool_calls(value["tool_calls"], f"{at}.tool_calls")
    return message


def _reasoning(value: dict[str, Any], at: str) -> dict[str, str]:
    """A past answer's thoughts, under both names that templates read."""
    told = [(name, value[name]) for name in THOUGHTS if value.get(name) is not None]
    texts = [_string(text, f"{at}.{name}") for name, text in told]
    for (name, text), first in zip(told, texts[:1] * len(told), strict=True):
        if text != first:
            where = f"{at}.{name}"
            raise BadRequest(f"{where} is not the thought of {told[0][0]}", field=where)
    return {"reasoning_content": texts[0], "thinking": texts[0]} if texts else {}


def _content(value: dict[str, Any], role: str, at: str) -> str:
    content, refusal = value.get("content"), value.get("refusal")
    if refusal is not None:
        if role != "assistant" or content is not None:
            raise BadRequest(
                f"{at}.refusal is what an assistant says instead of content", field=f"{at}.refusal"
            )
        return _string(refusal, f"{at}.refusal")
    at = f"{at}.content"
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant" and any(value.get(name) for name in ("tool_calls", *THOUGHTS)):
            return ""
        raise BadRequest(f"{at} must not be null where nothing else is said", field=at)
    if not isinstance(content, list) or len(content) > MAX_PARTS:
        raise BadRequest(f"{at} must be a string or a list of parts", field=at)
    return "\n".join(_part(part, f"{at}[{i}]") for i, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in TEXTS:
        return _string(part.get("text"), f"{at}.text")
    if kind == "refusal":
        return _string(part.get("refusal"), f"{at}.refusal")
    if isinstance(kind, str):
        raise not_text(kind, at)
    raise BadRequest(f"{at} must be a content part with a type", field=at)


def not_text(kind: str, at: str) -> Unsupported:
    """The error of a part of another kind than text, at ``at`` of the request."""
    why = f"this model is served as text and takes no part of type {shown(kind)}"
    return Unsupported(f"{at}: {why}", field=at)


def _string(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{at} must be a string", field=at)
    return value


def _tool_calls(value: Any, at: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise BadRequest(f"{at} must be a list of at most {MAX_CALLS}", field=at)
    return [_tool_call(call, f"{at}[{i}]") for i, call in enumerate(value)]


def _tool_call(call: Any, at: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadRequest(f"{at} must hold a function", field=at)
    if call.get("type") not in (None, "function"):
        raise Unsupported(f"{at} must be a call of type function", field=f"{at}.type")
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
