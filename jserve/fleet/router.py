"""Keeps what a front knows of its replicas between two choices: views, pages, what was sent and what ended since.

Every policy chooses from the same knowledge, so that they can be compared (``jserve simulate --router``).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jserve.engine.view import PageEvent, View
from jserve.errors import NotReady
from jserve.fleet.pages import PageIndex
from jserve.fleet.roles import prefill_at
from jserve.fleet.route import Asked, Candidate, ReplicaChoice, able_of, choice_of, prices, route


@dataclass(slots=True)
class _Sent:
    """A request that was sent: the how manieth to its replica, and its prefill there."""

    number: int
    seconds: float


@dataclass(slots=True)
class _Replica:
    candidate: Candidate
    n_sent: int = 0
    sent: deque[_Sent] = field(default_factory=deque)
    """Those that its view does not count yet."""

    def settle(self) -> None:
        """Leave out what the view counts."""
        while self.sent and self.sent[0].number < self.candidate.view.n_taken:
            self.sent.popleft()
        self.candidate.n_sent = len(self.sent)
        self.candidate.sent_s = sum([one.seconds for one in self.sent])


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
        self.candidates: list[Candidate] = []
        self._replicas: list[_Replica] = []
        self._vacant: list[int] = []
        """Numbers of replicas that are gone for good."""
        for _ in range(n):
            self.join()
        self._policy, self.by_price = POLICIES[policy], policy == "seconds"
        self._rng, self.n_chosen = random.Random(seed), 0
        self.prefill_s = self.decode_s = 0.0

    def join(self) -> int:
        """The number of a new replica, which takes nothing before its first view."""
        if self._vacant:
            return self._vacant.pop()
        self.candidates.append(Candidate(view=View(ready=False)))
        self._replicas.append(_Replica(self.candidates[-1]))
        return len(self._replicas) - 1

    def leave(self, replica: int) -> None:
        """``replica`` is gone for good; another may get its number once all that it had is ``over``."""
        self.lost(replica)
        self._vacant.insert(0, replica)

    def update(self, replica: int, view: View, events: Iterable[PageEvent] = ()) -> None:
        """``replica`` says how it is, and what happened to its pages since it last did."""
        one = self._replicas[replica]
        one.candidate.view, one.candidate.n_ended = view, 0
        one.settle()
        self.pages.update(replica, events, slides=view.slides)

    def lost(self, replica: int) -> None:
        """The engine of ``replica`` is gone, with its pages; the next one has read nothing."""
        self.candidates[replica] = Candidate(view=View(ready=False))
        self._replicas[replica] = _Replica(self.candidates[replica])
        self.pages.forget(replica)

    def takes(self, asked: Asked) -> bool:
        """Some replica may take ``asked``."""
        return bool(able_of(asked, self.candidates))

    def choose(self, asked: Asked) -> ReplicaChoice:
        """The replica for ``asked``, which is taken to be sent there.

        Raises:
            NotReady: none may take it.
        """
        choice = self._policy(self, asked)
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
        one = self._replicas[choice.replica]
        view, new = one.candidate.view, asked.n_prompt - choice.n_cached
        new_s = new * view.prefill_token_s
        self.prefill_s += new_s
        self.decode_s += n_out * view.token_s
        one.sent.append(_Sent(one.n_sent, new_s))
        one.n_sent += 1
        one.settle()
        self.pages.send(choice.replica, asked.pages)
        self.n_chosen += 1

    def ended(self, replica: int, n: int) -> None:
        """``n`` sequences ended at ``replica``, which its view does not say yet."""
        self._replicas[replica].candidate.n_ended += n

    def over(self, asked: Asked, replica: int) -> None:
        """``asked``, which was sent to ``replica``, has ended."""
        self.pages.over(replica, asked.pages)

    def _seconds(self, asked: Asked) -> ReplicaChoice:
        return route(asked, self.candidates, self.pages)

    def _random(self, asked: Asked) -> ReplicaChoice:
        return self._at(asked, self._rng.choice(self._able(asked)))

    def _round_robin(self, asked: Asked) -> ReplicaChoice:
        able = self._able(asked)
        return self._at(asked, able[self.n_chosen % len(able)])

    def _p2c(self, asked: Asked) -> ReplicaChoice:
        able = self._able(asked)
        two = self._rng.sample(able, min(2, len(able)))
        return self._at(asked, min(two, key=self._rows))

    def _lmetric(self, asked: Asked) -> ReplicaChoice:
        known = self.pages.known(asked.pages, len(self._replicas))
        new = [asked.n_prompt - n * asked.page_size for n in known]
        return self._at(asked, min(self._able(asked), key=lambda i: new[i] * (self._rows(i) + 1)))

    def _rows(self, replica: int) -> int:
        candidate = self._replicas[replica].candidate
        return candidate.view.n_rows + candidate.n_sent

    def _able(self, asked: Asked) -> list[int]:
        """Raises NotReady where there is none."""
        able = able_of(asked, self.candidates)
        if not able:
            raise NotReady("no replica takes this request now", retry_after=5.0)
        return able

    def _at(self, asked: Asked, replica: int) -> ReplicaChoice:
        known = self.pages.known(asked.pages, len(self._replicas))
        found = prices(asked, self.candidates, known, [replica])
        return choice_of(asked, self.candidates, known, found, 0, replica)


POLICIES: dict[str, Callable[[ReplicaRouter, Asked], ReplicaChoice]] = {
    "seconds": ReplicaRouter._seconds,
    "lmetric": ReplicaRouter._lmetric,
    "p2c": ReplicaRouter._p2c,
    "round_robin": ReplicaRouter._round_robin,
    "random": ReplicaRouter._random,
}
"""By seconds (``route``); tokens to compute times rows (LMetric); the emptier of two drawn ones; in turn; any."""
