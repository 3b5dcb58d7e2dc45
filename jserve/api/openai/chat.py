"""Builds a chat, its answer format and its sampling parameters from OpenAI's fields.

It owns what the chats of all dialects share once their fields have these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.api.request.formats import AnswerFormat
from jserve.api.request.naming import dialect_name, renamed
from jserve.api.request.parsed import ModelCard, Served
from jserve.api.request.tool_format import shape_of
from jserve.errors import BadRequest, Unsupported
from jserve.text.chat.fields import EFFORTS, chat_of
from jserve.text.chat.template import Chat

BUDGETS = {"minimal": 128, "low": 512, "medium": 2048}
"""Most tokens of a thought by effort, for a model that thinks and whose template knows no effort; more
effort has no limit."""

EFFORT = {"enum": [*EFFORTS, None]}
KWARGS = {
    "type": ["object", "null"],
    "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
}


def shaped_chat(
    values: Mapping[str, Any], served: Served, names: Mapping[str, str] | None = None
) -> tuple[Chat, AnswerFormat]:
    """The chat and the shape of its answer that fields under OpenAI's names ask for.

    Args:
        names: the dialect's names of these fields, for errors.

    Raises:
        BadRequest: as ``chat_of`` and ``shape_of`` do, under the dialect's names.
    """
    try:
        chat = chat_of(with_effort(values, served), served.template)
        shape = checked_shape(shape_of(values, chat.tools, served.card.speech), served.card)
    except BadRequest as e:
        raise renamed(e, names or {}) from None
    return chat, shape.under(lambda field: dialect_name(field, names or {}))


def with_effort(values: Mapping[str, Any], served: Served) -> Mapping[str, Any]:
    """``values`` with ``reasoning_effort`` as ``enable_thinking``, where the template has no other switch.

    What cannot be said that way is left for ``chat_of`` to refuse.
    """
    effort, kwargs = values["reasoning_effort"], values["chat_template_kwargs"] or {}
    if effort not in EFFORTS or not _is_switch(served) or not isinstance(kwargs, dict):
        return values
    switch = {} if served.card.speech.tags is None else {"enable_thinking": effort != "none"}
    if not switch and effort != "none":
        return values
    return {**values, "reasoning_effort": None, "chat_template_kwargs": switch | kwargs}


def _is_switch(served: Served) -> bool:
    """True where effort can be expressed by ``enable_thinking`` only, or needs nothing as there are no thoughts."""
    template = served.template
    if template is None or template.takes("reasoning_effort"):
        return False
    return served.card.speech.tags is None or template.takes("enable_thinking")


def limited(
    budget: int | None, effort: Any, field: str, served: Served, shape: AnswerFormat
) -> dict[str, Any]:
    """``talk`` with the request's own ``budget``, or the one of its ``effort`` (under ``field``), where the
    template has no effort of its own."""
    known = BUDGETS.get(effort) if isinstance(effort, str) and _is_switch(served) else None
    if budget is None and known is not None:
        return talk(known, shape, served.card, field)
    return talk(budget, shape, served.card)


def checked_shape(shape: AnswerFormat, card: ModelCard) -> AnswerFormat:
    """``shape``, if this server can hold an answer to it. Raises Unsupported."""
    name = shape.field.split(".")[0]
    if shape.spec is not None and not card.masks:
        raise Unsupported(f"{name} is switched off on this server", field=name)
    if shape.spec is not None and not card.eos_ids:
        raise Unsupported(f"{name} needs a model with an end token", field=name)
    return shape


def talk(
    budget: int | None, shape: AnswerFormat, card: ModelCard, field: str = "thinking_token_budget"
) -> dict[str, Any]:
    """Sampling parameters of a chat that follow from how the model talks.

    Args:
        budget: most tokens of a thought, from the request field ``field``.

    Raises:
        BadRequest, Unsupported: a budget below -1, or thoughts that cannot be limited.
    """
    found: dict[str, Any] = {"structured_outputs": shape.spec}
    if budget is not None:
        if budget < -1:
            raise BadRequest(f"{field} must be at least 0, or -1", field=field)
        if budget >= 0 and (card.speech.thinking is None or not card.masks):
            raise Unsupported("this model's thoughts cannot be limited", field=field)
        found["thinking_token_budget"] = budget
    speech = card.speech
    if speech.keeps_special and (shape.calls or speech.thinks or speech.framed):
        found["skip_special_tokens"] = False
    return found
