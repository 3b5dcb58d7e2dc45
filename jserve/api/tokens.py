"""Fields of /tokenize and /detokenize, in vLLM's shape.

Owns their reading and their answers. Must not know HTTP or the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.api.ask import Ask, ModelCard
from jserve.api.chat import ChatTemplate
from jserve.api.openai import ChatBody, Ids, check_model, read
from jserve.api.openai_messages import chat_of
from jserve.errors import BadRequest
from jserve.types import SamplingParams


class TokenizeBody(ChatBody):
    """POST /tokenize: ``prompt`` or the chat fields."""

    prompt: str | None = None


class DetokenizeBody(ChatBody):
    """POST /detokenize."""

    tokens: Ids | None = None


def tokenize_ask(raw: Mapping[str, Any], card: ModelCard, template: ChatTemplate | None) -> Ask:
    """What to tokenise.

    Raises:
        BadRequest: neither or both of ``prompt`` and ``messages``.
        NotFound: an unknown model.
    """
    body: TokenizeBody = read(TokenizeBody, raw)
    check_model(body.model, card)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("give either prompt or messages", field="prompt")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        return Ask(params=SamplingParams(), prompts=(body.prompt,), add_special_tokens=special)
    fields = {name: getattr(body, name) for name in ChatBody.model_fields}
    return Ask(params=SamplingParams(), chat=chat_of(fields, template), field="messages")


def tokenized(ids: list[int], card: ModelCard) -> dict[str, Any]:
    return {"count": len(ids), "max_model_len": card.max_model_len, "tokens": ids}


def detokenize_ids(raw: Mapping[str, Any], card: ModelCard) -> list[int]:
    """The ids to decode.

    Raises:
        BadRequest: missing, or an id outside the vocabulary.
        NotFound: an unknown model.
    """
    body: DetokenizeBody = read(DetokenizeBody, raw)
    check_model(body.model, card)
    ids = body.tokens
    if ids is None or any(not 0 <= i < card.vocab_size for i in ids):
        raise BadRequest(
            f"tokens must be a list of ids in [0, {card.vocab_size - 1}]", field="tokens"
        )
    return ids
