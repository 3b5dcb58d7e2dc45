"""Requests whose prompt another replica computes first.

It owns which requests wait for their prompt, and what they wait for. Whatever becomes of the prompt, the request goes
on where it is answered: with the pages that are there, and without the others, which are computed again.
"""

from __future__ import annotations

from dataclasses import replace

from jserve.engine.streams import Stream
from jserve.ports import Clock
from jserve.request_options import RequestOptions
from jserve.sampling import SamplingParams
from jserve.types import Finish, Output, Request

SUFFIX = ".prefill"
"""Of the id of a request that only computes a prompt."""


class HandOvers:
    """The prompts that are computed apart.

    Attributes:
        n_done, n_failed: prompts that were computed so, and that were not.
    """

    def __init__(self, clock: Clock) -> None:
        self.n_done = self.n_failed = 0
        self._clock = clock
        self._waiting: dict[str, Stream] = {}
        """By id of the prompt's request, who waits for it."""

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, stream: Stream) -> Stream:
        """The prompt of ``stream`` as a request of its own, which has no reader."""
        prompt = prompt_of(stream.request)
        self._waiting[prompt.id] = stream
        return Stream(prompt, clock=self._clock)

    def has(self, request_id: str) -> bool:
        return request_id in self._waiting

    def ended(self, output: Output) -> Stream | None:
        """``output`` of a prompt came: who goes on now; None: it is no end."""
        if output.finish is None:
            return None
        done = output.finish in (Finish.STOP, Finish.LENGTH)
        self.n_done += done
        self.n_failed += not done
        return self._waiting.pop(output.request_id)

    def lost(self, prompt: Stream) -> Stream | None:
        """Nobody computes ``prompt`` any more: who goes on without it."""
        stream = self._waiting.pop(prompt.request.id, None)
        self.n_failed += stream is not None
        return stream

    def forget(self, request_id: str) -> str | None:
        """Nobody waits for the request ``request_id``: the id of its prompt's, if that is computed."""
        id = request_id + SUFFIX
        return id if self._waiting.pop(id, None) is not None else None


def may_be_apart(request: Request) -> bool:
    """The KV of its prompt can be found by others."""
    plain = request.cache is None and not request.skip_prefix_cache and not request.said
    return plain and request.params.prompt_logprobs is None


def prompt_of(request: Request) -> Request:
    """The request that computes the prompt of ``request`` and hands it over: what it draws is thrown away."""
    params = SamplingParams(max_tokens=1, temperature=0.0, extra_args=request.params.extra_args)
    own = {name: getattr(request, name) for name in ("tenant", "cache_salt", "priority", "lane")}
    return Request.of(
        RequestOptions(**own),
        id=request.id + SUFFIX,
        prompt_ids=request.prompt_ids,
        params=params,
        adapter=request.adapter,
        hands_over=True,
    )


def behind_its_prompt(stream: Stream, source: str) -> Request:
    """The request of ``stream``, whose pages are at ``source``, without the choices that have ended meanwhile."""
    said = ()
    if len(stream.open) < stream.request.params.n:
        said = tuple(() if i in stream.open else None for i in range(stream.request.params.n))
    return replace(stream.request, pages_from=source, said=said)
