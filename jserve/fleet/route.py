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
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from jserve.engine.view import View
from jserve.errors import NotReady
from jserve.fleet.pages import PageIndex
from jserve.request_options import Lane

PREFILL = "prefill"
"""The role of a replica that computes prompts for others: it answers where no other is left."""
SLACK = 1.1
"""A prefix that nobody has goes to the replica of its hash, where that costs no more than so many times the least:
fronts that do not know of each other then agree, and a replica that is loaded gets no more prefixes."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
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
    n_ended: int = 0
    """Sequences that ended since."""
    sent_s: float = 0.0
    """Seconds of prefill that these bring."""
    suspicion: float = 1.0
    """Its times over those that its prices promise, at least 1."""
    out: bool = False
    """It gets nothing new, whatever its view says."""
    role: str = ""
    """``PREFILL``, or any other."""


class ReplicaChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The replica, and why."""

    replica: int
    n_cached: int
    """Prompt tokens that it has."""
    first_s: float
    """Seconds to the first token, without the replica's suspicion, since what is observed is compared with it."""
    cost_s: float
    """Those and what others pay, times its suspicion."""


class Prices(NamedTuple):
    """Seconds that a request costs at each of some replicas. Columns, since a choice reads one of them at a time."""

    first_s: list[float]
    """To its first token."""
    cost_s: list[float]
    """That, and what those who run and wait there pay."""
    total_s: list[float]
    """That, and computing again what it evicts there."""


def route(asked: Asked, candidates: Seq[Candidate], pages: PageIndex) -> ReplicaChoice:
    """The replica that ``asked`` goes to.

    Raises:
        NotReady: none of them may take it.
    """
    known = pages.known(asked.pages, len(candidates))
    able = able_of(asked, candidates, but=PREFILL) or able_of(asked, candidates)
    if not able:
        raise NotReady("no replica takes this request now", retry_after=5.0)
    found = prices(asked, candidates, known, able)
    if asked.ttft_s is not None:
        in_time = [i for i, first_s in enumerate(found.first_s) if first_s <= asked.ttft_s]
        if in_time:
            able = [able[i] for i in in_time]
            found = Prices(*([column[i] for i in in_time] for column in found))
    best = _cheapest(asked, able, found, any(known) and any(known[i] for i in able))
    return choice_of(asked, candidates, known, found, best, able[best])


def choice_of(
    asked: Asked,
    candidates: Seq[Candidate],
    known: Seq[int],
    found: Prices,
    at: int,
    replica: int,
) -> ReplicaChoice:
    """The choice of ``replica``, whose prices are number ``at`` of ``found``. These are of the prompt alone; what its
    steps take for the rows that decode in them is added to ``first_s``, since the first token waits for that too."""
    view, n_cached = candidates[replica].view, max(asked.n_ready, known[replica] * asked.page_size)
    first_s = found.first_s[at] / candidates[replica].suspicion
    if view.chunk:
        n_steps = math.ceil((asked.n_prompt - n_cached) / view.chunk)
        first_s += n_steps * max(0.0, view.step_s - view.chunk * view.prefill_token_s)
    return ReplicaChoice(
        replica=replica, n_cached=n_cached, first_s=first_s, cost_s=found.cost_s[at]
    )


def able_of(asked: Asked, candidates: Seq[Candidate], but: str | None = None) -> list[int]:
    """Numbers of those that may take ``asked``, without those of role ``but``."""
    able = [
        i for i, one in enumerate(candidates) if one.view.ready and not one.out and one.role != but
    ]
    if asked.weights is not None:
        able = [i for i in able if candidates[i].view.weights == asked.weights]
    if asked.adapter is not None:
        able = [i for i in able if asked.adapter in candidates[i].view.adapters]
    return able


def prices(asked: Asked, candidates: Seq[Candidate], known: Seq[int], numbers: Seq[int]) -> Prices:
    """The prices of the candidates of ``numbers``. Those of ``known`` are pages of the prompt that each candidate has.
    One loop, without a call or a tuple for each of them, in floats: it is most of a choice's time."""
    found, lane, n_out = Prices([], [], []), asked.lane, float(asked.n_out)
    add_first, add_cost, add_total = [column.append for column in found]
    n_prompt, n_ready, page_size = float(asked.n_prompt), asked.n_ready, asked.page_size
    for i in numbers:
        one = candidates[i]
        view, has = one.view, known[i] * page_size
        first_s = view.wait_s.get(lane, 0.0)
        if view.n_before and one.n_ended > one.n_sent:  # others have not taken all places since
            freed = min(view.n_before, one.n_ended - one.n_sent)
            first_s *= (view.n_before - freed) / view.n_before
        first_s += one.sent_s
        new = n_prompt - has
        if n_ready > has:
            new = n_prompt - n_ready
            first_s += 2 * view.page_s * (n_ready - has) / page_size
        own_s = new * view.prefill_token_s
        first_s += own_s
        cost_s = first_s + (view.n_rows + one.n_sent) * (own_s + n_out * view.row_s)
        times = one.suspicion
        if times != 1.0:
            first_s, cost_s, own_s = first_s * times, cost_s * times, own_s * times
        add_first(first_s)
        add_cost(cost_s)
        add_total(cost_s + own_s)
    return found


def _cheapest(asked: Asked, numbers: Seq[int], found: Prices, known: bool) -> int:
    """The index of the replica of least cost in ``numbers``; where nobody has a page, that of the prefix's hash among
    the near ones."""
    costs = found.total_s if known else found.cost_s  # where nobody has any, all evict the same
    least_s = min(costs)
    if known and costs.count(least_s) == 1:
        return costs.index(least_s)
    most_s = least_s if known else SLACK * least_s
    near = [i for i, cost_s in enumerate(costs) if cost_s <= most_s]
    return near[0] if len(near) == 1 else max(near, key=lambda i: _weight(asked, numbers[i]))


def _weight(asked: Asked, replica: int) -> bytes:
    """Rendezvous hashing: the replica with the largest weight is that of a prefix, and stays so when
    others come and go."""
    first = asked.pages[0] if asked.pages else b""
    return hashlib.blake2b(b"%d" % replica, digest_size=8, key=first).digest()
