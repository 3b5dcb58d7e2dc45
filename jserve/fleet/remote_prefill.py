"""Requests whose prompt another replica computes first.

It owns which requests wait for their prompt. Whatever becomes of that, the request is answered where it costs least,
with the KV pages that are there; the others are computed again.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import replace

import msgspec

from jserve.engine.streams import Stream
from jserve.fleet.route import Asked
from jserve.ports import Clock
from jserve.request_options import RequestOptions
from jserve.sampling import SamplingParams
from jserve.types import Finish, Output, Request


class RemotePrefills:
    """The prefills that run on other replicas than the answers.

    Attributes:
        n_done, n_failed: those that were computed so, and those that were not.
    """

    def __init__(self, clock: Clock) -> None:
        self.n_done = self.n_failed = 0
        self._clock = clock
        self._waiting: dict[str, Stream] = {}
        """By id of a prefill, who waits for it."""
        self._ids: dict[str, str] = {}
        """By id of a request, that of its prefill, which no client can have chosen."""

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, stream: Stream) -> Stream:
        """The prefill of ``stream`` as a request of its own, which has no reader."""
        prefill = prefill_of(stream.request, uuid.uuid4().hex)
        self._waiting[prefill.id] = stream
        self._ids[stream.request.id] = prefill.id
        return Stream(prefill, clock=self._clock)

    def has(self, request_id: str) -> bool:
        return request_id in self._waiting

    def ended(self, output: Output) -> Stream | None:
        """``output`` of a prefill came: who waited for it; None: it is no end."""
        if output.finish is None:
            return None
        done = is_done(output)
        self.n_done += done
        self.n_failed += not done
        return self._take(output.request_id)

    def lost(self, prefill: Stream) -> Stream | None:
        """Nobody computes ``prefill`` any more: who waited for it."""
        stream = self._take(prefill.request.id)
        self.n_failed += stream is not None
        return stream

    def forget(self, request_id: str) -> str | None:
        """Nobody waits for the request ``request_id``: the id of its prefill, if that is under way."""
        id = self._ids.get(request_id)
        if id is not None:
            self._take(id)
        return id

    def _take(self, id: str) -> Stream | None:
        stream = self._waiting.pop(id, None)
        if stream is not None:
            del self._ids[stream.request.id]
        return stream


def is_done(output: Output) -> bool:
    """``output`` ends a prefill that was computed, and its pages are written."""
    return output.finish in (Finish.STOP, Finish.LENGTH)


def may_be_remote(request: Request) -> bool:
    """The KV of its prompt can be found by others."""
    plain = request.cache is None and not request.skip_prefix_cache and not request.said
    return plain and request.params.prompt_logprobs is None


def prefill_of(request: Request, id: str) -> Request:
    """The request that computes the prompt of ``request`` and exports its KV. What it draws is thrown away; fields that
    name its KV (tenant, salt, adapter, steering, longrope's factors) are the same."""
    own = {name: getattr(request, name) for name in ("tenant", "cache_salt", "priority", "lane")}
    extra = request.params.extra_args
    return Request.of(
        RequestOptions(**own),
        id=id,
        prompt_ids=request.prompt_ids,
        params=SamplingParams(max_tokens=1, temperature=0.0, extra_args=extra),
        adapter=request.adapter,
        kv_name=request.kv_name,
        is_long=request.is_long,
        exports_kv=True,
    )


def after_prefill(request: Request, still_open: Collection[int], source: str) -> Request:
    """``request``, whose pages are at ``source``, without the choices that have ended meanwhile."""
    n, said = request.params.n, ()
    if len(still_open) < n:
        said = tuple(() if i in still_open else None for i in range(n))
    return replace(request, kv_source=source, said=said)


def ready_behind(asked: Asked, *, ready: bool) -> Asked:
    """``asked`` once its prefill is over. ``ready``: all its full pages were exported; otherwise some may be."""
    n_ready = len(asked.pages) * asked.page_size
    return msgspec.structs.replace(asked, n_ready=n_ready) if ready else asked
