"""The choice of a replica in its plain form, page by page and replica by replica: what ``fleet.route`` and
``fleet.pages`` must find too, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence as Seq

from jserve.engine.view import PageEvent, View
from jserve.fleet.candidates import PREFILL, Candidate
from jserve.fleet.route import SLACK, Asked, ReplicaChoice, _weight


class PlainPages:
    """The pages of each replica: a set of those that it said it holds, and a count of those that were sent."""

    def __init__(self, n: int) -> None:
        self.held: list[set[bytes]] = [set() for _ in range(n)]
        self.sent: list[Counter[bytes]] = [Counter() for _ in range(n)]

    def update(self, replica: int, events: Iterable[PageEvent]) -> None:
        for event in events:
            (self.held[replica].add if event.added else self.held[replica].discard)(event.digest)

    def send(self, replica: int, digests: Seq[bytes]) -> None:
        self.sent[replica].update(digests)

    def over(self, replica: int, digests: Seq[bytes]) -> None:
        self.sent[replica].subtract(digests)

    def forget(self, replica: int) -> None:
        self.held[replica].clear()

    def known(self, digests: Seq[bytes], n: int) -> list[int]:
        return [self._known(digests, i) for i in range(n)]

    def _known(self, digests: Seq[bytes], replica: int) -> int:
        held, sent = self.held[replica], self.sent[replica]
        for i, digest in enumerate(digests):
            if digest not in held and not sent[digest]:
                return i
        return len(digests)


def direct_route(asked: Asked, candidates: Seq[Candidate], known: Seq[int]) -> ReplicaChoice | None:
    """The choice where replica i holds ``known[i]`` pages; None: nobody may take it."""
    able = [i for i, one in enumerate(candidates) if not one.out and _serves(one.view, asked)]
    able = [i for i in able if candidates[i].role != PREFILL] or able
    if not able:
        return None
    prices = {i: direct_price(asked, candidates[i], known[i]) for i in able}
    if asked.ttft_s is not None:
        prices = {i: p for i, p in prices.items() if p[0] <= asked.ttft_s} or prices
    if any(known[i] for i in prices):
        costs = {i: cost_s + evicted_s for i, (_, cost_s, evicted_s) in prices.items()}
        most_s = min(costs.values())
    else:
        costs = {i: cost_s for i, (_, cost_s, _) in prices.items()}
        most_s = SLACK * min(costs.values())
    near = [i for i, cost_s in costs.items() if cost_s <= most_s]
    best = max(near, key=lambda i: _weight(asked, i))
    return ReplicaChoice(
        replica=best,
        n_cached=max(asked.n_ready, known[best] * asked.page_size),
        first_s=prices[best][0] / candidates[best].suspicion,
        cost_s=prices[best][1],
    )


def _serves(view: View, asked: Asked) -> bool:
    if not view.ready or (asked.weights is not None and asked.weights != view.weights):
        return False
    return asked.adapter is None or asked.adapter in view.adapters


def direct_price(asked: Asked, candidate: Candidate, n_pages: int) -> tuple[float, float, float]:
    """Seconds to the first token, with what others pay, and of what is evicted."""
    view, has = candidate.view, n_pages * asked.page_size
    moved = max(0, asked.n_ready - has)
    own_s = (asked.n_prompt - has - moved) * view.prefill_token_s
    rows = max(0, view.n_rows + candidate.n_sent - candidate.n_ended)
    wait_s = view.wait_s.get(asked.lane, 0.0)
    if view.n_before:  # places that became free since, and nobody was sent to
        free = max(0, candidate.n_ended - candidate.n_sent)
        wait_s *= max(0, view.n_before - free) / view.n_before
    move_s = 2 * view.page_s * moved / asked.page_size
    first_s = wait_s + candidate.sent_s + move_s + own_s
    others_s = rows * (own_s + asked.n_out * view.row_s)
    times = candidate.suspicion
    return first_s * times, (first_s + others_s) * times, own_s * times
