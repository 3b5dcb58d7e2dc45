"""Keeps what a front knows of its replicas between two choices: views, pages, what was sent and what ended since.

Every policy chooses from the same knowledge, so that they can be compared (``jserve simulate --router``).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from jserve.engine.view import PageEvent, View
from jserve.errors import NotReady
from jserve.fleet.candidates import Candidate, CandidateTable
from jserve.fleet.pages import PageIndex
from jserve.fleet.roles import prefill_at
from jserve.fleet.route import Asked, ReplicaChoice, able_of, choice_of, prices, route

NEW = Candidate(view=View(ready=False))
"""A replica before its first view."""


@dataclass(slots=True)
class _Unread:
    """The requests that a replica's view does not count yet."""

    n_sent: int = 0
    """All that were sent to it so far; the last ones of them are unread."""
    seconds: deque[float] = field(default_factory=deque)
    """Of prefill, of each unread request."""

    def add(self, seconds: float) -> None:
        self.n_sent += 1
        self.seconds.append(seconds)

    def settle(self, n_taken: int) -> None:
        """The first ``n_taken`` are counted."""
        while self.seconds and self.n_sent - len(self.seconds) < n_taken:
            self.seconds.popleft()


class ReplicaRouter:
    """Chooses among ``n`` replicas.

    Args:
        n: replicas at first, numbered from 0.
        policy: one of ``POLICIES``.
        seed: of policies that draw.

    Attributes:
        candidates: the replicas by number.
        by_price: its choices are ``route``'s, so that requests which wait may be moved by the same prices.
        prefill_s, decode_s: device seconds of all prompts and of all answers that were sent so far.
    """

    def __init__(self, n: int = 0, policy: str = "seconds", seed: int = 0) -> None:
        self.pages = PageIndex()
        self.candidates = CandidateTable([NEW] * n)
        self._unread = [_Unread() for _ in range(n)]
        self._vacant: list[int] = []
        """Numbers of replicas that are gone for good."""
        self._policy, self.by_price = POLICIES[policy], policy == "seconds"
        self._rng, self.n_chosen = random.Random(seed), 0
        self.prefill_s = self.decode_s = 0.0

    def join(self) -> int:
        """The number of a new replica, which takes nothing before its first view."""
        if self._vacant:
            return self._vacant.pop()
        self.candidates.append(NEW)
        self._unread.append(_Unread())
        return len(self._unread) - 1

    def leave(self, replica: int) -> None:
        """``replica`` is gone for good; another may get its number once all that it had is ``over``."""
        self.lost(replica)
        self._vacant.insert(0, replica)

    def update(self, replica: int, view: View, events: Iterable[PageEvent] = ()) -> None:
        """``replica`` says how it is, and what happened to its pages since it last did."""
        self.candidates.change(replica, view=view, n_ended=0)
        self._settle(replica)
        self.pages.update(replica, events, slides=view.slides)

    def lost(self, replica: int) -> None:
        """The engine of ``replica`` is gone, with its pages; the next one has read nothing."""
        self.candidates.replace(replica, NEW)
        self._unread[replica] = _Unread()
        self.pages.forget(replica)

    def takes(self, asked: Asked) -> bool:
        """Some replica may take ``asked``."""
        return bool(able_of(asked, self.candidates).any())

    def choose(self, asked: Asked, leave_out: Collection[int] = ()) -> ReplicaChoice:
        """The replica for ``asked``, which is taken to be sent there; none of those numbered ``leave_out``.

        Raises:
            NotReady: none of the others may take it.
        """
        choice = self._policy(self, asked, leave_out)
        self._send(asked, choice, asked.n_out)
        return choice

    def choose_prefill(self, asked: Asked) -> ReplicaChoice | None:
        """The replica that computes the prompt of ``asked`` for another one, which is taken to be sent there; None:
        whoever answers computes it.

        Raises:
            NotReady: none may answer it.
        """
        choice = prefill_at(asked, self.candidates, self.pages)
        if choice is not None:
            self._send(asked, choice, n_out=0)
        return choice

    def assign(self, asked: Asked, replica: int) -> ReplicaChoice:
        """``asked`` goes to ``replica``, whatever that costs."""
        choice = self._at(asked, replica)
        self._send(asked, choice, asked.n_out)
        return choice

    def _send(self, asked: Asked, choice: ReplicaChoice, n_out: int) -> None:
        view, new = self.candidates[choice.replica].view, asked.n_prompt - choice.n_cached
        new_s = new * view.prefill_token_s
        self.prefill_s += new_s
        self.decode_s += n_out * view.token_s
        self._unread[choice.replica].add(new_s)
        self._settle(choice.replica)
        self.pages.send(choice.replica, asked.pages)
        self.n_chosen += 1

    def _settle(self, replica: int) -> None:
        """Leave out what the view counts of what was sent."""
        unread = self._unread[replica]
        unread.settle(self.candidates[replica].view.n_taken)
        seconds = unread.seconds
        self.candidates.change(replica, n_sent=len(seconds), sent_s=sum(seconds))

    def ended(self, replica: int, n: int) -> None:
        """``n`` sequences ended at ``replica``, which its view does not say yet."""
        self.candidates.change(replica, n_ended=self.candidates[replica].n_ended + n)

    def over(self, asked: Asked, replica: int) -> None:
        """``asked``, which was sent to ``replica``, has ended."""
        self.pages.over(replica, asked.pages)

    def _seconds(self, asked: Asked, leave_out: Collection[int]) -> ReplicaChoice:
        return route(asked, self.candidates, self.pages, leave_out)

    def _random(self, asked: Asked, leave_out: Collection[int]) -> ReplicaChoice:
        return self._at(asked, self._rng.choice(self._able(asked, leave_out)))

    def _round_robin(self, asked: Asked, leave_out: Collection[int]) -> ReplicaChoice:
        able = self._able(asked, leave_out)
        return self._at(asked, able[self.n_chosen % len(able)])

    def _p2c(self, asked: Asked, leave_out: Collection[int]) -> ReplicaChoice:
        able, rows = self._able(asked, leave_out), self.candidates.rows
        two = self._rng.sample(able, min(2, len(able)))
        return self._at(asked, min(two, key=lambda number: rows[number]))

    def _lmetric(self, asked: Asked, leave_out: Collection[int]) -> ReplicaChoice:
        able, rows = self._able(asked, leave_out), self.candidates.rows
        new = asked.n_prompt - self._known(asked) * asked.page_size
        costs = new * (rows + 1)
        return self._at(asked, min(able, key=lambda number: costs[number]))

    def _able(self, asked: Asked, leave_out: Collection[int]) -> list[int]:
        """Numbers of those that may take ``asked``. Raises NotReady where there is none."""
        able = np.flatnonzero(able_of(asked, self.candidates, leave_out)).tolist()
        if not able:
            raise NotReady("no replica takes this request now", retry_after=5.0)
        return able

    def _at(self, asked: Asked, replica: int) -> ReplicaChoice:
        known = self._known(asked)
        found = prices(asked, self.candidates, known)
        return choice_of(asked, self.candidates, known, found, replica)

    def _known(self, asked: Asked) -> np.ndarray:
        """float64 [n], pages of ``asked`` that each replica has."""
        return self.pages.known(asked.pages, len(self.candidates))


POLICIES: dict[str, Callable[[ReplicaRouter, Asked, Collection[int]], ReplicaChoice]] = {
    "seconds": ReplicaRouter._seconds,
    "lmetric": ReplicaRouter._lmetric,
    "p2c": ReplicaRouter._p2c,
    "round_robin": ReplicaRouter._round_robin,
    "random": ReplicaRouter._random,
}
"""By seconds (``route``); tokens to compute times rows (LMetric); the emptier of two drawn ones; in turn; any."""
