"""The matrix of request features and which of them combine.

It owns the features, their fields by endpoint, and the pairs that exclude each other; a test asks the server for
each pair.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from jserve.api.request.declared import Holds

Json = dict[str, Any]

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@dataclass(frozen=True, slots=True)
class Feature:
    """Something a request may ask for: its fields by endpoint; None where it cannot be asked."""

    name: str
    chat: Json | None
    text: Json | None
    responses: Json | None
    messages: Json | None

    def on(self, path: str) -> Json | None:
        asked = (self.chat, self.text, self.responses, self.messages)
        return asked[GENERATING.index(path)]


_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}
_TEXT_FORMAT = {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}}
_FUNCTION = {"name": "f", "parameters": _SCHEMA}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_FLAT_TOOLS = [{"type": "function", **_FUNCTION}]
_INPUT_TOOLS = [{"name": "f", "input_schema": _SCHEMA}]
_SCORES = {"top_logprobs": 2}
_REGEX = {"structured_outputs": {"regex": "a+"}}


def _everywhere(name: str, fields: Json) -> Feature:
    return Feature(name, fields, fields, fields, fields)


FEATURES = (
    _everywhere("stream", {"stream": True}),
    Feature("n", {"n": 2}, {"n": 2}, None, None),
    _everywhere("seed", {"seed": 7}),
    Feature("stop", {"stop": ["x"]}, {"stop": ["x"]}, {"stop": ["x"]}, {"stop_sequences": ["x"]}),
    Feature("logprobs", {"logprobs": True, **_SCORES}, {"logprobs": 2}, _SCORES, None),
    Feature("prompt logprobs", {"prompt_logprobs": 1}, {"prompt_logprobs": 1}, None, None),
    Feature("echo", None, {"echo": True, "logprobs": 1}, None, None),
    Feature(
        "JSON schema",
        {"response_format": _FORMAT},
        {"response_format": _FORMAT},
        {"text": _TEXT_FORMAT},
        {"output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
    ),
    Feature("tools", {"tools": _TOOLS}, None, {"tools": _FLAT_TOOLS}, {"tools": _INPUT_TOOLS}),
    Feature(
        "forced tools",
        {"tools": _TOOLS, "tool_choice": "required"},
        None,
        {"tools": _FLAT_TOOLS, "tool_choice": "required"},
        {"tools": _INPUT_TOOLS, "tool_choice": {"type": "any"}},
    ),
    Feature(
        "one call",
        {"tools": _TOOLS, "parallel_tool_calls": False},
        None,
        {"tools": _FLAT_TOOLS, "parallel_tool_calls": False},
        {
            "tools": _INPUT_TOOLS,
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
    ),
    Feature("regex", _REGEX, _REGEX, _REGEX, None),
    Feature(
        "thinking budget",
        {"thinking_token_budget": 9},
        None,
        {"thinking_token_budget": 9},
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
    ),
    _everywhere("penalties", {"presence_penalty": 0.5, "repetition_penalty": 1.1}),
    _everywhere("logit_bias", {"logit_bias": {"5": -100}}),
    Feature("token ids", {"return_token_ids": True}, {"return_token_ids": True}, None, None),
    _everywhere("lanes and deadlines", {"lane": "bulk", "deadline_ms": 60000}),
    _everywhere("truncation", {"truncate_prompt_tokens": 8}),
    _everywhere("cache_salt", {"cache_salt": "s"}),
    _everywhere("named cache", {"cache": "c"}),
)
_NOT_BESIDE_REGEX = dict.fromkeys(GENERATING, "structured_outputs")
REFUSED_PAIRS = {
    frozenset({"stream", "prompt logprobs"}): dict.fromkeys(GENERATING, "prompt_logprobs"),
    frozenset({"logprobs", "tools"}): {"/v1/responses": "top_logprobs"},
    frozenset({"logprobs", "forced tools"}): {"/v1/responses": "top_logprobs"},
    frozenset({"logprobs", "one call"}): {"/v1/responses": "top_logprobs"},
    frozenset({"regex", "JSON schema"}): _NOT_BESIDE_REGEX,
    frozenset({"regex", "tools"}): _NOT_BESIDE_REGEX,
    frozenset({"regex", "one call"}): _NOT_BESIDE_REGEX,
    frozenset({"regex", "forced tools"}): _NOT_BESIDE_REGEX,
    frozenset({"named cache", "truncation"}): dict.fromkeys(GENERATING, "truncate_prompt_tokens"),
}
"""Features that go not together: by endpoint, the field that is named."""


def pair(path: str, one: Feature, other: Feature) -> str | None:
    """The effect of two features in one request to ``path``: "applied", the name of the field
    that is refused, or None where one of them cannot be asked."""
    if one.on(path) is None or other.on(path) is None:
        return None
    return REFUSED_PAIRS.get(frozenset({one.name, other.name}), {}).get(path, Holds.APPLIED.value)


@functools.cache
def pairs() -> Json:
    """Path -> feature -> feature -> what holds for both in one request."""
    found: Json = {}
    for path in GENERATING:
        table: Json = {}
        for i, one in enumerate(FEATURES):
            for other in FEATURES[i + 1 :]:
                held = pair(path, one, other)
                if held is not None:
                    table.setdefault(one.name, {})[other.name] = held
        found[path] = table
    return found
