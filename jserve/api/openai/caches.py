"""Named caches over HTTP: creates, renews, lists and drops cache handles.

It owns the fields and answers of ``/v1/caches`` and the tokens of the handles made here, so that a request that
names one counts and checks its whole prompt. ::

    POST   /v1/caches          {"name", "prompt" | "messages", "ttl_s"}   computes it, answers when done
    GET    /v1/caches          all of the caller's
    GET    /v1/caches/{name}   one
    POST   /v1/caches/{name}   {"ttl_s"}: it lives that long from now
    DELETE /v1/caches/{name}
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from jserve.api.http.front import TRACE, Front, ignored_header, json_response
from jserve.api.openai.chat import KWARGS
from jserve.api.openai.fields import ChatBody
from jserve.api.openai.messages import MESSAGES
from jserve.api.openai.tools import TOOLS
from jserve.api.reply.generate import failure
from jserve.api.request.fields import Fields, ignored_fields, shaped, validate
from jserve.api.request.parsed import ParsedRequest, Served
from jserve.api.request.shared import body_of
from jserve.api.request.values import PROMPT, prompts_of, salt_of
from jserve.engine.wire import HandleCommand
from jserve.errors import BadRequest, CacheNotFound
from jserve.request_options import RequestOptions
from jserve.sampling import SamplingParams
from jserve.text.chat.fields import chat_of
from jserve.types import Finish, HandleInfo, Request

TTL_S = 3600.0
NOTHING_DRAWN = SamplingParams(temperature=0.0, max_tokens=0)


class CreateBody(Fields):
    """POST /v1/caches: ``prompt``, or ``messages`` with the fields that shape a chat prompt."""

    name: str
    ttl_s: float | None = None
    model: str | None = None
    prompt: Any = shaped(PROMPT)
    add_special_tokens: bool | None = None
    messages: Any = shaped(MESSAGES)
    tools: Any = shaped(TOOLS)
    documents: Any = shaped({"type": ["array", "null"], "items": {"type": "object"}})
    chat_template_kwargs: Any = shaped(KWARGS)
    cache_salt: str | None = None


class RenewBody(Fields):
    """POST /v1/caches/{name}."""

    ttl_s: float


class HandleBook:
    """The tokens of the handles made through this server, by tenant and name.

    Holds what the engine's quota of pages lets live: whatever is past its time goes with the next
    handle that anyone makes, and is not found before. ``clock`` gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[str, str], tuple[tuple[int, ...], float]] = {}
        """Tokens, and when the handle expires."""

    def __len__(self) -> int:
        return len(self._known)

    def head(self, ask: ParsedRequest) -> tuple[int, ...] | None:
        """Tokens that the prompt of ``ask`` starts with; None when it names no handle known here."""
        options = ask.options
        tokens, until = self._known.get((options.tenant, options.cache or ""), ((), 0.0))
        return tokens if until > self._clock() else None

    def made(self, tenant: str, name: str, tokens: tuple[int, ...], ttl_s: float) -> None:
        """A handle that lives for ``ttl_s`` from now."""
        now = self._clock()
        self._known = {key: known for key, known in self._known.items() if known[1] > now}
        self._known[tenant, name] = tokens, now + ttl_s

    def renewed(self, tenant: str, name: str, ttl_s: float) -> None:
        """It lives for ``ttl_s`` from now; one that was not made here stays unknown."""
        if (known := self._known.get((tenant, name))) is not None:
            self._known[tenant, name] = known[0], self._clock() + ttl_s

    def forget(self, tenant: str, name: str) -> None:
        self._known.pop((tenant, name), None)

    def keep_only(self, tenant: str, names: Sequence[str]) -> None:
        """The tenant has these handles and no other."""
        gone = [key for key in self._known if key[0] == tenant and key[1] not in names]
        for key in gone:
            del self._known[key]


def parse_create(raw: Mapping[str, Any], served: Served) -> ParsedRequest:
    """A request to create a named cache, checked.

    Raises:
        BadRequest: neither or both of ``prompt`` and ``messages``, several prompts.
        NotFound: an unknown model.
    """
    body, card = body_of(CreateBody, raw, served), served.card
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("give either prompt or messages", field="prompt")
    ask = ParsedRequest(
        body=body,
        ignored=ignored_fields(body),
        params=NOTHING_DRAWN,
        options=RequestOptions(cache_salt=salt_of(body.cache_salt)),
    )
    if body.prompt is not None:
        prompts = prompts_of(body.prompt, card.vocab_size)
        if len(prompts) > 1:
            raise BadRequest("a cache is made of one prompt", field="prompt")
        special = body.add_special_tokens is not False
        return replace(ask, prompts=prompts, add_special_tokens=special)
    fields: dict[str, Any] = dict.fromkeys(ChatBody.model_fields)
    fields |= {name: getattr(body, name) for name in CreateBody.model_fields}
    chat = chat_of(fields | {"add_generation_prompt": False}, served.template)
    return replace(ask, chat=chat, holder="messages")


async def create(request: web.Request, front: Front) -> web.StreamResponse:
    """Compute a prefix and pin it; answered when it is pinned."""
    served = front.served
    ask = await front.read(request, lambda raw: parse_create(raw, served))
    tenant, name = _tenant(request), ask.body.name
    (made,) = await front.prepare.requests(ask.of(tenant))
    made = replace(made, cache=name)
    ttl_s = TTL_S if ask.body.ttl_s is None else float(ask.body.ttl_s)
    with ask.words():
        n_cached = await _compute(front, made, ttl_s)
    found = await front.engine.handles(_ask("find", tenant))
    front.prepare.book.keep_only(tenant, [info.name for info in found])
    info = next((info for info in found if info.name == name), None)
    if info is None:
        raise CacheNotFound(f"cache {name!r} has expired already", field="ttl_s")
    front.prepare.book.made(tenant, name, made.prompt_ids, info.expires_in_s)
    usage = {"prompt_tokens": len(made.prompt_ids), "cached_tokens": n_cached}
    return json_response(shown(info) | {"usage": usage}, headers=ignored_header(ask.ignored))


async def _compute(front: Front, made: Request, ttl_s: float) -> int:
    """Tokens that were known already.

    Raises:
        JserveError: the engine refused or failed.
    """
    outputs = await front.engine.create(made, ttl_s)
    for output in outputs:
        if output.finish in (Finish.ERROR, Finish.ABORT):
            raise failure(output)
    return max(output.n_cached for output in outputs)


async def listed(request: web.Request, front: Front) -> web.StreamResponse:
    found = await front.engine.handles(_ask("find", _tenant(request)))
    return json_response({"object": "list", "data": [shown(info) for info in found]})


async def one(request: web.Request, front: Front) -> web.StreamResponse:
    (info,) = await front.engine.handles(_ask("find", _tenant(request), _name(request)))
    return json_response(shown(info))


async def renew(request: web.Request, front: Front) -> web.StreamResponse:
    strict = front.options.strict_params
    body: RenewBody = await front.read(request, lambda raw: validate(RenewBody, raw, strict=strict))
    tenant, name = _tenant(request), _name(request)
    (info,) = await front.engine.handles(_ask("renew", tenant, name, float(body.ttl_s)))
    front.prepare.book.renewed(tenant, name, info.expires_in_s)
    return json_response(shown(info), headers=ignored_header(ignored_fields(body)))


async def drop(request: web.Request, front: Front) -> web.StreamResponse:
    tenant, name = _tenant(request), _name(request)
    front.prepare.book.forget(tenant, name)
    await front.engine.handles(_ask("drop", tenant, name))
    return json_response({"object": "cache.deleted", "name": name, "deleted": True})


def _ask(action: Any, tenant: str, name: str | None = None, ttl_s: float = 0.0) -> HandleCommand:
    return HandleCommand(id=uuid.uuid4().hex, action=action, tenant=tenant, name=name, ttl_s=ttl_s)


def _tenant(request: web.Request) -> str:
    return request[TRACE].tenant.name


def _name(request: web.Request) -> str:
    return request.match_info["name"]


def shown(info: HandleInfo) -> dict[str, Any]:
    """A handle as the API shows it."""
    return {
        "object": "cache",
        "name": info.name,
        "tokens": info.n_tokens,
        "pages": info.n_pages,
        "pinned": info.pinned,
        "expires_in_s": round(info.expires_in_s, 3),
        "uses": info.n_uses,
    }
