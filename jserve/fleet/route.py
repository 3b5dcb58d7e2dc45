"""Chooses a replica for a request, in seconds.

A pure function of the request, the replicas' views and the index of their pages; no clock, no chance. ::

    seconds(r) = wait(r)                                    what stands before it
               + new(r) * prefill_token_s(r)                its own prompt, less what r has of it
               + rows(r) * (new(r) * prefill_token_s(r)     what it costs those who run and wait there:
                            + n_out * row_s(r))             its prompt once, its row in every step
               + new(r) * prefill_token_s(r)                what it evicts there, and will be computed again

times the replica's suspicion; pages that a prefill replica exported cost their way in and out. The third line is
what LMetric (arXiv 2603.15202) multiplies by, in seconds. The last one tells only replicas apart that have different
parts of the prompt: without it a prefix is soon everywhere, and the caches hold few.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from jserve.engine.view import View
from jserve.errors import NotReady
from jserve.fleet.pages import PageIndex
from jserve.request_options import Lane

PREFILL = "prefill"
"""The role of a replica that computes prompts for others: it answers where no other is left."""
SLACK = 1.1
"""A prefix that nobody has goes to the replica of its hash, where that costs no more than so many times the least:
fronts that do not know of each other then agree, and a replica that is loaded gets no more prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as a choice reads it."""

    pages: tuple[bytes, ...]
    """Digests of the prompt's pages, see ``pages.digests_of``."""
    page_size: int
    n_prompt: int
    n_out: int
    """Tokens that its answer is expected to have."""
    lane: str = Lane.STANDARD
    adapter: str | None = None
    weights: str | None = None
    """None: any weights will do."""
    n_ready: int = 0
    """Prompt tokens whose pages a prefill replica exported: any one finds them, and has to move them."""
    ttft_s: float | None = None
    """Seconds within which its first token is promised."""


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A replica's view, and what the chooser knows beyond it."""

    view: View
    n_sent: int = 0
    """Requests sent since the view was made."""
    sent_s: float = 0.0
    """Seconds of prefill that these bring."""
    suspicion: float = 1.0
    """Its times over those that its prices promise, at least 1."""
    out: bool = False
    """It gets nothing new, whatever its view says."""
    role: str = ""
    """``PREFILL``, or any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaChoice:
    """The replica, and why."""

    replica: int
    n_cached: int
    """Prompt tokens that it has."""
    first_s: float = 0.0
    """Seconds to the first token, by its prices; 0 where nobody asked for them."""
    cost_s: float = 0.0
    """Those and what others pay."""


class Price(NamedTuple):
    """Seconds that a request costs at one replica."""

    first_s: float
    """To its first token."""
    cost_s: float
    """That and what those who run and wait there pay."""
    evicted_s: float
    """Computing again what it evicts there."""


def route(asked: Asked, candidates: Seq[Candidate], pages: PageIndex) -> ReplicaChoice:
    """The replica that ``asked`` goes to.

    Raises:
        NotReady: none of them may take it.
    """
    known = pages.known(asked.pages, len(candidates))
    able = [i for i, one in enumerate(candidates) if not one.out and serves(one.view, asked)]
    able = [i for i in able if candidates[i].role != PREFILL] or able
    if not able:
        raise NotReady("no replica takes this request now", retry_after=5.0)
    prices = {i: price(asked, candidates[i], known[i]) for i in able}
    if asked.ttft_s is not None:
        in_time = {i: price for i, price in prices.items() if price.first_s <= asked.ttft_s}
        prices = in_time or prices
    replica = _cheapest(asked, prices, known)
    first_s, cost_s, _ = prices[replica]
    n_cached = max(asked.n_ready, known[replica] * asked.page_size)
    return ReplicaChoice(replica=replica, n_cached=n_cached, first_s=first_s, cost_s=cost_s)


def serves(view: View, asked: Asked) -> bool:
    """A replica of that ``view`` may take ``asked``."""
    if not view.ready or (asked.weights is not None and asked.weights != view.weights):
        return False
    return asked.adapter is None or asked.adapter in view.adapters


def price(asked: Asked, candidate: Candidate, n_pages: int) -> Price:
    """The price of a replica that has ``n_pages`` of the prompt."""
    view, has = candidate.view, n_pages * asked.page_size
    moved = max(0, asked.n_ready - has)
    own_s = (asked.n_prompt - has - moved) * view.prefill_token_s
    rows = view.n_rows + candidate.n_sent
    move_s = 2 * view.page_s * moved / asked.page_size
    first_s = view.wait_s.get(asked.lane, 0.0) + candidate.sent_s + move_s + own_s
    others_s = rows * (own_s + asked.n_out * view.row_s)
    times = candidate.suspicion
    return Price(first_s * times, (first_s + others_s) * times, own_s * times)


def _cheapest(asked: Asked, prices: Mapping[int, Price], known: Seq[int]) -> int:
    """The replica of least cost; where nobody has a page, that of the prefix's hash among the near ones."""
    if any([known[i] for i in prices]):
        costs = {i: price.cost_s + price.evicted_s for i, price in prices.items()}
        most_s = min(costs.values())
    else:  # all evict the same
        costs = {i: price.cost_s for i, price in prices.items()}
        most_s = SLACK * min(costs.values())
    near = [i for i, cost_s in costs.items() if cost_s <= most_s]
    return near[0] if len(near) == 1 else max(near, key=lambda i: _weight(asked, i))


def _weight(asked: Asked, replica: int) -> bytes:
    """Rendezvous hashing: the replica with the largest weight is that of a prefix, and stays so when
    others come and go."""
    first = asked.pages[0] if asked.pages else b""
    return hashlib.blake2b(b"%d" % replica, digest_size=8, key=first).digest()
