"""Converts Anthropic's messages and content blocks to OpenAI's messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jserve.api.request.declared import LABEL, Schema, ignored_member
from jserve.errors import BadRequest, Unsupported, shown
from jserve.text.chat.messages import MAX_MESSAGES, MAX_PARTS, MEDIA, not_text


# Schemas of the fields and of their members; the functions below check the values.
def _block(kind: str, **members: Schema) -> Schema:
    own = {"type": {"const": kind}, "cache_control": LABEL}
    return {"type": "object", "required": ["type"], "properties": own | members}


def _content_of(*blocks: Schema) -> Schema:
    of_blocks = {"type": "array", "maxItems": MAX_PARTS, "items": {"anyOf": [*blocks]}}
    return {"anyOf": [{"type": "string"}, of_blocks, {"type": "null"}]}


_STRING = {"type": "string"}
_TEXT = _block("text", text=_STRING, citations=ignored_member([]))
_CONTENT = _content_of(
    _TEXT,
    _block("tool_use", id=_STRING, name=_STRING, input={"type": ["object", "null"]}),
    _block(
        "tool_result",
        tool_use_id=_STRING,
        content=_content_of(_TEXT),
        is_error={"type": ["boolean", "null"]},
    ),
    _block("thinking", thinking=_STRING, signature=LABEL),
)
BLOCKS = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _CONTENT},
    },
}
SYSTEM = _content_of(_TEXT)


def messages_of(system: Any, messages: Any) -> list[dict[str, Any]]:
    """OpenAI's messages for ``system`` and ``messages``.

    Raises:
        BadRequest: a message or block of the wrong shape, named.
        Unsupported: a block that is no text, named.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list, and not empty", field="messages")
    if len(messages) > MAX_MESSAGES:
        raise BadRequest(f"messages may hold at most {MAX_MESSAGES}", field="messages")
    found = []
    if system is not None:
        found.append({"role": "system", "content": _texts(system, "system")})
    for i, message in enumerate(messages):
        found += _message(message, f"messages[{i}]")
    return found


def _message(value: Any, at: str) -> list[dict[str, Any]]:
    if not isinstance(value, dict):
        raise BadRequest(f"{at} must be an object", field=at)
    role, content = value.get("role"), value.get("content")
    if role == "system":
        return [{"role": "system", "content": _texts(content, f"{at}.content")}]
    if role not in ("user", "assistant"):
        raise BadRequest(f"{at}.role must be user, assistant or system", field=f"{at}.role")
    at = f"{at}.content"
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = list(_blocks(content, at))
    return _assistant(blocks) if role == "assistant" else _user(blocks)


def _blocks(content: Any, at: str) -> Iterable[tuple[str, dict[str, Any], str]]:
    """(type, block, where) of each block."""
    if not isinstance(content, list) or not 0 < len(content) <= MAX_PARTS:
        raise BadRequest(f"{at} must be a string or a list of blocks, and not empty", field=at)
    for i, block in enumerate(content):
        where = f"{at}[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise BadRequest(f"{where} must be a content block with a type", field=where)
        yield kind, block, where


def _user(blocks: list[tuple[str, dict[str, Any], str]]) -> list[dict[str, Any]]:
    """Results of tools first: templates want them right behind the calls."""
    results, texts = [], []
    for kind, block, where in blocks:
        if kind == "tool_result":
            results.append(_result(block, where))
        else:
            texts.append(_text(kind, block, where))
    parsed = [{"role": "user", "content": "\n".join(texts)}] if texts else []
    return results + parsed


def _assistant(blocks: list[tuple[str, dict[str, Any], str]]) -> list[dict[str, Any]]:
    thoughts, texts, calls = [], [], []
    for kind, block, where in blocks:
        if kind == "thinking":
            thoughts.append(_string(block, "thinking", where))
        elif kind == "tool_use":
            calls.append(_call(block, where))
        else:
            texts.append(_text(kind, block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _call(block: dict[str, Any], at: str) -> dict[str, Any]:
    given = block.get("input")
    if given is not None and not isinstance(given, dict):
        raise BadRequest(f"{at}.input must be an object", field=f"{at}.input")
    function = {"name": _string(block, "name", at), "arguments": given or {}}
    return {"id": _string(block, "id", at), "type": "function", "function": function}


def _result(block: dict[str, Any], at: str) -> dict[str, Any]:
    content = block.get("content")
    text = "" if content is None else _texts(content, f"{at}.content")
    failed = block.get("is_error")
    if failed is not None and not isinstance(failed, bool):
        raise BadRequest(f"{at}.is_error must be true or false", field=f"{at}.is_error")
    if failed:
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", at), "content": text}


def _texts(value: Any, at: str) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(_text(kind, block, where) for kind, block, where in _blocks(value, at))


def _text(kind: str, block: dict[str, Any], at: str) -> str:
    if kind in MEDIA:
        raise not_text(kind, at)
    if kind != "text":
        raise Unsupported(f"{at}: blocks of type {shown(kind)} are not supported here", field=at)
    return _string(block, "text", at)


def _string(block: dict[str, Any], name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{at}.{name} must be a string", field=f"{at}.{name}")
    return value
