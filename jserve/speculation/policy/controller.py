"""Decides which rows draft and how many tokens.

It chooses k for each step, learns from results and counts. It is a pure function of plans, results and the times
they carry; ``sched.decode`` makes rows of what is chosen here.

Three kinds of drafts, one row each:

* *forced*: a guide leaves one way; they are accepted for sure.
* *host*: a proposer looks at the text. It needs the last token, so its sequence is planned when nothing of it is
  in flight; all rows wait for that, or none does. What drafts would have brought is seen in every text, drafted
  or not (``policy.acceptance.Shadow``). Blind proposers (synthetic ones) know nothing of the text.
* *device*: a drafter leaves ``StepPlan.n_draft`` drafts in the slots. Where it copies from the text (n-grams), a
  proposer of the host is its *shadow*: it finds the same a step later, so acceptance is known without drafts, and
  it drafts for rows under a guide.

How many drafts a step makes, and whether rows wait for the host, says the k table (``policy.ktable``) for the
acceptance that the rows' own rounds and their lanes' show. Above ``max_rows`` rows the device makes none. Where
acceptance is not seen without drafts, probes try some now and then. What a drafter with KV of its own did not see
meanwhile is backfilled (``policy.draft_kv_backfill``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from jserve.config import SpeculativeOptions
from jserve.ports import Proposer, RunnerLimits
from jserve.speculation.policy.acceptance import FADE_REQUEST, NEVER, SURE, LaneAcceptance, Odds
from jserve.speculation.policy.counters import SpeculationCounters
from jserve.speculation.policy.draft_kv_backfill import DraftKVBackfill
from jserve.speculation.policy.ktable import Hysteresis, KTable, widths
from jserve.speculation.policy.row_drafts import (
    DEVICE,
    GRAMMAR,
    RowDrafts,
    SequenceAcceptance,
    StepLoad,
    may_hold,
    room,
)
from jserve.timing.host_gaps import HostGaps
from jserve.timing.prefill_cap import PrefillCap
from jserve.timing.step_costs import MeasuredCosts
from jserve.types import PageFetch, RowPlan, Sequence, StepPlan

if TYPE_CHECKING:
    from jserve.sched.plan_builder import PlanBuilder

READ_PER_STEP = 256
"""Tokens that proposers take in per commit; a long prompt is read while it is prefilled."""
PER_TOKEN = 8
"""Tokens of backfill that one token still to come pays for."""
_KEEP = 0.95
"""Of a decayed mean, per step or answer."""


class SpeculationController:
    """The policy.

    Args:
        proposer: drafts on the host, or is the shadow of a device that copies; None: only the device
            (where it can) and guides do.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        costs: MeasuredCosts,
        options: SpeculativeOptions,
        proposer: Proposer | None = None,
    ) -> None:
        self.limits, self.costs, self.proposer = limits, costs, proposer
        self.most = limits.max_drafts
        if limits.device_drafts:
            self.most = min(self.most, limits.device_drafts)
        self.on = self.most > 0
        """False when no row will ever have drafts."""
        self.n_draft = 0
        """Drafts that the device shall leave at the end of the step being planned."""
        self.tally, self.gaps, self.backfill = (
            SpeculationCounters(),
            HostGaps(),
            DraftKVBackfill(limits),
        )
        self.acceptance = LaneAcceptance()
        self._watches: dict[Sequence, SequenceAcceptance] = {}
        # Of a tree all is verified or nothing.
        ks = (0, self.most) if limits.draft_depths else [w - 1 for w in widths(self.most)]
        self.table = KTable(ks, self._deep, self._seconds, options.min_speed)
        self.hysteresis = Hysteresis(ks[1] if self.on and self._blind else 0)
        self._length, self._n_context = 64.0, 0
        """Mean tokens of an answer; the longest context of the step being planned."""
        self._prefill = (0.0, 0.0)
        """Decayed: the share of steps that carry prompts, and the prompt tokens of a step."""
        self._sources: dict[int, dict[int, str]] = {}
        """Plan id -> row -> who made its drafts."""
        self._landed: dict[int, str] = {}
        """That of the plan being committed."""
        self._read_left = 0
        self._fixed: int | None = None

    @property
    def device(self) -> bool:
        """True when it is the device that drafts."""
        return self.limits.device_drafts > 0

    @property
    def _blind(self) -> bool:
        """True where only verified drafts show what is accepted."""
        return self.proposer is None or self.proposer.blind

    @property
    def _name(self) -> str:
        return DEVICE if self.proposer is None else self.proposer.name

    def fix(self, k: int | None) -> None:
        """From now on up to ``k`` drafts in every step, for benchmarks; None: as many as pay."""
        self._fixed = k

    def waits(self, ready: Seq[Sequence], n_flights: int, load: StepLoad) -> bool:
        """True when no step should be planned before those in flight are back, because drafts of
        the host are worth more than the overlap."""
        if not self.on or self.device or self._blind or not n_flights:
            return False
        if not any(self._is_read(seq) and seq.in_flight for seq in ready):
            return False
        if self._fixed is not None:
            return self._fixed > 0
        self._n_context = load.n_context
        return self._k([self._odds(seq) for seq in ready], (False, True)) > 0

    def choose(self, ready: Seq[Sequence], load: StepLoad) -> list[RowDrafts]:
        """Chooses the drafts that each row tries, before length and pages cut them; sets ``n_draft``."""
        self.n_draft, self._n_context = 0, load.n_context
        if not self.on:
            return [RowDrafts()] * len(ready)
        self.table.step()
        if self.device:
            self.n_draft = self._narrowed(self._device_k(ready, load), ready, load)
            return [self._held(seq).cut(self.n_draft) for seq in ready]
        found = [self._drafts(seq) for seq in ready]
        k = self._host_k(ready, found, load)
        return [d.cut(k) for d in found]

    def backfills(self, draft: PlanBuilder, running: Iterable[Sequence], cap: PrefillCap) -> None:
        """Add rows to ``draft`` that show the drafter what it lacks, if this step should."""
        if self.hysteresis.backfills or self._fixed is not None:
            self.backfill.fill(draft, running, cap)

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
                    self._watch(seq).left = plan.n_draft

    def observe(self, plan: StepPlan, now: float, device_s: float, plain_s: float) -> None:
        """``plan`` took ``device_s``; ``plain_s`` is predicted of one of as many tokens that drafts
        nothing."""
        gap_s = self.gaps.landed(plan.id, now, device_s)
        n_prefill = sum([row.count for row in plan.rows if not row.from_slot and not row.backfill])
        self.tally.step(device_s, gap_s, prefills=not plan.rows[-1].from_slot)
        share, n = self._prefill
        self._prefill = (_mean(share, n_prefill > 0), _mean(n, n_prefill) if n_prefill else n)
        if plan.n_draft:
            self.tally.drafted(max(0.0, device_s - plain_s))

    def drawn(self, row: RowPlan, r: int, seq: Sequence, n_ok: int) -> None:
        """``row``, number ``r`` of the plan being committed and of ``seq``, drew ``n_ok`` tokens."""
        if not row.from_slot:
            return
        source = self._landed.get(r, "")
        n, accepted = self._deep(len(row.drafts)), max(0, n_ok - 1)
        self.tally.row(source, seq.request.lane, len(row.drafts), n, accepted, n_ok)
        if n and self._blind and source == self._name and seq.finish is None:
            self._learn(seq, n, accepted)

    def took(self, seq: Sequence, tokens: Seq[int]) -> None:
        """``seq`` got ``tokens`` (none after a chunk of its prompt): look what drafts they prove."""
        if not self._is_read(seq):
            return
        assert self.proposer is not None
        shadow = self._watch(seq).shadow
        for token in tokens:
            ended = shadow.see(token)
            if ended is not None:
                self._learn(seq, *ended)
        self._read_left -= self.proposer.read(seq, max(0, self._read_left))
        if shadow.expected is None and tokens and seq.finish is None:
            ids = self.proposer.propose(seq, self.most)
            shadow.open(tuple(ids if seq.guide is None or not ids else seq.guide.trim(ids)))

    def begin_commit(self, plan: StepPlan) -> None:
        """The results of ``plan`` follow."""
        self._read_left = READ_PER_STEP
        self._landed = self._sources.pop(plan.id, {})
        if self._name in self._landed.values():
            self.hysteresis.seen()

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
        if seq.n_output:
            self._length = _mean(self._length, seq.n_output)
        self._watches.pop(seq, None)
        self.backfill.forget(seq)
        if self.proposer is not None:
            self.proposer.forget(seq)

    def __len__(self) -> int:
        """Sequences of which anything is kept."""
        return len(self._watches)

    def _watch(self, seq: Sequence) -> SequenceAcceptance:
        return self._watches.setdefault(seq, SequenceAcceptance())

    def _learn(self, seq: Sequence, n_drafts: int, n_accepted: int) -> None:
        self.acceptance.add(n_drafts, n_accepted, seq.request.lane)
        self._watch(seq).acceptance.add(n_drafts, n_accepted, FADE_REQUEST)

    def _odds(self, seq: Sequence) -> Odds:
        """Of the next drafts of ``seq``. A drafter without a shadow always has some."""
        may = may_hold(seq) if self._blind and self.device else seq.request.speculative
        if not may or (seq.guide is not None and not self.device):  # a guided one waits anyway
            return NEVER
        odds = self.acceptance.odds(self._watch(seq).acceptance, seq.request.lane)
        return Odds(odds.accepts, 1.0) if self._blind else odds

    def _deep(self, n: int) -> int:
        """Most of ``n`` drafts that can be accepted: of a tree, as many as it is deep."""
        depths = self.limits.draft_depths
        return max(depths[:n], default=0) if depths else n

    def _device_k(self, ready: Seq[Sequence], load: StepLoad) -> int:
        """Drafts that the device makes in a step of the rows that decode and those that soon will."""
        rows = [*ready, *load.entering]
        if len(rows) > (self.limits.draft_rows or self.limits.max_decode_rows):
            self.hysteresis.end()
            return 0
        if not rows:
            return 0
        if self._fixed is not None:
            return self._fixed
        if not ready and not self.limits.drafts_from_kv:
            return 0  # it sees nothing in prompts alone, which only take longer
        odds = [self._odds(seq) if self._worth_backfill(seq) else NEVER for seq in rows]
        new = bool(load.entering) or not self.limits.drafts_from_kv
        k = self.hysteresis.step(self._k(odds, (load.behind, load.behind)), new=new)
        if not all([self._watch(seq).acceptance.drafts.tried for seq in rows]):
            k = min(k, self.table.options[1])  # of a new sequence nothing is known but its lane
        return k if any([o.offers for o in odds]) else 0

    def _worth_backfill(self, seq: Sequence) -> bool:
        """False for a sequence whose backfill would cost more than drafts of the rest of it save."""
        if self.hysteresis.k:
            return True
        left = max(self._length - seq.n_output, self._length / 2)
        return self.backfill.missing(seq) <= PER_TOKEN * left

    def _narrowed(self, k: int, ready: Seq[Sequence], load: StepLoad) -> int:
        """As many of ``k`` drafts as there are programs for beside this step's prompts."""
        widest = self.limits.prefill_width
        beside = load.entering or any([self.backfill.due(seq) is not None for seq in ready])
        return min(k, widest - 1) if beside and widest else k

    def _host_k(self, ready: Seq[Sequence], found: Seq[RowDrafts], load: StepLoad) -> int:
        """Drafts that rows try of those that were found."""
        if self._fixed is not None:
            return self._fixed
        if not any([d.ids for d in found]):
            return 0
        pairs = zip(ready, found, strict=True)
        odds = [self._found_odds(seq, d) for seq, d in pairs]
        k = self._k(odds, (load.behind, load.behind))
        return self.hysteresis.step(k) if self._blind else k

    def _found_odds(self, seq: Sequence, drafts: RowDrafts) -> Odds:
        if not drafts.ids:
            return NEVER
        if drafts.source == GRAMMAR:
            return SURE
        odds = self.acceptance.odds(self._watch(seq).acceptance, seq.request.lane)
        return Odds(odds.accepts, 1.0)

    def _k(self, odds: Seq[Odds], behind: tuple[bool, bool]) -> int:
        return self.table.k(odds, self._length, behind)

    def _seconds(self, rows: int, k: int, behind: bool) -> float:
        """Of a step, prompts and the wait for the host as they are of late."""
        width, n_draft = k + 1, k if self.device else 0
        share, n_prefill = self._prefill
        plain = self.costs.seconds(rows, 0, self._n_context, width, n_draft)
        narrow = min(width, self.limits.prefill_width or width)
        beside = self.costs.seconds(
            rows, round(n_prefill), self._n_context, narrow, min(n_draft, narrow - 1)
        )
        return (1.0 - share) * plain + share * beside + self.gaps.seconds(behind)

    def _is_read(self, seq: Sequence) -> bool:
        """True for a sequence whose text a proposer of the host reads."""
        return not self._blind and seq.request.speculative

    def _held(self, seq: Sequence) -> RowDrafts:
        """Drafts of ``seq`` where the device drafts: what it left, unless its KV lacks something."""
        if not may_hold(seq):
            return self._drafts(seq)
        if self.backfill.missing(seq):
            return RowDrafts()
        return RowDrafts((-1,) * room(seq, self._watch(seq).left), self._name)

    def _drafts(self, seq: Sequence) -> RowDrafts:
        """All that ``seq`` could try now, of a guide or the host's proposer."""
        forced = self._forced(seq)
        if forced.ids or self.proposer is None or not seq.request.speculative:
            return forced
        most = room(seq, self.most)
        if not most or (seq.in_flight and not self.proposer.blind):
            return RowDrafts()
        ids = self.proposer.propose(seq, most)
        if seq.guide is not None and ids:
            ids = seq.guide.trim(ids)
        return RowDrafts(ids, self._name) if ids else RowDrafts()

    def _forced(self, seq: Sequence) -> RowDrafts:
        """Tokens that a guide leaves no choice about."""
        trees = self.limits.draft_depths  # then there are no programs for other drafts
        if seq.guide is None or trees or not seq.request.speculative:
            return RowDrafts()
        forced = seq.guide.forced[: room(seq, self.most)]
        return RowDrafts(forced, GRAMMAR) if forced else RowDrafts()


def _mean(mean: float, new: float) -> float:
    return _KEEP * mean + (1.0 - _KEEP) * new
