"""``/tokenize`` and ``/detokenize``, in vLLM's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from jserve.api.http.front import Front, ignored_header, json_response
from jserve.api.openai.chat import EFFORT, KWARGS, with_effort
from jserve.api.openai.messages import MESSAGES
from jserve.api.openai.tools import TOOLS
from jserve.api.request.fields import Fields, ignored_fields, shaped
from jserve.api.request.parsed import ModelCard, ParsedRequest, Served
from jserve.api.request.shared import Ids, body_of
from jserve.api.request.tool_format import CHOICE, chosen
from jserve.api.request.values import ids_of
from jserve.errors import BadRequest, Unsupported
from jserve.sampling import SamplingParams
from jserve.text.chat.fields import chat_of
from jserve.text.tokenizer import TextTokenizer


class TokenizeBody(Fields):
    """POST /tokenize: ``prompt``, or ``messages`` with the fields that shape a chat prompt."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Any = shaped(MESSAGES)
    tools: Any = shaped(TOOLS)
    tool_choice: Any = shaped(CHOICE)
    documents: Any = shaped({"type": ["array", "null"], "items": {"type": "object"}})
    reasoning_effort: Any = shaped(EFFORT)
    chat_template_kwargs: Any = shaped(KWARGS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids | None = shaped({}, required=True)


def parse_tokenize(raw: Mapping[str, Any], served: Served) -> ParsedRequest:
    """A request to tokenise, checked.

    Raises:
        BadRequest: neither or both of ``prompt`` and ``messages``.
        NotFound: an unknown model.
    """
    body = body_of(TokenizeBody, raw, served)
    if (body.prompt is None) == (body.messages is None):
        parsed = (
            "; prompt is the name of content here" if "content" in (body.model_extra or {}) else ""
        )
        raise BadRequest(f"give either prompt or messages{parsed}", field="prompt")
    ask = ParsedRequest(body=body, ignored=ignored_fields(body), params=SamplingParams())
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        return replace(ask, prompts=(body.prompt,), add_special_tokens=special)
    if body.add_special_tokens:
        raise Unsupported("add_special_tokens has no meaning for chat", field="add_special_tokens")
    chat = chat_of(with_effort(dict(body), served), served.template)
    chosen(chat.tools or [], body.tool_choice if chat.tools else None)
    return replace(ask, chat=chat, holder="messages")


def tokenized(
    body: TokenizeBody, ids: Sequence[int], card: ModelCard, tokenizer: TextTokenizer
) -> dict[str, Any]:
    """The answer of /tokenize."""
    found = {"count": len(ids), "max_model_len": card.max_model_len, "tokens": list(ids)}
    if body.return_token_strs:
        found["token_strs"] = [tokenizer.token_text(i) for i in ids]
    return found


def detokenize_ids(raw: Mapping[str, Any], served: Served) -> tuple[list[int], tuple[str, ...]]:
    """The ids to decode, and the names of fields without effect.

    Raises:
        BadRequest: missing, or an id outside the vocabulary.
        NotFound: an unknown model.
    """
    body = body_of(DetokenizeBody, raw, served)
    ids = ids_of(body.tokens, "tokens", served.card.vocab_size)
    return list(ids), ignored_fields(body)


async def tokenize(request: web.Request, front: Front) -> web.Response:
    served = front.served
    ask = await front.read(request, lambda raw: parse_tokenize(raw, served))
    (ids,) = await front.prepare.prompt_ids(ask)
    body = tokenized(ask.body, ids, front.card, front.prepare.tokenizer)
    return json_response(body, headers=ignored_header(ask.ignored))


async def detokenize(request: web.Request, front: Front) -> web.Response:
    served = front.served
    ids, ignored = await front.read(request, lambda raw: detokenize_ids(raw, served))
    text = await front.prepare.run(
        lambda: front.prepare.tokenizer.decode(ids, skip_special_tokens=False)
    )
    return json_response({"prompt": text}, headers=ignored_header(ignored))
