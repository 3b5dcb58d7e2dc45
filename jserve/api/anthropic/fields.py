"""Anthropic Messages: request fields, parsed into a ``ParsedRequest``.

It owns their names and how they become OpenAI's messages, tools and parameters, which all dialects share from there
on.

| Anthropic            | here                                                     |
|----------------------|----------------------------------------------------------|
| system               | a first message                                          |
| tool_use, thinking   | tool calls and thoughts of an assistant message          |
| tool_result          | messages of role tool, before the text beside them       |
| last message is an assistant's | it is continued                                |
| thinking             | enable_thinking, where the template reads it; its budget |
| cache_control        | nothing to do: every prefix is cached                    |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jserve.api.anthropic.messages import BLOCKS, SYSTEM, messages_of
from jserve.api.anthropic.thinking import THINKING, budget_of, thinking_of
from jserve.api.anthropic.tools import CHOICE, TOOLS, choice_of, tools_of
from jserve.api.openai.chat import shaped_chat, talk
from jserve.api.request.declared import LABEL, refused_member
from jserve.api.request.fields import (
    Fields,
    ignored,
    ignored_fields,
    label,
    refused,
    sampled,
    shaped,
)
from jserve.api.request.parsed import ParsedRequest, Served
from jserve.api.request.shared import Sampling, body_of, params_of, service_of
from jserve.api.request.values import STOP
from jserve.errors import BadRequest
from jserve.sampling import SamplingParams
from jserve.text.chat.template import ChatTemplate

OUTPUT = {
    "type": ["object", "null"],
    "properties": {
        "format": {
            "type": ["object", "null"],
            "required": ["type", "schema"],
            "properties": {
                "type": {"const": "json_schema"},
                "schema": {"type": "object"},
                "name": LABEL,
            },
        },
        "effort": refused_member(),
        "task_budget": refused_member(),
    },
}

_RENAMED = {
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "chat_template_kwargs.enable_thinking": "thinking.type",
    "tool_choice.function.name": "tool_choice.name",
    ".function.parameters": ".input_schema",
    ".function.": ".",
}
_LATER = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "continue_final_message": "messages",
}
"""Names for errors that are found when the fields have been read."""


class Metadata(Fields):
    """The field ``metadata``: the client's own name of its user."""

    user_id: str | None = label()


class Prompt(Fields):
    """The fields that both endpoints read."""

    model: str | None = None
    messages: Any = shaped(BLOCKS, required=True)
    system: Any = shaped(SYSTEM)
    tools: Any = shaped(TOOLS)
    tool_choice: Any = shaped(CHOICE)
    thinking: Any = shaped(THINKING)
    output_config: Any = shaped(OUTPUT)
    cache_control: Any = label()
    betas: Any = ignored([])
    speed: str | None = ignored("standard")
    billing_policy: Any = ignored()
    compaction: Any = refused()
    context_management: Any = refused()
    mcp_servers: Any = refused([])
    output_format: Any = refused()


class MessagesBody(Prompt, Sampling):
    """POST /v1/messages."""

    max_tokens: int | None = sampled("max_tokens", required=True)
    temperature: float | None = sampled("temperature", high=1.0)
    stop_sequences: Any = shaped(STOP)
    stop: Any = refused()
    n: Any = refused(1)
    metadata: Metadata | None = None
    service_tier: str | None = ignored("auto", "standard_only")
    inference_geo: str | None = ignored()
    diagnostics: Any = ignored()
    fallbacks: Any = ignored([])
    fallback_credit_token: Any = ignored()
    container: Any = refused()
    thread: Any = refused()
    vllm_xargs: Any = refused({})
    custom_params: Any = refused({})


class CountBody(Prompt):
    """POST /v1/messages/count_tokens."""


def parse_message(raw: Mapping[str, Any], served: Served) -> ParsedRequest:
    """A request for a message, checked.

    Raises:
        BadRequest, NotFound: as the field at fault asks for.
    """
    body, card = body_of(MessagesBody, raw, served), served.card
    if body.max_tokens is None or body.max_tokens < 1:
        raise BadRequest("max_tokens must be given, and at least 1", field="max_tokens")
    if body.temperature is not None and body.temperature > 1:
        raise BadRequest("temperature must be in [0, 1]", field="temperature")
    chat, shape = shaped_chat(_as_openai(body, served.template), served, _RENAMED)
    params = params_of(
        body.model_copy(update={"stop": body.stop_sequences}),
        card,
        named=_LATER,
        max_tokens=body.max_tokens,
    )
    budget = budget_of(body.thinking, body.max_tokens, served)
    return ParsedRequest(
        chat=chat,
        holder="messages",
        names=_LATER,
        params=replace(params, **talk(budget, shape, card, "thinking.budget_tokens")),
        shape=shape,
        **service_of(body),
    )


def parse_count(raw: Mapping[str, Any], served: Served) -> ParsedRequest:
    """A request to count tokens, checked; the prompt is that of the same fields of ``parse_message``.

    Raises:
        BadRequest, NotFound: as the field at fault asks for.
    """
    body = body_of(CountBody, raw, served)
    chat, _ = shaped_chat(_as_openai(body, served.template), served, _RENAMED)
    return ParsedRequest(
        body=body,
        ignored=ignored_fields(body),
        chat=chat,
        holder="messages",
        names=_LATER,
        params=SamplingParams(),
    )


def _as_openai(body: Prompt, template: ChatTemplate | None) -> dict[str, Any]:
    """The fields of a chat under OpenAI's names, as ``chat_of`` and ``shape_of`` read them."""
    messages = messages_of(body.system, body.messages)
    choice, parallel = choice_of(body.tool_choice)
    go_on = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    return {
        "messages": messages,
        "tools": tools_of(body.tools),
        "tool_choice": choice if body.tools or choice != "auto" else None,
        "parallel_tool_calls": parallel,
        "response_format": _format(body.output_config),
        "documents": None,
        "reasoning_effort": None,
        "chat_template_kwargs": thinking_of(body.thinking, template),
        "add_generation_prompt": None,
        "continue_final_message": go_on,
    }


def _format(value: Any) -> dict[str, Any] | None:
    """OpenAI's ``response_format`` for ``output_config``."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadRequest("output_config must be an object", field="output_config")
    form = value.get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise BadRequest(
            "output_config.format.type must be json_schema", field="output_config.format.type"
        )
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
