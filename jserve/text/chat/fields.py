"""Builds a chat from OpenAI's fields: messages, tools, documents, template variables.

It owns how these fields go together and what a template must read for them to be taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.errors import BadRequest, Unsupported, shown
from jserve.text.chat.messages import messages_of
from jserve.text.chat.template import Chat, ChatTemplate
from jserve.text.chat.tools import tools_of

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_VARIABLE_CHARS = 1024


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
        messages=messages_of(fields["messages"], template),
        tools=tools_of(fields, template),
        documents=_documents(fields["documents"], template),
        variables=_variables(fields, template),
        add_generation_prompt=generate is not False and not go_on,
        continue_final_message=go_on,
    )


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
        raise Unsupported(
            "this model's chat template has no reasoning_effort; thoughts of models that think are set by"
            " chat_template_kwargs.enable_thinking and thinking_token_budget",
            field="reasoning_effort",
        )
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
