"""Parses Anthropic's ``thinking``: whether the model reasons, and its token budget.

It owns what the field may hold and what of it the served model can do.
"""

from __future__ import annotations

from typing import Any

from jserve.api.request.declared import ignored_member
from jserve.api.request.parsed import Served
from jserve.errors import BadRequest, Unsupported
from jserve.text.chat.template import ChatTemplate

THINKING = {
    "type": ["object", "null"],
    "required": ["type"],
    "properties": {
        "type": {"enum": ["enabled", "disabled", "adaptive"]},
        "budget_tokens": {"type": ["integer", "null"], "minimum": 1},
        "display": ignored_member(),
    },
}


def thinking_of(value: Any, template: ChatTemplate | None) -> dict[str, Any] | None:
    """Template variables for ``thinking``."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        raise BadRequest(
            "thinking.type must be enabled, disabled or adaptive", field="thinking.type"
        )
    _check_budget(kind, value.get("budget_tokens"))
    if kind == "adaptive":
        return None
    reads = template is not None and template.takes("enable_thinking")
    return {"enable_thinking": kind == "enabled"} if reads else None


def _check_budget(kind: str, budget: Any) -> None:
    """``budget_tokens`` belongs to thoughts that are enabled, and to no others."""
    where = "thinking.budget_tokens"
    if kind != "enabled" and budget is not None:
        raise BadRequest(f"{where} needs type enabled", field=where)
    if kind == "enabled" and (type(budget) is not int or budget < 1):
        raise BadRequest(f"{where} must be a whole number above 0", field=where)


def budget_of(value: Any, max_tokens: int, served: Served) -> int | None:
    """Most tokens of the thought; None: not limited.

    Raises:
        BadRequest: the budget leaves nothing for the answer.
        Unsupported: the model has no thoughts, or its thoughts cannot be switched off.
    """
    kind = (value or {}).get("type")
    speech, template = served.card.speech, served.template
    reads = template is not None and template.takes("enable_thinking")
    if kind == "disabled" and speech.thinks and not reads:
        raise Unsupported("this model's thoughts cannot be switched off", field="thinking.type")
    if kind != "enabled":
        return None
    if not speech.thinks:
        raise Unsupported("this model writes no thoughts", field="thinking.type")
    if speech.thinking is None:
        raise Unsupported("this model's thoughts cannot be limited", field="thinking.type")
    where, budget = "thinking.budget_tokens", value["budget_tokens"]
    if budget >= max_tokens:
        raise BadRequest(f"{where} must be below max_tokens", field=where)
    return budget
