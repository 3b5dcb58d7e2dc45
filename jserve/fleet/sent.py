"""Keeps the requests that were sent to replicas, and describes requests to the router."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from msgspec.structs import replace

from jserve.engine.streams import Stream
from jserve.fleet.asking import Asking
from jserve.fleet.member import Member
from jserve.fleet.rollout import Rollout
from jserve.fleet.route import Asked, ReplicaChoice
from jserve.fleet.router import ReplicaRouter
from jserve.types import Request

NEAR_S = 0.2
"""Added to both sides where a first token is compared to its price: below it a price is no promise."""


@dataclass(slots=True)
class Sent:
    """A request that was sent to a replica, and what it was chosen by."""

    asked: Asked
    member: Member
    choice: ReplicaChoice
    at: float
    first: bool = True
    """Nothing of it came yet."""
    weights: str | None = field(init=False)
    """Those that the replica had then."""

    def __post_init__(self) -> None:
        self.weights = self.member.weights

    def ratio(self, now: float) -> float:
        """Its first token's time, which is now, over the promised one."""
        return (now - self.at + NEAR_S) / (self.choice.first_s + NEAR_S)


class SentRequests:
    """Requests at replicas, by id. ``router`` hears of their ends."""

    def __init__(self, router: ReplicaRouter, rollout: Rollout) -> None:
        self._router, self._rollout, self._asking = router, rollout, Asking()
        self._sent: dict[str, Sent] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def get(self, request_id: str) -> Sent | None:
        return self._sent.get(request_id)

    def add(self, request_id: str, sent: Sent) -> None:
        self._sent[request_id] = sent

    def waiting(self) -> list[tuple[str, Asked, int]]:
        """(id, request, replica) of those that have told nothing, in the order in which they were sent."""
        every = self._sent.items()
        return [(id, one.asked, one.member.number) for id, one in every if one.first]

    def settle(self, request_id: str) -> Sent | None:
        """The replica of ``request_id`` has no more to do with it."""
        sent = self._sent.pop(request_id, None)
        if sent is not None:
            self._router.over(sent.asked, sent.member.number)
        return sent

    def settle_copy(self, sent: Sent) -> None:
        """The replica of ``sent``, a request's second copy, has no more to do with it."""
        self._router.over(sent.asked, sent.member.number)

    def learn(self, stream: Stream) -> None:
        """``stream``, which was sent, is over."""
        self._asking.learn(sum(map(len, stream.said)))

    def asked(
        self,
        request: Request,
        members: Seq[Member],
        page_size: int,
        resumed: Stream | None = None,
    ) -> Asked:
        """``request`` as a choice between ``members`` reads it, of given weights where it needs them: those that
        drew the tokens of ``resumed``, else those of its side of a canary, if a replica there takes it."""
        if resumed is not None and any(resumed.said):
            like = next((one for one in members if one.weights == resumed.weights), None)
            asked = self._asked(request, page_size, like, resumed.said)
            return replace(asked, weights=resumed.weights)
        like = self._rollout.member_for(request.id, members)
        asked = self._asked(request, page_size, like)
        if like is None or not self._rollout.has_canary:
            return asked
        split = replace(asked, weights=like.weights)
        return split if self._router.takes(split) else asked

    def _asked(
        self, request: Request, page_size: int, like: Member | None, said: Seq[Seq[int]] = ()
    ) -> Asked:
        """``request`` behind what it ``said``, its pages named as those of ``like``."""
        return self._asking.of(request, page_size, said, "" if like is None else like.page_weights)
