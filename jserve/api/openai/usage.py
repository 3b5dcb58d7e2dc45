"""The head and usage that all of OpenAI's replies share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from jserve.api.openai.fields import Completion
from jserve.api.reply.generate import Json
from jserve.api.request.parsed import ModelCard, Usage


def new_id(prefix: str) -> str:
    """A fresh id; ours, never a client's."""
    return prefix + uuid.uuid4().hex


def head(prefix: str, card: ModelCard) -> Json:
    return {
        "id": new_id(prefix),
        "created": int(time.time()),
        "model": card.name,
        "system_fingerprint": card.fingerprint or None,
    }


def usage_of(usage: Usage) -> Json:
    found: Json = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
    details: Json = {}
    if usage.reasoning is not None:
        details["reasoning_tokens"] = usage.reasoning
    if usage.drafted:
        details["accepted_prediction_tokens"] = usage.accepted
        details["rejected_prediction_tokens"] = usage.drafted - usage.accepted
    return found | ({"completion_tokens_details": details} if details else {})


def with_usage(chunk: Json, body: Completion, usage: Callable[[], Usage]) -> Json:
    if body.include_usage:
        chunk["usage"] = usage_of(usage()) if body.continuous_usage else None
    return chunk
