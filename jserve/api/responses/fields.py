"""OpenAI Responses: request fields, parsed into a ``ParsedRequest``. The server stores nothing. Nothing is stored.

It owns their names and how they become chat messages, tools and parameters, which all dialects share from there on.
What needs a store (``previous_response_id``, ``conversation``, ``background``) or tools that run here is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jserve.api.openai.chat import EFFORT, KWARGS, limited, shaped_chat
from jserve.api.request.fields import (
    Fields,
    ignored,
    label,
    refused,
    sampled,
    shaped,
)
from jserve.api.request.formats import SCHEMALESS, STRUCTURED, TITLES
from jserve.api.request.parsed import ParsedRequest, Served
from jserve.api.request.shared import Sampling, body_of, check_top, params_of, service_of
from jserve.api.responses.input import INPUT, messages_of
from jserve.api.responses.tools import CHOICE, TOOLS, choice_of, tools_of
from jserve.errors import BadRequest, Unsupported, shown

FORMAT = {
    "anyOf": [
        *SCHEMALESS,
        {
            "type": "object",
            "required": ["type", "schema"],
            "properties": {
                "type": {"const": "json_schema"},
                "schema": {"type": "object"},
                **TITLES,
            },
        },
    ]
}
LOGPROBS = "message.output_text.logprobs"
THOUGHTS = "reasoning.encrypted_content"
"""Clients that store nothing ask for it, to send thoughts back. Here these are plain text."""
INCLUDE = {"type": ["array", "null"], "items": {"enum": [LOGPROBS, THOUGHTS]}}
_RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "response_format.type": "text.format.type",
    "response_format.json_schema": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
    ".function.": ".",
    "tool_choice.function.name": "tool_choice.name",
}


class Text(Fields):
    """The field ``text``: the format of the answer."""

    format: Any = shaped(FORMAT)
    verbosity: Any = refused("medium")


class Reasoning(Fields):
    """The field ``reasoning``: the effort of the thought."""

    effort: Any = shaped(EFFORT)
    summary: str | None = ignored()
    generate_summary: str | None = ignored()


class ResponsesStreamOptions(Fields):
    """The field ``stream_options``."""

    include_obfuscation: bool | None = ignored(False)


class ResponseBody(Sampling):
    """POST /v1/responses."""

    input: Any = shaped(INPUT, required=True)
    instructions: str | None = None
    max_output_tokens: int | None = sampled("max_tokens")
    text: Text | None = None
    reasoning: Reasoning | None = None
    tools: Any = shaped(TOOLS)
    tool_choice: Any = shaped(CHOICE)
    parallel_tool_calls: bool | None = None
    include: Any = shaped(INCLUDE)
    top_logprobs: int | None = sampled("logprobs")
    stream_options: ResponsesStreamOptions | None = None
    metadata: dict[str, str] | None = label()
    structured_outputs: Any = shaped(STRUCTURED)
    chat_template_kwargs: Any = shaped(KWARGS)
    thinking_token_budget: int | None = sampled("thinking_token_budget")
    store: bool | None = ignored(False)
    service_tier: str | None = ignored("auto", "default")
    prompt_cache_retention: str | None = ignored()
    prompt_cache_options: Any = ignored()
    access_programs: Any = ignored()
    background: Any = refused(False)
    background_options: Any = refused()
    context_management: Any = refused([])
    conversation: Any = refused()
    image: Any = refused()
    max_tool_calls: Any = refused()
    moderation: Any = refused()
    n: Any = refused(1)
    previous_response_id: Any = refused()
    prompt: Any = refused()
    truncation: Any = refused("disabled")

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())


def parse_response(raw: Mapping[str, Any], served: Served) -> ParsedRequest:
    """A request for a response, checked.

    Raises:
        BadRequest, NotFound: as the field at fault asks for.
    """
    body, card = body_of(ResponseBody, raw, served), served.card
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream to be true", field="stream_options")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise BadRequest("max_output_tokens must be at least 1", field="max_output_tokens")
    needless = _needless(body.include, strict=served.strict)
    chat, shape = shaped_chat(_as_chat(body), served, _RENAMED)
    if shape.calls and body.wants_logprobs:
        raise Unsupported("top_logprobs cannot be given with tools", field="top_logprobs")
    params = params_of(
        body,
        card,
        named=_RENAMED,
        max_tokens=body.max_output_tokens,
        logprobs=check_top(body.top_logprobs or 0, "top_logprobs") if body.wants_logprobs else None,
    )
    ask = ParsedRequest(
        chat=chat,
        holder="input",
        length_field="max_output_tokens",
        params=replace(
            params,
            **limited(body.thinking_token_budget, _effort(body), "reasoning.effort", served, shape),
        ),
        shape=shape,
        **service_of(body),
    )
    return replace(ask, ignored=ask.ignored + needless)


def _effort(body: ResponseBody) -> Any:
    return body.reasoning.effort if body.reasoning is not None else None


def _as_chat(body: ResponseBody) -> dict[str, Any]:
    """The fields of a chat under their names in chat completions."""
    return {
        "messages": messages_of(body.instructions, body.input),
        "tools": tools_of(body.tools),
        "tool_choice": choice_of(body.tool_choice, bool(body.tools)),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(body.text.format if body.text is not None else None),
        "structured_outputs": body.structured_outputs,
        "documents": None,
        "reasoning_effort": _effort(body),
        "chat_template_kwargs": body.chat_template_kwargs,
        "add_generation_prompt": None,
        "continue_final_message": None,
    }


def _format(value: Any) -> dict[str, Any] | None:
    """Chat's ``response_format``: a schema is one level deeper there."""
    if isinstance(value, dict) and value.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": value.get("schema")}}
    if value is not None and not isinstance(value, dict):
        raise BadRequest("text.format must be an object", field="text.format")
    return value


def _needless(value: Any, *, strict: bool) -> tuple[str, ...]:
    """The part of ``include`` that has no effect; with ``strict`` it is refused."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise BadRequest("include must be a list", field="include")
    found = []
    for i, name in enumerate(value[:64]):
        where = f"include[{i}]"
        if name not in (LOGPROBS, THOUGHTS) or (strict and name == THOUGHTS):
            raise Unsupported(f"{where}: {shown(name)} cannot be included", field=where)
        found += [where] if name == THOUGHTS else []
    return tuple(found[:1])
