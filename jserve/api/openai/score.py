"""``/v1/score``: scores texts behind a query by the log-probabilities of their tokens.

Names are SGLang's. Every score is read off a prompt that is computed, so none is limited to the likeliest tokens,
and the shared query is computed once::

    items               query + item                 sum of the item's log-probabilities
    label_token_ids     query + item + label         the label's probability, by item and label
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from jserve.api.http.dialect import generation, read_request
from jserve.api.http.front import Front, ignored_header, json_response
from jserve.api.openai.usage import head, usage_of
from jserve.api.reply.generate import Generation, Json
from jserve.api.reply.logprobs import finite
from jserve.api.request.fields import refused, shaped
from jserve.api.request.parsed import ParsedRequest, Served
from jserve.api.request.shared import Ids, Service, body_of, service_of
from jserve.api.request.values import MAX_CHOICES, PROMPT, ids_of, prompts_of
from jserve.errors import BadRequest, Unsupported
from jserve.sampling import SamplingParams
from jserve.types import Request, TokenLogprob

SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)


class ScoreBody(Service):
    """POST /v1/score."""

    query: Any = shaped(PROMPT, required=True)
    items: Any = shaped(PROMPT, required=True)
    label_token_ids: Ids | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    add_special_tokens: bool | None = None
    stream: Any = refused(False)
    truncate_prompt_tokens: Any = refused()
    truncation_side: Any = refused()


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """The prompts of a request in order, and from which token on each is scored."""

    prompts: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]


def parse_score(raw: Mapping[str, Any], served: Served) -> ParsedRequest:
    """A request for scores, checked; its prompts are the query and then the items.

    Raises:
        BadRequest, NotFound: as the field at fault asks for.
    """
    body, card = body_of(ScoreBody, raw, served), served.card
    if not card.scores_prompts:
        raise Unsupported("this server does not score prompt tokens", field="query")
    query = _prompts(body.query, "query", card.vocab_size)
    items = _prompts(body.items, "items", card.vocab_size)
    if len(query) > 1:
        raise BadRequest("query must be one text", field="query")
    labels = body.label_token_ids
    if labels is not None and not ids_of(labels, "label_token_ids", card.vocab_size):
        raise BadRequest("label_token_ids must not be empty", field="label_token_ids")
    if body.apply_softmax and labels is None:
        raise BadRequest("apply_softmax needs label_token_ids", field="apply_softmax")
    if len(items) * len(labels or (0,)) > MAX_CHOICES:
        raise BadRequest(f"items times labels may be at most {MAX_CHOICES}", field="items")
    special = body.add_special_tokens is not False
    return ParsedRequest(
        params=SCORED,
        prompts=(*query, *items),
        add_special_tokens=special,
        holder="items",
        **service_of(body),
    )


def _prompts(value: Any, field: str, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    try:
        return prompts_of(value, vocab_size)
    except BadRequest as e:
        raise BadRequest(e.message.replace("prompt", field, 1), field=field) from None


async def score(request: web.Request, front: Front) -> web.StreamResponse:
    ask = await read_request(request, front, parse_score)
    scored = await _scored(front, ask)
    ask = replace(ask, prompts=scored.prompts)
    requests = await front.prepare.requests(ask)
    with generation(request, front, ask, requests, charge_output=False) as run:
        entries = await _entries(run, requests, scored)
    body = answer(ask.body, entries)
    usage = usage_of(replace(run.usage, completion=0))
    found = head("score-", front.card) | {"object": "scoring"} | body | {"usage": usage}
    return json_response(found, headers=ignored_header(ask.ignored))


async def _scored(front: Front, ask: ParsedRequest) -> ScoredPrompts:
    """Tokens of all prompts; the query's special tokens come first, an item has none."""
    body: ScoreBody = ask.body
    first, *rest = ask.prompts
    heads = await front.prepare.prompt_ids(replace(ask, prompts=(first,), holder="query"))
    plain = replace(ask, prompts=tuple(rest), add_special_tokens=False)
    query, items = tuple(heads[0]), [tuple(ids) for ids in await front.prepare.prompt_ids(plain)]
    if not query:
        raise BadRequest("query must hold at least one token", field="query")
    if not all(items):
        raise BadRequest("items must hold at least one token each", field="items")
    joined = [item + query if body.item_first else query + item for item in items]
    if body.label_token_ids is None:
        starts = [len(item if body.item_first else query) for item in items]
        return ScoredPrompts(tuple(joined), tuple(starts))
    pairs = [(ids, label) for ids in joined for label in body.label_token_ids]
    return ScoredPrompts(
        tuple((*ids, label) for ids, label in pairs), tuple(len(i) for i, _ in pairs)
    )


async def _entries(
    run: Generation, requests: Sequence[Request], scored: ScoredPrompts
) -> list[list[TokenLogprob]]:
    """Scored tokens of every prompt."""
    found: list[list[TokenLogprob]] = [[] for _ in requests]
    async with aclosing(run.pieces()) as pieces:
        async for piece in pieces:
            if piece.prompt_logprobs is not None:
                told = piece.prompt_logprobs[scored.starts[piece.prompt] :]
                found[piece.prompt] = [entry for entry in told if entry is not None]
    return found


def answer(body: ScoreBody, entries: Sequence[Sequence[TokenLogprob]]) -> Json:
    """``scores``: one number per item, or one list of probabilities per item."""
    if body.label_token_ids is None:
        return {"scores": [_total(e) for e in entries], "items": [_item(e) for e in entries]}
    n = len(body.label_token_ids)
    logprobs = [e[0].logprob for e in entries]
    rows = [logprobs[i : i + n] for i in range(0, len(logprobs), n)]
    return {"scores": [_softmax(row) if body.apply_softmax else _exp(row) for row in rows]}


def _item(entries: Sequence[TokenLogprob]) -> Json:
    return {
        "logprob": _total(entries),
        "token_ids": [e.token for e in entries],
        "token_logprobs": [finite(e.logprob) for e in entries],
        "greedy": all(e.top_ids[:1] == (e.token,) for e in entries),
    }


def _total(entries: Sequence[TokenLogprob]) -> float:
    return math.fsum(finite(e.logprob) for e in entries)


def _exp(row: Sequence[float]) -> list[float]:
    return [math.exp(logprob) for logprob in row]


def _softmax(row: Sequence[float]) -> list[float]:
    """Over the labels alone."""
    top = max(row)
    if top == -math.inf:
        return [1.0 / len(row)] * len(row)
    weights = [math.exp(logprob - top) for logprob in row]
    return [weight / sum(weights) for weight in weights]
