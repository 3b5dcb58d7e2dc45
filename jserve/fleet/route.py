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
from collections.abc import Collection
from typing import NamedTuple

import msgspec
import numpy as np

from jserve.errors import NotReady
from jserve.fleet.candidates import CandidateTable
from jserve.fleet.pages import PageIndex
from jserve.request_options import Lane

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
    """Seconds that a request costs at each replica, float64 [n] by number."""

    first_s: np.ndarray
    """To its first token."""
    cost_s: np.ndarray
    """That, and what those who run and wait there pay."""
    total_s: np.ndarray
    """That, and computing again what it evicts there."""


def route(
    asked: Asked, candidates: CandidateTable, pages: PageIndex, leave_out: Collection[int] = ()
) -> ReplicaChoice:
    """The replica that ``asked`` goes to, none of those numbered ``leave_out``.

    Raises:
        NotReady: none of the others may take it.
    """
    able = able_of(asked, candidates, leave_out)
    [numbers] = (able & candidates.answers).nonzero()
    if not len(numbers):
        [numbers] = able.nonzero()
    if not len(numbers):
        raise NotReady("no replica takes this request now", retry_after=5.0)
    known = pages.known(asked.pages, len(candidates))
    found = prices(asked, candidates, known)
    if asked.ttft_s is not None:
        in_time = numbers[found.first_s[numbers] <= asked.ttft_s]
        numbers = in_time if len(in_time) else numbers
    return choice_of(asked, candidates, known, found, _cheapest(asked, numbers, found, known))


def choice_of(
    asked: Asked, candidates: CandidateTable, known: np.ndarray, found: Prices, replica: int
) -> ReplicaChoice:
    """The choice of ``replica``. Prices are of the prompt alone; what its steps take for the rows that decode in them
    is added to ``first_s``, since the first token waits for that too."""
    one, n_cached = candidates[replica], max(asked.n_ready, int(known[replica]) * asked.page_size)
    view, first_s = one.view, float(found.first_s[replica]) / one.suspicion
    if view.chunk:
        n_steps = math.ceil((asked.n_prompt - n_cached) / view.chunk)
        first_s += n_steps * max(0.0, view.step_s - view.chunk * view.prefill_token_s)
    cost_s = float(found.cost_s[replica])
    return ReplicaChoice(replica=replica, n_cached=n_cached, first_s=first_s, cost_s=cost_s)


def able_of(
    asked: Asked, candidates: CandidateTable, leave_out: Collection[int] = ()
) -> np.ndarray:
    """The candidates that may take ``asked``, none of those numbered ``leave_out``: bool [n]."""
    able = candidates.takes_requests
    if leave_out:
        able = able.copy()
        able[[*leave_out]] = False
    if asked.weights is not None:
        able = able & np.array([one.view.weights == asked.weights for one in candidates], bool)
    if asked.adapter is not None:
        able = able & np.array([asked.adapter in one.view.adapters for one in candidates], bool)
    return able


def prices(asked: Asked, candidates: CandidateTable, known: np.ndarray) -> Prices:
    """The prices of all candidates, also of those that may not take ``asked``. ``known``: float64 [n], pages of the
    prompt that each one has."""
    first_s, page_size = candidates.before_s[asked.lane], float(asked.page_size)
    has = known * page_size
    if asked.n_ready:
        moved = np.maximum(asked.n_ready - has, 0.0)
        first_s = first_s + 2.0 * candidates.page_s * moved / page_size
        has = has + moved
    own_s = (float(asked.n_prompt) - has) * candidates.prefill_token_s
    first_s = first_s + own_s
    others_s = candidates.rows * (own_s + float(asked.n_out) * candidates.row_s)
    times = candidates.suspicion
    cost_s = (first_s + others_s) * times
    return Prices(first_s * times, cost_s, cost_s + own_s * times)


def _cheapest(asked: Asked, numbers: np.ndarray, found: Prices, known: np.ndarray) -> int:
    """The replica of least cost of those of ``numbers``, int64 [m]; where none of them has a page, that of the prefix's
    hash among the near ones."""
    has_pages = np.count_nonzero(known[numbers]) > 0  # else all evict the same
    costs = (found.total_s if has_pages else found.cost_s)[numbers]
    least_s = costs[costs.argmin()]
    most_s = least_s if has_pages else SLACK * least_s
    near = numbers[costs <= most_s].tolist()
    return near[0] if len(near) == 1 else max(near, key=lambda number: _weight(asked, number))


def _weight(asked: Asked, replica: int) -> bytes:
    """Rendezvous hashing: the replica with the largest weight is that of a prefix, and stays so when
    others come and go."""
    first = asked.pages[0] if asked.pages else b""
    return hashlib.blake2b(b"%d" % replica, digest_size=8, key=first).digest()
