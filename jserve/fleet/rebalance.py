"""Says which requests that wait at one replica had better wait at another.

A request is sent where it costs least then. Later a replica has joined, is back, or has done with its queue sooner than
the others. A pure function of views and pages, in seconds::

    stays    wait(r) * k / n            the k-th of n requests that wait at r, where the next one would wait so long
    goes     cost(q) + evicted(q)       as ``fleet.route`` prices q: its prompt there, and what others pay for it

It goes where the second one is less, so whoever moves gains more than is computed twice, and only to a replica that
would begin with it in its next step: between queues there is nothing to gain that the next arrivals do not settle
(docs/fleet.md has the figures). Only requests that told nothing move: the pages of one that runs lie where it is.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jserve.fleet.candidates import PREFILL, Candidate, CandidateTable
from jserve.fleet.pages import PageIndex
from jserve.fleet.route import Asked, able_of, prices

MOST_LOOKED = 16
"""Requests that are priced in one look, so that a long queue takes no more of the front's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRequest:
    """A request that was sent and has told nothing."""

    id: str
    asked: Asked
    replica: int
    """Number of the one that it waits at."""
    left_s: float
    """Until it is computed there."""


def waits_of(
    sent: Iterable[tuple[str, Asked, int]], candidates: CandidateTable
) -> list[WaitingRequest]:
    """The wait of each of ``sent``: (id, request, replica) of all that told nothing, in the order in which they were
    sent."""
    queues: dict[tuple[int, str], list[tuple[str, Asked]]] = defaultdict(list)
    for id, asked, replica in sent:
        queues[replica, asked.lane].append((id, asked))
    found = []
    for (replica, lane), queue in queues.items():
        one_s = candidates[replica].view.wait_s.get(lane, 0.0) / len(queue)
        for k, (id, asked) in enumerate(queue, 1):
            found.append(WaitingRequest(id=id, asked=asked, replica=replica, left_s=k * one_s))
    return found


def longest_waits(waiting: Iterable[WaitingRequest]) -> list[WaitingRequest]:
    """Those that are looked at, the longest wait first; of two equal ones the smaller id."""
    waits = [one for one in waiting if one.left_s > 0]
    return heapq.nsmallest(MOST_LOOKED, waits, key=lambda one: (-one.left_s, one.id))


def goes_elsewhere(one: WaitingRequest, candidates: CandidateTable, pages: PageIndex) -> bool:
    """Some other replica has room for ``one``, at less than the wait that is left."""
    able = np.flatnonzero(able_of(one.asked, candidates, leave_out=(one.replica,))).tolist()
    free = [number for number in able if _is_free(candidates[number], one.asked)]
    if not free:
        return False
    found = prices(one.asked, candidates, pages.known(one.asked.pages, len(candidates)))
    return bool((found.total_s[free] < one.left_s).any())


def _is_free(candidate: Candidate, asked: Asked) -> bool:
    """Nothing stands before ``asked`` there, and its view counts all that it was sent."""
    waits = candidate.view.wait_s.get(asked.lane, 0.0) > 0
    return not waits and not candidate.n_sent and candidate.role != PREFILL
