"""Who drafts, how much, and when that is worth waiting for: the policy of speculation.

Owns the choice of k per row and step, the looks at what drafts brought, and the counters. Must not know pages,
budgets or queues (``sched.decode`` makes rows of what is chosen here). A pure function of plans, results and
the times they carry.

Three kinds of drafts, one row each:

* *forced*: a guide leaves one way; they stand for sure.
* *host*: a proposer looks at the text. It needs the last token, so its sequence is planned when nothing of it is
  in flight. While the step before runs nobody knows what it will find, so waiting is decided by expectation: all
  wait, or nobody (who drafts would get every second step only). What drafts would have brought is seen in every
  text, drafted or not (``policy.acceptance.Shadow``), so not waiting costs no knowledge. Blind proposers
  (synthetic ones) know nothing of the text: they are tried now and then (``policy.width.ProbeBudget``).
* *device*: a drafter leaves ``StepPlan.n_draft`` drafts in the slots. Nothing waits; whether it runs at all is
  decided by ``policy.device_drafts``, and ``policy.draft_kv_backfill`` makes up for what it misses. Where it
  copies from the text (n-grams), a proposer of the host is its *shadow*: it finds the same a step later, which tells
  what drafts are worth without trying any, and it drafts for rows under a guide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq

import numpy as np

from jserve.config import SpeculativeOptions
from jserve.ports import Proposer, RunnerLimits
from jserve.speculation.policy.counters import SpeculationCounters
from jserve.speculation.policy.device_drafts import PROBE_SHARE, DeviceDraftPolicy, Expects
from jserve.speculation.policy.draft_kv_backfill import DraftKVBackfill
from jserve.speculation.policy.row_drafts import (
    DEVICE,
    GRAMMAR,
    NOTHING,
    AcceptanceStats,
    Gains,
    RowDrafts,
    StepLoad,
    may_hold,
    room,
)
from jserve.speculation.policy.width import ProbeBudget, best_width, widths
from jserve.timing.host_gaps import HostGaps
from jserve.timing.step_costs import MeasuredCosts
from jserve.types import PageFetch, RowPlan, Sequence, StepPlan

READ_PER_STEP = 256
"""Tokens that proposers take in per commit; a long prompt is read while it is prefilled."""


def to_the_end(seq: Sequence, more: float = 0.0) -> float:
    """Tokens that ``seq`` may still draw once it has drawn ``more``."""
    return seq.max_len - len(seq.tokens) - more


class SpeculationController:
    """The policy.

    Args:
        proposer: drafts on the host, or is the shadow of a device that copies; None: only the device
            (where it can) and guides do.
        expects: tokens that a sequence will still draw, once it has drawn some more.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        costs: MeasuredCosts,
        options: SpeculativeOptions,
        proposer: Proposer | None = None,
        expects: Expects = to_the_end,
    ) -> None:
        self.limits, self.costs, self.proposer = limits, costs, proposer
        self.most = limits.max_drafts
        self.on = self.most > 0
        """False when no row will ever have drafts."""
        self.min_speed = options.min_speed
        self.widths = widths(self.most)
        self.n_draft = 0
        """Drafts that the device shall leave at the end of the step being planned."""
        self.tally = SpeculationCounters()
        self.acceptance = AcceptanceStats(self.most, limits.draft_depths)
        self.gaps = HostGaps()
        self.backfill = DraftKVBackfill(limits, costs)
        self.device_policy = DeviceDraftPolicy(
            limits,
            costs,
            options,
            self.acceptance,
            self.gaps,
            self.backfill,
            expects,
            shadowed=proposer is not None,
        )
        self._sources: dict[int, dict[int, str]] = {}
        """Plan id -> row -> who made its drafts."""
        self._landed: dict[int, str] = {}
        """That of the plan being committed."""
        self._probe_budget = ProbeBudget(PROBE_SHARE)
        self._read_left = 0
        self._fixed: int | None = None

    @property
    def device(self) -> bool:
        """True when it is the device that drafts."""
        return self.limits.device_drafts > 0

    @property
    def _name(self) -> str:
        return DEVICE if self.proposer is None else self.proposer.name

    def fix(self, k: int | None) -> None:
        """From now on up to ``k`` drafts in every step, for benchmarks; None: as many as pay."""
        self._fixed = self.device_policy.fixed = k

    def waits(self, ready: Seq[Sequence], n_flights: int, load: StepLoad) -> bool:
        """True when no step should be planned before those in flight are back, because drafts of
        the host are worth more than the overlap."""
        if not self.on or self.proposer is None or self.proposer.blind or not n_flights:
            return False
        if self.device:
            return False
        if not any(self._is_read(seq) and seq.in_flight for seq in ready):
            return False
        if self._fixed is not None:
            return self._fixed > 0
        prospects = [self._prospect(seq) for seq in ready]
        without = self._seconds(ready, load, 1, behind=False)
        width = best_width(
            prospects,
            self.widths,
            lambda w: self._seconds(ready, load, w, behind=True),
            without,
            self.min_speed,
        )
        return width > 1

    def choose(self, ready: Seq[Sequence], load: StepLoad) -> list[RowDrafts]:
        """What each row tries, before length and pages cut it; sets ``n_draft``."""
        self.n_draft = 0
        if not self.on:
            return [RowDrafts()] * len(ready)
        if self.device:
            self.n_draft = self.device_policy.choose(ready, load)
            return [self._held(seq).cut(self.n_draft) for seq in ready]
        found = [self._drafts(seq) for seq in ready]
        width = self._width(ready, found, load) if ready else 1
        return [d.cut(width - 1) for d in found]

    def mask(self, seq: Sequence, drafts: RowDrafts) -> np.ndarray | None:
        """Bits that the row's drafts need beyond those of a guide."""
        if self.proposer is None or drafts.source != self.proposer.name:
            return None
        return self.proposer.mask(seq, drafts.ids)

    def planned(
        self, plan: StepPlan, seqs: Seq[Sequence], sources: dict[int, str], *, behind: bool
    ) -> None:
        """``plan`` will run. ``seqs``: the sequence of each row. ``sources``: row -> who made its
        drafts. ``behind``: no step is in flight before it."""
        if not self.on:
            return
        self.gaps.planned(plan.id, behind)
        self._sources[plan.id] = sources
        if self.device:
            self.backfill.planned(plan, seqs)
            for row, seq in zip(plan.rows, seqs, strict=True):
                if not row.backfill and seq.request.speculative:
                    # After a chunk that emits nothing this is wrong, but none of these is read then.
                    self.acceptance.of(seq).left = plan.n_draft

    def observe(self, plan: StepPlan, now: float, device_s: float, plain_s: float) -> None:
        """``plan`` took ``device_s``; ``plain_s`` is predicted of one of as many tokens that drafts
        nothing."""
        gap_s = self.gaps.landed(plan.id, now, device_s)
        self.tally.step(device_s, gap_s, prefills=not plan.rows[-1].from_slot)
        if plan.n_draft:
            self.tally.drafted(max(0.0, device_s - plain_s))
        else:
            self.device_policy.probe_budget.earn(device_s)
        self._probe_budget.earn(device_s)

    def drawn(self, row: RowPlan, r: int, seq: Sequence, n_ok: int) -> None:
        """``row``, number ``r`` of the plan being committed and of ``seq``, drew ``n_ok`` tokens."""
        if not row.from_slot:
            return
        source = self._landed.get(r, "")
        n, stood = self.acceptance.deep(len(row.drafts)), max(0, n_ok - 1)
        self.tally.row(source, seq.request.lane, len(row.drafts), n, stood, n_ok)
        blind = self.proposer is None or self.proposer.blind
        if n and blind and source == self._name and seq.finish is None:
            self.acceptance.add(seq, n, stood)

    def took(self, seq: Sequence, tokens: Seq[int]) -> None:
        """``seq`` got ``tokens`` (none after a chunk of its prompt): look what drafts they prove."""
        if not self._is_read(seq):
            return
        assert self.proposer is not None
        shadow = self.acceptance.of(seq).shadow
        for token in tokens:
            ended = shadow.see(token)
            if ended is not None:
                self.acceptance.add(seq, *ended)
        self._read_left -= self.proposer.read(seq, max(0, self._read_left))
        if shadow.expected is None and tokens and seq.finish is None:
            ids = self.proposer.propose(seq, self.most)
            shadow.open(tuple(ids if seq.guide is None or not ids else seq.guide.trim(ids)))

    def begin_commit(self, plan: StepPlan) -> None:
        """The results of ``plan`` follow."""
        self._read_left = READ_PER_STEP
        self._landed = self._sources.pop(plan.id, {})

    def reads_started(self, fetches: Iterable[PageFetch]) -> None:
        """These pages will be read from disk into host memory."""
        self.backfill.read(fetches)

    def idle(self) -> None:
        """Nobody runs any more: time that passes now says nothing of steps."""
        self.gaps.idle()

    def lost(self) -> None:
        """The steps in flight will not land."""
        self.gaps.idle()
        self._sources.clear()

    def counters(self) -> dict[str, float]:
        """For /metrics."""
        host_s = 0.0 if self.proposer is None else self.proposer.seconds
        return self.tally.counters() | {"spec_decode_host_seconds_total": host_s}

    def forget(self, seq: Sequence) -> None:
        """``seq`` is over."""
        self.acceptance.forget(seq)
        self.backfill.forget(seq)
        if self.proposer is not None:
            self.proposer.forget(seq)

    def __len__(self) -> int:
        """Sequences of which anything is kept."""
        return len(self.acceptance)

    def _is_read(self, seq: Sequence) -> bool:
        """True for a sequence whose text a proposer of the host reads."""
        return self.proposer is not None and not self.proposer.blind and seq.request.speculative

    def _held(self, seq: Sequence) -> RowDrafts:
        """Drafts of ``seq`` where the device drafts: what it left, unless it drafted half blind."""
        if not may_hold(seq):
            return self._drafts(seq)
        if self.backfill.missing(seq):
            return RowDrafts()
        return RowDrafts((-1,) * room(seq, self.acceptance.of(seq).left), self._name)

    def _forced(self, seq: Sequence) -> RowDrafts:
        """Tokens that a guide leaves no choice about."""
        trees = self.limits.draft_depths  # then there are no programs for other drafts
        if seq.guide is None or trees or not seq.request.speculative:
            return RowDrafts()
        forced = seq.guide.forced[: room(seq, self.most)]
        return RowDrafts(forced, GRAMMAR, range(len(forced) + 1)) if forced else RowDrafts()

    def _drafts(self, seq: Sequence) -> RowDrafts:
        """All that ``seq`` could try now."""
        forced = self._forced(seq)
        if forced.ids or self.proposer is None or not seq.request.speculative:
            return forced
        most = room(seq, self.most)
        if not most or (seq.in_flight and not self.proposer.blind):
            return RowDrafts()
        ids = self.proposer.propose(seq, most)
        if seq.guide is not None and ids:
            ids = seq.guide.trim(ids)
        return (
            RowDrafts(ids, self._name, self.acceptance.gains(seq, len(ids))) if ids else RowDrafts()
        )

    def _prospect(self, seq: Sequence) -> Gains:
        """Gains of the next row of ``seq`` if it waits, before there is a proposal."""
        if not self._is_read(seq) or seq.guide is not None:  # a guided one waits anyway
            return NOTHING
        share = self.acceptance.of(seq).rates.offer(self.acceptance.rates)
        return [share * g for g in self.acceptance.gains(seq, room(seq, self.most))]

    def _width(self, ready: Seq[Sequence], found: Seq[RowDrafts], load: StepLoad) -> int:
        if self._fixed is not None:
            return 1 + self._fixed

        def seconds(width: int) -> float:
            return self._seconds(ready, load, width, behind=load.behind)

        gains = [d.gains for d in found]
        width = best_width(gains, self.widths, seconds, seconds(1), self.min_speed)
        blind = self.proposer is not None and self.proposer.blind
        if width > 1 or not blind or not any([d.ids for d in found]):
            return width
        least = self.widths[1]  # a look, now and then, whether drafts have become worth it
        return least if self._probe_budget.spend(max(0.0, seconds(least) - seconds(1))) else 1

    def _seconds(self, ready: Seq[Sequence], load: StepLoad, width: int, *, behind: bool) -> float:
        took = self.costs.seconds(len(ready), load.n_prefill, load.n_context, width)
        return took + self.gaps.seconds(behind)
