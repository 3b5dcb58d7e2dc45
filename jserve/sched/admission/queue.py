"""The wait queue: orders waiting sequences by lane, tenant share, priority and deadline.

It offers candidates; the scheduler admits them or not::

    lanes         interactive (weight 16)   standard (4)   bulk (1)     by tokens served / weight
      came back     [ s3 ]                    [ ]            [ s1 s9 ]    preempted ones, first in their lane
      tenants       A: [ s7 s8 ]  B: [ s12 ]  ...                         by tokens served
                       '-- priority, then the earlier deadline, then first come

No sequence starves. Every ``AGED_EVERY``-th admission is offered first to the oldest arrival of all lanes,
once that has waited ``ageing_s``. A request that does not fit blocks its own and lower lanes for this step
(head-of-line reservation), and all lanes after ``PASSES`` more admissions. So once a sequence with k earlier
ones waiting has aged, at most ``(AGED_EVERY + PASSES) * (k + 1)`` others are admitted before it, whatever
lanes, weights, tenants, priorities and deadlines are.

A sequence that lacks what others do not need (a vocab row) blocks no lane: it is skipped, ``MOST_SKIPPED`` of a
lane in one step. Admissions are counted for the oldest that was skipped, and after ``PASSES`` of them it is
offered first, so the next vocab row that comes free is its.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

from jserve.config import SchedulerOptions
from jserve.sched import policy
from jserve.sched.admission.fair import Shares
from jserve.types import Lane, SeqState, Sequence

AGED_EVERY = 8
PASSES = 16
MOST_SKIPPED = 64
"""So a step never looks through thousands; behind so many, a lane waits."""
LANES = tuple(Lane)


class OrderedSeqs:
    """Sequences sorted by a key that no member changes; adding and removing keep the order."""

    def __init__(self, key: Callable[[Sequence], Any] = policy.order) -> None:
        self._seqs: list[Sequence] = []
        self._key = key

    def add(self, seq: Sequence) -> None:
        bisect.insort(self._seqs, seq, key=self._key)

    def remove(self, seq: Sequence) -> None:
        at = bisect.bisect_left(self._seqs, self._key(seq), key=self._key)
        assert self._seqs[at] is seq, f"{seq.request.id}/{seq.index} is not where its order says"
        del self._seqs[at]

    def after(self, seq: Sequence) -> list[Sequence]:
        """Those that come after ``seq``."""
        return self.beyond(self._key(seq))

    def below(self, key: Any) -> list[Sequence]:
        """Those whose key is below ``key``."""
        return self._seqs[: bisect.bisect_left(self._seqs, key, key=self._key)]

    def beyond(self, key: Any) -> list[Sequence]:
        """Those whose key is above ``key``."""
        return self._seqs[bisect.bisect_right(self._seqs, key, key=self._key) :]

    def first(self, beyond: Any = None) -> Sequence | None:
        """The first one, or the first whose key is above ``beyond``."""
        if beyond is None:
            return self._seqs[0] if self._seqs else None
        at = bisect.bisect_right(self._seqs, beyond, key=self._key)
        return self._seqs[at] if at < len(self._seqs) else None

    def snapshot(self) -> list[Sequence]:
        """A copy to walk over while members come and go."""
        return self._seqs[:]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    def __len__(self) -> int:
        return len(self._seqs)


class LaneQueue:
    """One lane's queue: preempted sequences first, then new ones by tenant."""

    def __init__(self) -> None:
        self.back = OrderedSeqs()
        self.tenants: dict[str, OrderedSeqs] = {}
        self.tokens: dict[str, int] = {}
        """Tokens to compute of the fresh ones by tenant."""
        self.shares = Shares()
        self.n = self.n_tokens = 0
        """All who wait; tokens to compute of the fresh ones: their prompts, and what earlier attempts told."""

    def add(self, seq: Sequence) -> None:
        self.n += 1
        if seq.state is SeqState.PREEMPTED:
            self.back.add(seq)
            return
        self.n_tokens += len(seq.tokens)
        tenant = seq.request.tenant
        if tenant not in self.tenants:
            self.tenants[tenant] = OrderedSeqs(policy.turn)
            self.tokens[tenant] = 0
            self.shares.join(tenant)
        self.tenants[tenant].add(seq)
        self.tokens[tenant] += len(seq.tokens)

    def remove(self, seq: Sequence) -> None:
        self.n -= 1
        if seq.state is SeqState.PREEMPTED:
            self.back.remove(seq)
            return
        self.n_tokens -= len(seq.tokens)
        tenant = seq.request.tenant
        self.tenants[tenant].remove(seq)
        self.tokens[tenant] -= len(seq.tokens)
        if not len(self.tenants[tenant]):
            del self.tenants[tenant], self.tokens[tenant]

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.back
        for seqs in self.tenants.values():
            yield from seqs


class WaitQueue:
    """All that wait. ``candidates`` offers candidates; ``entered`` and ``settle`` keep the accounts."""

    def __init__(self, weights: dict[Lane, int], ageing_s: float) -> None:
        self.lanes = {lane: LaneQueue() for lane in LANES}
        self.shares = Shares({lane: float(n) for lane, n in weights.items()})
        self.weights = weights
        self.held_by: dict[str, int] = {}
        """Sequences waiting per tenant."""
        self._ageing_s = ageing_s
        self._n = self._n_entered = 0
        self._arrivals: deque[Sequence] = deque()
        """Fresh ones by arrival; those that are no longer waiting are dropped lazily."""
        self._passed: dict[Sequence, int] = {}
        """Blocked sequences in the order they did not fit, and admissions since."""
        self._oldest_skipped: Sequence | None = None

    def add(self, seq: Sequence) -> None:
        lane = self.lanes[seq.request.lane]
        if not lane.n:
            self.shares.join(seq.request.lane)
        lane.add(seq)
        self._n += 1
        tenant = seq.request.tenant
        self.held_by[tenant] = self.held_by.get(tenant, 0) + 1
        if seq.state is SeqState.WAITING:
            self._arrivals.append(seq)

    def remove(self, seq: Sequence) -> None:
        """``seq`` waits no more; its state is still that of its waiting."""
        self.lanes[seq.request.lane].remove(seq)
        self._passed.pop(seq, None)
        if self._oldest_skipped is seq:
            self._oldest_skipped = None
        self._n -= 1
        tenant = seq.request.tenant
        self.held_by[tenant] -= 1
        if not self.held_by[tenant]:
            del self.held_by[tenant]

    def entered(self, seq: Sequence, n_new: int, n_out: int) -> None:
        """``seq`` is admitted, with ``n_new`` tokens to compute and an answer of ``n_out`` expected."""
        self._n_entered += 1
        for holder in self._passed:
            self._passed[holder] += 1
        lane = seq.request.lane
        if seq.charged is None:
            seq.charged = max(n_out, seq.n_output)
            tokens = policy.charge(n_new, seq.charged - seq.n_output)  # what was said, drew another
            self.shares.serve(lane, tokens)
            self.lanes[lane].shares.serve(seq.request.tenant, tokens)

    def settle(self, seq: Sequence) -> None:
        """``seq`` is over: charge what it drew beyond what was expected, or give back."""
        self._drop_stale()
        if seq.charged is not None:
            tokens, lane = policy.charge(0, seq.n_output - seq.charged), seq.request.lane
            self.shares.charge(lane, tokens)
            self.lanes[lane].shares.charge(seq.request.tenant, tokens)

    def candidates(self, now: float) -> Candidates:
        """The candidates of one step, best first."""
        return Candidates(self, now)

    def foremost(self, now: float, offered: Collection[int] = ()) -> Sequence | None:
        """The sequence that precedes all order: one passed ``PASSES`` times, or an aged arrival. Those passed
        whose ids are in ``offered`` had their turn in this step."""
        for holder, n in self._passed.items():
            if n >= PASSES and id(holder) not in offered:
                return holder
        if self._n_entered % AGED_EVERY != AGED_EVERY - 1:
            return None
        self._drop_stale()
        seq = self._arrivals[0] if self._arrivals else None
        return seq if seq is not None and now - seq.arrived >= self._ageing_s else None

    def may_pass(self, holder: Sequence) -> bool:
        """True while higher lanes may still be admitted before ``holder``, which does not fit now."""
        return self._passed.setdefault(holder, 0) < PASSES

    def skipped(self, seq: Sequence) -> None:
        """``seq`` was offered and lacks what others do not need."""
        oldest = self._oldest_skipped
        if oldest is None or policy.order(seq)[2] < policy.order(oldest)[2]:
            self._oldest_skipped = seq
            self._passed.setdefault(seq, 0)

    @property
    def n_tokens(self) -> int:
        """Tokens to compute of all that wait for the first time."""
        return sum(lane.n_tokens for lane in self.lanes.values())

    def _drop_stale(self) -> None:
        """Forget who does not wait any more: at the head always, elsewhere when they pile up."""
        arrivals = self._arrivals
        while arrivals and arrivals[0].state is not SeqState.WAITING:
            arrivals.popleft()
        if len(arrivals) > 2 * len(self) + 64:
            self._arrivals = deque(seq for seq in arrivals if seq.state is SeqState.WAITING)

    def __iter__(self) -> Iterator[Sequence]:
        for lane in self.lanes.values():
            yield from lane

    def __len__(self) -> int:
        return self._n


def weights_of(options: SchedulerOptions) -> dict[Lane, int]:
    """Each lane's share of the tokens while all of them wait."""
    return {
        Lane.INTERACTIVE: options.weight_interactive,
        Lane.STANDARD: options.weight_standard,
        Lane.BULK: options.weight_bulk,
    }


class Candidates:
    """One pass over the candidates: each is offered once, and admitted or not."""

    def __init__(self, queue: WaitQueue, now: float) -> None:
        self._queue = queue
        self._lanes = [*LANES]
        self._seen: dict[int, Any] = {}
        """id of a list -> key of the last of it that was offered and not admitted."""
        self._foremost: set[int] = set()
        self._last: Sequence | None = None
        self._skipped = False
        """The last one was foremost and lacks what others do not need."""
        self._n_skipped = dict.fromkeys(LANES, 0)
        self._now = now

    def next(self) -> Sequence | None:
        """The best candidate not offered before; None at the end."""
        last = self._last
        # The start, an entry, or a foremost one that lacks what others need not: whose turn is it?
        if last is None or last.lease is not None or self._skipped:
            self._skipped = False
            seq = self._queue.foremost(self._now, self._foremost)
            if seq is not None and id(seq) not in self._foremost:
                self._foremost.add(id(seq))
                self._last = seq
                return seq
        self._last = self._fair()
        return self._last

    def skip_blocked(self, holder: Sequence) -> bool:
        """``holder`` does not fit: continue with higher lanes only; False if none may."""
        self._lanes = [lane for lane in self._lanes if LANES.index(lane) < policy.rank(holder)]
        return bool(self._lanes) and self._queue.may_pass(holder)

    def skip(self, seq: Sequence) -> None:
        """``seq`` lacks what others do not need: go on without it."""
        lane = seq.request.lane
        self._queue.skipped(seq)
        self._skipped = id(seq) in self._foremost
        self._n_skipped[lane] += 1
        if self._n_skipped[lane] == MOST_SKIPPED and lane in self._lanes:
            self._lanes.remove(lane)

    def _fair(self) -> Sequence | None:
        queue = self._queue
        lanes = [lane for lane in self._lanes if queue.lanes[lane].n]
        while lanes:
            lane = Lane(queue.shares.least(lanes))
            seq = self._of_lane(queue.lanes[lane])
            if seq is not None:
                return seq
            lanes.remove(lane)
        return None

    def _of_lane(self, lane: LaneQueue) -> Sequence | None:
        seq = self._of_list(lane.back, policy.order)
        tenants = list(lane.tenants)
        while seq is None and tenants:
            tenant = lane.shares.least(tenants)
            seq = self._of_list(lane.tenants[tenant], policy.turn)
            tenants.remove(tenant)
        return seq

    def _of_list(self, seqs: OrderedSeqs, key: Callable[[Sequence], Any]) -> Sequence | None:
        """The next of a list; what is offered counts as seen, which only matters if it stays."""
        seq = seqs.first(self._seen.get(id(seqs)))
        if seq is not None:
            self._seen[id(seqs)] = key(seq)
        return seq
