"""The schema of OpenAI's chat messages: their members and the effect of each.

It owns the declaration only; ``text.chat.messages`` checks the values.
"""

from __future__ import annotations

from jserve.api.request.declared import LABEL, refused_member
from jserve.text.chat.messages import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_PARTS,
    ROLES,
    TEXTS,
    THOUGHTS,
)

_PART = {
    "type": "object",
    "required": ["type"],
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"enum": list(TEXTS)},
                "text": {"type": "string"},
                "cache_control": LABEL,
                "prompt_cache_breakpoint": LABEL,
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
        "type": {"enum": ["function", None]},
        "index": LABEL,
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": ["string", "object", "null"]},
            },
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
            "tool_calls": {"type": ["array", "null"], "maxItems": MAX_CALLS, "items": _CALL},
            "tool_call_id": {"type": ["string", "null"]},
            "name": {"type": ["string", "null"]},
            **{key: {"type": ["string", "null"]} for key in (*THOUGHTS, "refusal")},
            "annotations": LABEL,
            "audio": refused_member(),
            "function_call": refused_member(),
        },
    },
}
