"""Turns requests into what a choice between replicas reads of them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence as Seq

from jserve.engine.wire import encoded
from jserve.fleet.pages import PageNames
from jserve.fleet.route import Asked
from jserve.sched.cache.retention import root_of
from jserve.types import Request

FIRST_GUESS, GAIN = 128.0, 0.05


class Asking:
    """Knows how long answers are, a decayed mean of those that ended, and names pages."""

    def __init__(self) -> None:
        self._mean, self._names = FIRST_GUESS, PageNames()

    def learn(self, n_tokens: int) -> None:
        """An answer ended after ``n_tokens``."""
        self._mean += GAIN * (n_tokens - self._mean)

    def of(
        self, request: Request, page_size: int, said: Seq[Seq[int]] = (), weights: str = ""
    ) -> Asked:
        """``request`` for a choice. What its longest choice ``said`` is computed again like a prompt; ``weights`` as
        names of pages have them."""
        longest = max(said, key=len, default=())
        tokens = (*request.prompt_ids, *longest)
        most = request.params.max_tokens
        root = (*root_of(request), weights) if weights else root_of(request)
        ttft_ms = request.ttft_deadline_ms
        return Asked(
            pages=self._names.of(root, tokens, page_size),
            page_size=page_size,
            n_prompt=len(tokens),
            n_out=round(self._mean if most is None else min(most, self._mean)),
            lane=request.lane,
            ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
        )


def front_kv_name(request: Request, kv_features: Collection[str]) -> str:
    """A name for what step features change of the KV of ``request``, where ``kv_features`` are those that change any;
    "": nothing. Only engines have their functions, so what features are asked stands for what they make of it, the
    length of the prompt included. Requests of one name have the same KV; what engines call it is unknown, and so which
    of its pages they keep.
    """
    args = request.params.extra_args
    asked = [(name, args[name]) for name in sorted(args) if name in kv_features]
    if not asked:
        return ""
    try:
        text = encoded((len(request.prompt_ids), asked))
    except (TypeError, OverflowError):
        return ""  # it cannot be sent, and is refused when it would be
    return f"front:{hashlib.blake2b(text, digest_size=16).hexdigest()}"
