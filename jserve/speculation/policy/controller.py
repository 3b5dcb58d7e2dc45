"""Decides which rows draft and how many tokens: a pure function of plans, results and the times that they carry.

Three kinds of drafts, one row each; ``sched.decode`` makes rows of what is chosen here:

* *forced*: a guide leaves one way; they are accepted for sure.
* *host*: a proposer looks at the text. It needs the last token, so its sequence is planned when nothing of it is
  in flight; all rows wait for that, or none does. Blind proposers (synthetic ones) know nothing of the text.
* *device*: a drafter leaves ``StepPlan.n_draft`` drafts in the slots. Where it copies from the text (n-grams), a
  proposer of the host is its *shadow*: it finds the same a step later, and drafts for rows under a guide.

All but blind proposers show what drafts would have brought in every text, drafted or not (``Acceptance``).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from jserve.config import SpeculativeOptions
from jserve.ports import Proposer, RunnerLimits
from jserve.speculation.policy.acceptance import NEVER, SURE, Acceptance, Odds
from jserve.speculation.policy.counters import SpeculationCounters
from jserve.speculation.policy.draft_count import HOLD, Hysteresis, best_k, widths
from jserve.speculation.policy.draft_kv_backfill import DraftKVBackfill
from jserve.timing.host_gaps import HostGaps
from jserve.timing.step_costs import MeasuredCosts
from jserve.types import RowPlan, Sequence, StepPlan

GRAMMAR, DEVICE = "grammar", "device"
READ_PER_STEP = 256
"""Tokens that proposers take in per commit; a long prompt is read while it is prefilled."""


class StepLoad(NamedTuple):
    """The load of the planned step beside its decode rows."""

    n_context: int
    """Tokens of the longest context."""
    behind: bool
    """True when no step is in flight: the host's time is not hidden."""
    entering: Seq[Sequence] = ()
    """Sequences whose prompts the step may compute, in part or whole: they will decode soon."""


class SpeculationController:
    """The policy. ``proposer`` drafts on the host, or is the shadow of a device that copies; None: only the device
    (where it can) and guides do."""

    def __init__(
        self,
        limits: RunnerLimits,
        costs: MeasuredCosts,
        options: SpeculativeOptions,
        proposer: Proposer | None = None,
    ) -> None:
        self.limits, self.costs, self.proposer = limits, costs, proposer
        self.device = limits.device_drafts > 0
        """True when it is the device that drafts."""
        self.most = min(limits.max_drafts, limits.device_drafts or limits.max_drafts)
        self.on = self.most > 0
        """False when no row will ever have drafts."""
        self.n_draft = 0
        """Drafts that the device shall leave at the end of the step being planned."""
        self.tally, self.gaps = SpeculationCounters(), HostGaps()
        self.backfill, self.acceptance = DraftKVBackfill(limits), Acceptance()
        self._blind = proposer is None or proposer.blind
        """True where only verified drafts show what is accepted."""
        self._name = DEVICE if proposer is None else proposer.name
        self._min_speed, depths = options.min_speed, limits.draft_depths
        # Of a tree all is verified or nothing.
        self._ks = (0, self.most) if depths else [w - 1 for w in widths(self.most)]
        self._depths = [max(depths[:n], default=0) if depths else n for n in range(self.most + 1)]
        """Drafts -> most of them that can be accepted: of a tree, as many as it is deep."""
        self.hysteresis = Hysteresis(self._ks[1] if self.on else 0)
        self._of: dict[Sequence, Acceptance] = {}
        self._read_left = 0
        """Tokens that the proposer may still read in this commit."""
        self._fixed: int | None = None

    def fix(self, k: int | None) -> None:
        """From now on up to ``k`` drafts in every step, for benchmarks; None: as many as pay."""
        self._fixed = k

    def waits(self, ready: Seq[Sequence], load: StepLoad) -> bool:
        """True when no step should be planned before those in flight are back, because drafts of
        the host are worth more than the overlap."""
        waiting = any([seq.request.speculative and seq.in_flight for seq in ready])
        if self.device or self._blind or load.behind or not waiting:
            return False
        if self._fixed is not None:
            return self._fixed > 0
        return self._best(ready, [self._odds(seq) for seq in ready], load, waits=True) > 0

    def choose(self, ready: Seq[Sequence], load: StepLoad) -> list[Seq[int]]:
        """Chooses the drafts that each row tries, before length and pages cut them; sets ``n_draft``."""
        rows, found = list(ready), [self._found(seq) for seq in ready]
        if not self.device:
            odds = [self._odds(seq, ids) for seq, ids in zip(ready, found, strict=True)]
        else:
            if ready or self.limits.drafts_from_kv:  # one without KV sees nothing in prompts alone
                rows += load.entering
            crowded = len(rows) > (self.limits.draft_rows or self.limits.max_decode_rows)
            odds = [] if crowded else [self._odds(seq) for seq in rows]
        k = self._k(rows, odds, load) if rows else 0
        self.n_draft = k if self.device else 0
        return [ids[:k] for ids in found]

    @property
    def backfills(self) -> bool:
        """True when rows should show the drafter what it lacks; a probe is of new sequences, which lack nothing."""
        return self.hysteresis.k > 0 or self._fixed is not None

    def planned(self, plan: StepPlan, seqs: Seq[Sequence], *, behind: bool) -> None:
        """``plan`` will run. ``seqs``: the sequence of each row. ``behind``: no step is in flight before it."""
        if not self.on:
            return
        self.gaps.planned(plan.id, behind)
        self.backfill.planned(plan, seqs)
        for row, seq in zip(plan.rows, seqs, strict=True):
            if row.drafts and seq.guide is None:
                self.hysteresis.seen()
            if self.device and not row.backfill and seq.request.speculative:
                # After a chunk that emits nothing this is wrong, but none of these is read then.
                self._acceptance(seq).left = plan.n_draft

    def observe(self, plan: StepPlan, now: float, device_s: float, plain_s: float) -> None:
        """``plan`` took ``device_s``, its rows follow; ``plain_s`` is predicted of one of as many tokens without
        drafts."""
        gap_s = self.gaps.landed(plan.id, now, device_s)
        draft_s = max(0.0, device_s - plain_s) if plan.n_draft else 0.0
        self.tally.step(device_s, gap_s, draft_s, prefills=not plan.rows[-1].from_slot)
        self._read_left = READ_PER_STEP

    def drawn(self, row: RowPlan, seq: Sequence, n_ok: int) -> None:
        """``row``, which reads the slot of ``seq``, drew ``n_ok`` tokens; ``seq`` does not have them yet."""
        source = GRAMMAR if self._forced(seq) else self._name
        n, accepted = self._depths[len(row.drafts)], max(0, n_ok - 1)
        self.tally.row(source, seq.request.lane, len(row.drafts), n, accepted, n_ok)
        if n and self._blind and source == self._name and seq.finish is None:
            self._acceptance(seq).add(n, accepted)

    def took(self, seq: Sequence, tokens: Seq[int]) -> None:
        """``seq`` got ``tokens`` (none after a chunk of its prompt): look what drafts they prove."""
        if self.proposer is None or self._blind or not seq.request.speculative:
            return
        one = self._acceptance(seq)
        self._read_left -= self.proposer.read(seq, max(0, self._read_left))
        if one.ended(seq.tokens) and tokens and seq.finish is None:
            one.proposal = len(seq.tokens), self._proposed(seq)

    def counters(self) -> dict[str, float]:
        """For /metrics."""
        host_s = 0.0 if self.proposer is None else self.proposer.seconds
        return self.tally.counters() | {"spec_decode_host_seconds_total": host_s}

    def forget(self, seq: Sequence) -> None:
        """``seq`` is over."""
        self._of.pop(seq, None)
        self.backfill.forget(seq)
        if self.proposer is not None:
            self.proposer.forget(seq)

    def _acceptance(self, seq: Sequence) -> Acceptance:
        if seq not in self._of:
            self._of[seq] = Acceptance(self.acceptance)
        return self._of[seq]

    def _odds(self, seq: Sequence, found: Seq[int] | None = None) -> Odds:
        """Of the next drafts of ``seq``; ``found``: they are known. A drafter without a shadow always has some."""
        guided = seq.guide is not None and (self._blind or not self.device)  # it waits anyway
        if not seq.request.speculative or (guided if found is None else not found):
            return NEVER
        if found is not None and self._forced(seq):
            return SURE
        odds = self._acceptance(seq).odds()
        return odds if found is None and not self._blind else Odds(odds.accepts, 1.0)

    def _k(self, rows: Seq[Sequence], odds: Seq[Odds], load: StepLoad) -> int:
        """Drafts of the next step of ``rows``, which those that decode begin and those that soon will end."""
        if (k := self._fixed) is None:
            k = self._best(rows, odds, load)
            if self._blind:
                new = bool(load.entering) or not self.limits.drafts_from_kv
                k = self.hysteresis.step(k, new=new)
        beside = load.entering or any([self.backfill.missing(seq) for seq in rows])
        if self.device and beside and self.limits.prefill_width:
            k = min(k, self.limits.prefill_width - 1)  # there are no wider programs beside prompts
        return k if any([one.offers for one in odds]) else 0

    def _best(
        self, rows: Seq[Sequence], odds: Seq[Odds], load: StepLoad, *, waits: bool = False
    ) -> int:
        """The k of most tokens per second; ``waits``: with drafts the device waits for the host before the step,
        though without it does not. To begin costs a step without drafts to verify, and the backfill: they are
        spread over the steps that drafting lasts at least."""
        begins = self.limits.drafts_from_kv and not self.hysteresis.k
        missing = sum([self.backfill.missing(seq) for seq in rows]) if begins else 0

        def seconds(k: int) -> float:
            size = (load.n_context, k + 1, k if self.device else 0)
            begin = self.costs.seconds(len(rows), missing, *size) / HOLD if begins and k else 0.0
            gap = self.gaps.seconds(load.behind or (waits and k > 0))
            return self.costs.seconds(len(rows), 0, *size) + begin + gap

        return best_k(odds, self._ks, self._depths, seconds, self._min_speed)

    def _found(self, seq: Sequence) -> Seq[int]:
        """All that ``seq`` could try now. What the device left is nothing where its KV lacks something; a guide's
        masks follow the drafts' ids, which only the device knows."""
        if not seq.request.speculative:
            return ()
        if self.device and seq.guide is None:
            left = 0 if self.backfill.missing(seq) else self._acceptance(seq).left
            return (-1,) * left
        if forced := self._forced(seq):
            return forced[: self.most]
        return () if seq.in_flight and not self._blind else self._proposed(seq)

    def _forced(self, seq: Sequence) -> Seq[int]:
        """Ids that the guide of ``seq`` leaves no choice about. Beside a tree there are no programs for such drafts."""
        return () if seq.guide is None or self.limits.draft_depths else seq.guide.forced

    def _proposed(self, seq: Sequence) -> Seq[int]:
        """Ids of the host's proposer that the guide of ``seq``, if any, lets follow."""
        if self.proposer is None:
            return ()
        ids = self.proposer.propose(seq, self.most)
        return seq.guide.trim(ids) if seq.guide is not None and ids else ids
