"""Converts the input items of OpenAI's Responses to chat messages.

What a model said in one turn comes as several items and becomes one message::

    reasoning . message . function_call . function_call   ->   one assistant message
"""

from __future__ import annotations

from typing import Any

from jserve.api.request.declared import LABEL, Schema, ignored_member
from jserve.errors import BadRequest, Unsupported, shown
from jserve.text.chat.messages import MAX_MESSAGES, MEDIA, not_text

_ROLES = ("user", "assistant", "system", "developer")


# The schema of the field and of its members; the functions below check the values.
def _item(kind: Schema, **members: Schema) -> Schema:
    """An item of one type; what an answer's item says of itself may come back with it."""
    own = {"type": kind, "id": LABEL, "status": LABEL}
    return {"type": "object", "properties": own | members}


_SAID = {"annotations": LABEL, "logprobs": LABEL, "prompt_cache_breakpoint": LABEL}


def _parts(*kinds: str) -> Schema:
    told = {"type": {"enum": list(kinds)}, "text": _STRING, **_SAID}
    part = {"anyOf": [{"type": "object", "properties": told}, _REFUSAL]}
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": part}, {"type": "null"}]}


_STRING = {"type": "string"}
_REFUSAL = {"type": "object", "properties": {"type": {"const": "refusal"}, "refusal": _STRING}}
_TEXTS, _THOUGHTS = ("input_text", "output_text", "text"), ("reasoning_text", "summary_text")
_ITEMS = [
    _item({"enum": ["message", None]}, role={"enum": list(_ROLES)}, content=_parts(*_TEXTS)),
    _item({"const": "function_call"}, call_id=_STRING, name=_STRING, arguments=_STRING),
    _item({"const": "function_call_output"}, call_id=_STRING, output=_parts(*_TEXTS)),
    _item(
        {"const": "reasoning"},
        summary=_parts(*_THOUGHTS),
        content=_parts(*_THOUGHTS),
        encrypted_content=ignored_member(),
    ),
]
INPUT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_MESSAGES,
            "items": {"anyOf": _ITEMS},
        },
    ]
}


def messages_of(instructions: str | None, given: Any) -> list[dict[str, Any]]:
    """Chat messages for ``instructions`` and ``input``.

    Raises:
        BadRequest: an item of the wrong shape, named.
        Unsupported: an item or a part that is no text, named.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise BadRequest("input must be text or a list of items, and not empty", field="input")
    if len(given) > MAX_MESSAGES:
        raise BadRequest(f"input may hold at most {MAX_MESSAGES} items", field="input")
    found: list[dict[str, Any]] = []
    if instructions is not None:
        found.append({"role": "system", "content": instructions})
    for i, item in enumerate(given):
        _add(found, item, f"input[{i}]")
    return found


def _add(found: list[dict[str, Any]], item: Any, at: str) -> None:
    """Appends ``item``, or puts it to the assistant's message it belongs to."""
    if not isinstance(item, dict):
        raise BadRequest(f"{at} must be an object", field=at)
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(found, item, at)
    elif kind == "function_call":
        _turn(found).setdefault("tool_calls", []).append(_call(item, at))
    elif kind == "function_call_output":
        output = {"role": "tool", "tool_call_id": _string(item, "call_id", at)}
        found.append(output | {"content": _texts(item.get("output"), f"{at}.output")})
    elif kind == "reasoning":
        _turn(found)["reasoning_content"] = _thought(item, at)
    else:
        raise Unsupported(f"{at}: items of type {shown(kind)} are not supported here", field=at)


def _add_message(found: list[dict[str, Any]], item: dict[str, Any], at: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise BadRequest(f"{at}.role must be one of {', '.join(_ROLES)}", field=f"{at}.role")
    text = _texts(item.get("content"), f"{at}.content")
    if role != "assistant":
        found.append({"role": role, "content": text})
        return
    turn = _turn(found, fresh=bool(found and found[-1].get("content")))
    turn["content"] = text


def _turn(found: list[dict[str, Any]], *, fresh: bool = False) -> dict[str, Any]:
    """The assistant's message that is being put together; a new one behind any other."""
    if fresh or not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _call(item: dict[str, Any], at: str) -> dict[str, Any]:
    function = {name: _string(item, name, at) for name in ("name", "arguments")}
    return {"id": _string(item, "call_id", at), "type": "function", "function": function}


def _thought(item: dict[str, Any], at: str) -> str:
    """The text of a thought; where that is absent, its summary."""
    content, summary = (
        _thoughts(item.get(name), f"{at}.{name}") for name in ("content", "summary")
    )
    return content or summary


def _thoughts(value: Any, at: str) -> str:
    if not isinstance(value, list | None):
        raise BadRequest(f"{at} must be a list of parts", field=at)
    return "\n".join(_part(part, f"{at}[{i}]", _THOUGHTS) for i, part in enumerate(value or ()))


def _texts(value: Any, at: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequest(f"{at} must be a string or a list of parts", field=at)
    return "\n".join(_part(part, f"{at}[{i}]", _TEXTS) for i, part in enumerate(value))


def _part(part: Any, at: str, kinds: tuple[str, ...]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        return _string(part, "refusal", at)
    if not isinstance(kind, str):
        raise BadRequest(f"{at} must be a part with a type", field=at)
    if kind in MEDIA:
        raise not_text(kind, at)
    if kind not in kinds:
        raise Unsupported(f"{at}: parts of type {shown(kind)} are not supported here", field=at)
    return _string(part, "text", at)


def _string(value: dict[str, Any], name: str, at: str) -> str:
    if not isinstance(value.get(name), str):
        raise BadRequest(f"{at}.{name} must be a string", field=f"{at}.{name}")
    return value[name]
