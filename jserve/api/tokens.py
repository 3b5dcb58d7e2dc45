"""Fields of /tokenize and /detokenize, in vLLM's shape.

Owns their reading and their answers. Must not know HTTP or the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from jserve.api.ask import Ask, ModelCard, Wish
from jserve.api.chat import ChatTemplate
from jserve.api.errors import Unsupported
from jserve.api.openai import Ids, check_model, ignored_fields, read
from jserve.api.openai_messages import chat_of
from jserve.errors import BadRequest
from jserve.sampling import SamplingParams
from jserve.text.tokenizer import TextTokenizer


class TokenizeBody(BaseModel):
    """POST /tokenize: ``prompt``, or ``messages`` with the fields that shape a chat prompt."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    documents: Any = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    tokens: Ids | None = None


def tokenize_wish(raw: Mapping[str, Any], card: ModelCard, template: ChatTemplate | None) -> Wish:
    """What to tokenise.

    Raises:
        BadRequest: neither or both of ``prompt`` and ``messages``.
        NotFound: an unknown model.
    """
    body: TokenizeBody = read(TokenizeBody, raw)
    check_model(body.model, card)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("give either prompt or messages", field="prompt")
    params = SamplingParams()
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        ask = Ask(params=params, prompts=(body.prompt,), add_special_tokens=special)
        return Wish(body=body, ask=ask, ignored=ignored_fields(body))
    if body.add_special_tokens:
        raise Unsupported("add_special_tokens has no meaning for chat", field="add_special_tokens")
    fields = {name: getattr(body, name) for name in TokenizeBody.model_fields}
    ask = Ask(params=params, chat=chat_of(fields, template), field="messages")
    return Wish(body=body, ask=ask, ignored=ignored_fields(body))


def tokenized(
    body: TokenizeBody, ids: Sequence[int], card: ModelCard, tokenizer: TextTokenizer
) -> dict[str, Any]:
    """The answer of /tokenize."""
    found = {"count": len(ids), "max_model_len": card.max_model_len, "tokens": list(ids)}
    if body.return_token_strs:
        found["token_strs"] = [tokenizer.token_text(i) for i in ids]
    return found


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
