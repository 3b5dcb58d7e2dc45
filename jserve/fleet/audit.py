"""Has a share of answers computed once more, on another replica, and compares their tokens.

Draws are functions of seed and position, so a replica that says something else has bad memory or bad weights, or, with
weights of 16 bits, met two tokens that nearly tie. Where two differ a third one says who is odd. An audit begins when
the answer is over, in lane bulk, and is given up for anything that is in its way.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from jserve.engine.replica import Replica
from jserve.engine.streams import Stream
from jserve.errors import JserveError
from jserve.fleet.sent import Sent, SentRequests
from jserve.ports import Clock
from jserve.types import Lane, Output, Request

log = logging.getLogger(__name__)

VOTES = 3

Said = tuple[tuple[int, ...], ...]
"""The ids of each choice."""


@dataclass(slots=True, eq=False)
class _Audit:
    """An answer that is computed once more."""

    request: Request
    said: dict[str, Said]
    """The answers so far, by replica."""
    stream: Stream
    sent: Sent


@dataclass(slots=True)
class AuditCounts:
    """Answers that were compared, and of each replica those that were not what the others said."""

    compared: int = 0
    odd: Counter[str] = field(default_factory=Counter)


class Audits:
    """The audits under way, by id of their request.

    Args:
        sent: where requests are.
        choose_other: the cheapest replica for a stream's request but those of these names, which it is then taken to be
            sent to.
        updating: weights are being replaced: answers may come from two.
        share: of requests, those that are audited; 0: none.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sent: SentRequests,
        choose_other: Callable[[Stream, Collection[str]], Sent | None],
        updating: Callable[[], bool],
        *,
        share: float,
        clock: Clock,
    ) -> None:
        self._sent, self._choose_other, self._updating = sent, choose_other, updating
        self._share, self._clock = share, clock
        self._audits: dict[str, _Audit] = {}
        self.counts = AuditCounts()

    def __len__(self) -> int:
        return len(self._audits)

    def over(self, stream: Stream, sent: Sent) -> None:
        """``stream``, which the replica of ``sent`` alone answered, is over."""
        request, member = stream.request, sent.member
        plain = stream.attempt == 0 and request.cache is None and any(stream.said)
        same = sent.weights == member.weights and not self._updating()
        if not plain or not same or _drawn(request.id) >= self._share:
            return
        quiet = replace(
            request,
            attempt=1,  # a later request may have its id
            lane=Lane.BULK,
            ttft_deadline_ms=None,
            tpot_deadline_ms=None,
            deadline_ms=None,
        )
        self._begin(quiet, sent.weights, {member.name: tuple(tuple(ids) for ids in stream.said)})

    def _begin(self, request: Request, weights: Any, said: dict[str, Said]) -> None:
        """Have one more replica answer ``request``, if there is one with these weights."""
        stream = Stream(request, clock=self._clock)
        stream.attempt, stream.weights = request.attempt, weights
        target = self._choose_other(stream, said)
        if target is None:
            return
        try:
            target.member.work_on(stream, request)
        except JserveError:
            self._sent.settle_copy(target)
            return
        self._audits[request.id] = _Audit(request, said, stream, target)

    def took(self, replica: Replica, output: Output) -> bool:
        """True: ``output`` is of an audit."""
        audit = self._audits.get(output.request_id)
        if audit is None or audit.sent.member is not replica:
            return False
        stream = audit.stream
        stream.put(output)
        first = next(iter(audit.said.values()))
        if output.error is not None or self._updating():
            self.drop(output.request_id)
        elif all(_told(stream, i, len(ids)) for i, ids in enumerate(first)):
            self.drop(output.request_id)
            said = [tuple(ids[: len(first[i])]) for i, ids in enumerate(stream.said)]
            self._compare(audit, audit.said | {audit.sent.member.name: tuple(said)})
        return True

    def _compare(self, audit: _Audit, said: dict[str, Said]) -> None:
        request, votes = audit.request, Counter(said.values())
        if len(said) < VOTES and len(votes) > 1:
            self._begin(request, audit.stream.weights, said)
            if request.id in self._audits:
                return
        self.counts.compared += 1
        usual, n = votes.most_common(1)[0]
        odd = (
            [name for name, ids in said.items() if n == 1 or ids != usual] if len(votes) > 1 else []
        )
        self.counts.odd.update(odd)
        if odd:
            log.error(
                "audit of request %s: replicas differ (%s), odd: %s",
                request.id,
                ", ".join(said),
                ", ".join(odd),
            )

    def lost(self, stream: Stream) -> bool:
        """The replica of ``stream`` works on it no more; True: it is an audit, and given up."""
        audit = self._audits.get(stream.request.id)
        if audit is None or audit.stream is not stream:
            return False
        del self._audits[stream.request.id]
        self._sent.settle_copy(audit.sent)
        return True

    def drop(self, request_id: str) -> None:
        """Give up the audit of this request, if there is one."""
        audit = self._audits.get(request_id)
        if audit is not None:
            self.lost(audit.stream)
            del audit.sent.member.streams[request_id]
            audit.sent.member.cancel(request_id)


def _told(stream: Stream, index: int, n: int) -> bool:
    """Choice ``index`` of ``stream`` has as many tokens as are compared, or all that it will have."""
    return len(stream.said[index]) >= n or index not in stream.open


def _drawn(request_id: str) -> float:
    """In [0, 1), the same for one id at all times."""
    drawn = hashlib.blake2b(request_id.encode(), digest_size=8, person=b"audit").digest()
    return int.from_bytes(drawn) / 2**64
