"""Who drafts, how much, and when that is worth waiting for: the policy of speculation.

Owns the estimates per sequence and per proposer, the choice of k per row and step, and the counters. Must not
know pages, budgets or queues (``sched.decoding`` makes rows of what is chosen here). A pure function of plans,
results and the times they carry.

Three kinds of drafts, one row each:

* *forced*: a guide leaves one way; they stand for sure.
* *host*: a proposer looks at the text. It needs the last token, so its sequence is planned when nothing of it is
  in flight. While the step before runs nobody knows what it will find, so waiting is decided by expectation: all
  wait, or nobody (who drafts would get every second step only). What drafts would have brought is seen in every
  text, drafted or not (``spec.acceptance.Shadow``), so not waiting costs no knowledge.
* *device*: a drafter leaves ``StepPlan.n_draft`` drafts in the slots. Nothing waits, but nothing is learned
  without trying: see ``spec.choice.Purse``. Blind proposers of the host (synthetic ones) go the same way.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from jserve.config import SpeculativeOptions
from jserve.ports import Proposer, RunnerLimits
from jserve.sched.costs import MeasuredCosts
from jserve.sched.spectally import SpecTally
from jserve.spec.acceptance import ProposerRates, RequestRates, Shadow
from jserve.spec.choice import Gains, Purse, best_width, widths
from jserve.types import RowPlan, Sequence, StepPlan

GRAMMAR, DEVICE = "grammar", "device"
READ_PER_STEP = 256
"""Tokens that proposers take in per commit; a long prompt is read while it is prefilled."""
LOOK_SHARE = 0.01
"""Of the time without drafts, what may be lost by trying some."""
_GAP_S, _GAP_KEEP = 3e-4, 0.95
NOTHING: Gains = (0.0,)


@dataclass(slots=True)
class Drafts:
    """What one row shall try."""

    ids: Seq[int] = ()
    source: str = ""
    gains: Gains = NOTHING
    """Drafts expected to stand of 0, 1 ... len(ids)."""

    def cut(self, most: int) -> Drafts:
        """At most ``most`` of them."""
        return self if most >= len(self.ids) else Drafts(self.ids[: max(0, most)], self.source)


@dataclass(slots=True, eq=False)
class _Watch:
    """What is known of one sequence."""

    rates: RequestRates = field(default_factory=RequestRates)
    shadow: Shadow = field(default_factory=Shadow)
    left: int = 0
    """Drafts that the device holds for it."""


@dataclass(frozen=True, slots=True)
class Load:
    """What else the step to be planned holds."""

    n_prefill: int
    n_context: int
    behind: bool
    """True when no step is in flight: the host's time is not hidden."""


class Drafting:
    """The policy.

    Args:
        proposer: drafts on the host; None: only the device (where it can) and guides do.
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
        self.min_speed = options.min_speed
        # Of a tree all is verified or nothing.
        self.widths = (1, 1 + self.most) if limits.draft_depths else widths(self.most)
        self.n_draft = 0
        """Drafts that the device shall leave at the end of the step being planned."""
        self.tally = SpecTally()
        names = [GRAMMAR, DEVICE] + ([proposer.name] if proposer is not None else [])
        self._rates = {name: ProposerRates(max(1, self.most)) for name in names}
        self._sources: dict[int, dict[int, str]] = {}
        self._watched: dict[Sequence, _Watch] = {}
        self._purse = Purse(LOOK_SHARE)
        self._paid = False
        """Whether the drafts that the device holds are to be tried, however little is expected."""
        self._gaps = Gaps()
        self._read_left = 0
        self._draft_s = 0.0
        """Seconds that the device takes per draft."""

    @property
    def on(self) -> bool:
        """False when no row will ever have drafts."""
        return self.most > 0

    @property
    def device(self) -> bool:
        return self.limits.device_drafts > 0

    @property
    def _name(self) -> str:
        return DEVICE if self.proposer is None else self.proposer.name

    @property
    def _blind(self) -> bool:
        return self.device if self.proposer is None else self.proposer.blind

    def waits(self, ready: Seq[Sequence], n_flights: int, load: Load) -> bool:
        """True when no step should be planned before those in flight are back, because drafts of
        the host are worth more than the overlap."""
        if not self.on or self._blind or self.proposer is None or not n_flights:
            return False
        if not any(self._looks(seq) and seq.in_flight for seq in ready):
            return False
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

    def choose(self, ready: Seq[Sequence], load: Load) -> list[Drafts]:
        """What each row tries, before length and pages cut it; sets ``n_draft``."""
        self.n_draft = 0
        if not self.on or not ready:
            return [Drafts()] * len(ready)
        found = [self._drafts(seq) for seq in ready]
        width = self._width(ready, [d.gains for d in found], load)
        if width == 1 and self._blind:
            width = self._look(ready, found, load)
        if self.device:
            self.n_draft = self._ahead(ready, load)
        return [d.cut(width - 1) for d in found]

    def mask(self, seq: Sequence, drafts: Drafts) -> np.ndarray | None:
        """Bits that the row's drafts need beyond those of a guide."""
        if self.proposer is None or drafts.source != self.proposer.name:
            return None
        return self.proposer.mask(seq, drafts.ids)

    def planned(self, plan: StepPlan, sources: dict[int, str], *, behind: bool) -> None:
        """``plan`` will run. ``sources``: row -> who made its drafts. ``behind``: no step is in
        flight before it."""
        if not self.on:
            return
        self._gaps.planned(plan.id, behind)
        self._sources[plan.id] = sources
        if self.device:
            for row in plan.rows:
                if row.seq.request.speculative:
                    # After a chunk that emits nothing this is wrong, but none of these is read then.
                    self._watch(row.seq).left = plan.n_draft

    def observe(self, plan: StepPlan, now: float, device_s: float, predicted_s: float) -> None:
        """``plan`` took ``device_s``; ``predicted_s`` is what it takes without drafting."""
        self._gaps.landed(plan.id, now, device_s)
        self.tally.step(device_s, prefills=not plan.rows[-1].from_slot)
        if plan.n_draft and device_s > 0:
            each = max(0.0, device_s - predicted_s) / plan.n_draft
            self._draft_s += 0.2 * (each - self._draft_s)
            self.tally.drafting(self._draft_s * plan.n_draft)
        elif not any(row.drafts for row in plan.rows):
            self._purse.earn(device_s)

    def drawn(self, row: RowPlan, source: str, n_ok: int) -> None:
        """``row``, whose drafts came from ``source``, drew ``n_ok`` tokens."""
        if not row.from_slot:
            return
        n, stood = self._deep(len(row.drafts)), max(0, n_ok - 1)
        self.tally.row(source, row.seq.request.lane, len(row.drafts), n, stood, n_ok)
        if n and self._blind and source == self._name and row.seq.finish is None:
            self._rates[source].add(n, stood)
            self._watch(row.seq).rates.add(n, stood)

    def took(self, seq: Sequence, tokens: Seq[int]) -> None:
        """``seq`` got ``tokens`` (none after a chunk of its prompt): look what drafts they prove."""
        if not self._looks(seq):
            return
        assert self.proposer is not None
        watch, rates = self._watch(seq), self._rates[self.proposer.name]
        for token in tokens:
            ended = watch.shadow.see(token)
            if ended is not None:
                watch.rates.add(*ended)
                rates.add(*ended)
        self._read_left -= self.proposer.read(seq, max(0, self._read_left))
        if watch.shadow.expected is None and tokens and seq.finish is None:
            ids = self.proposer.propose(seq, self.most)
            watch.shadow.open(tuple(ids if seq.guide is None or not ids else seq.guide.trim(ids)))

    def begin_commit(self, plan: StepPlan) -> dict[int, str]:
        """The results of ``plan`` follow; who made the drafts of which row."""
        self._read_left = READ_PER_STEP
        return self._sources.pop(plan.id, {})

    def idle(self) -> None:
        """Nobody runs any more: time that passes now says nothing of steps."""
        self._gaps.idle()

    def lost(self) -> None:
        """The steps in flight will not land."""
        self._gaps.idle()
        self._sources.clear()

    def counters(self) -> dict[str, float]:
        """For /metrics."""
        host_s = 0.0 if self.proposer is None else self.proposer.seconds
        return self.tally.counters() | {"spec_decode_host_seconds_total": host_s}

    def forget(self, seq: Sequence) -> None:
        """``seq`` is over."""
        self._watched.pop(seq, None)
        if self.proposer is not None:
            self.proposer.forget(seq)

    def __len__(self) -> int:
        """Sequences of which anything is kept."""
        return len(self._watched)

    def _looks(self, seq: Sequence) -> bool:
        """True for a sequence whose text a proposer of the host reads."""
        return self.proposer is not None and not self.proposer.blind and seq.request.speculative

    def _watch(self, seq: Sequence) -> _Watch:
        watch = self._watched.get(seq)
        if watch is None:
            watch = self._watched[seq] = _Watch()
        return watch

    def _drafts(self, seq: Sequence) -> Drafts:
        """All that ``seq`` could try now."""
        if not seq.request.speculative:
            return Drafts()
        room = min(self.most, seq.max_len - len(seq.tokens) - seq.in_flight - 1)
        if room <= 0:
            return Drafts()
        # Where the device's drafts are trees there is no program for others.
        chains = not self.limits.draft_depths
        if chains and seq.guide is not None and (forced := seq.guide.forced[:room]):
            return Drafts(forced, GRAMMAR, range(len(forced) + 1))
        if self._blind:
            return self._blind_drafts(seq, room)
        if self.proposer is None or seq.in_flight:
            return Drafts()
        return self._valued(seq, self.proposer.propose(seq, room))

    def _blind_drafts(self, seq: Sequence, room: int) -> Drafts:
        """Drafts that need no look at the text: made up, or held by the device.

        A guide's masks follow the drafts' ids, which only the device knows: no row of both.
        """
        if self.proposer is not None:
            return self._valued(seq, self.proposer.propose(seq, room))
        if seq.guide is not None:
            return Drafts()
        return self._valued(seq, (-1,) * min(room, self._watch(seq).left))

    def _valued(self, seq: Sequence, ids: Seq[int]) -> Drafts:
        if seq.guide is not None and ids and ids[0] >= 0:
            ids = seq.guide.trim(ids)
        if not ids:
            return Drafts()
        return Drafts(ids, self._name, self._gains(seq, len(ids)))

    def _gains(self, seq: Sequence, most: int) -> list[float]:
        """Expected drafts that stand of 0, 1 ... ``most``."""
        gains = self._watch(seq).rates.gains(self._deep(most), self._rates[self._name])
        return [gains[self._deep(n)] for n in range(most + 1)]

    def _deep(self, n: int) -> int:
        """Most of ``n`` drafts that can stand: of a tree, as many as it is deep."""
        return max(self.limits.draft_depths[:n], default=0) if self.limits.draft_depths else n

    def _prospect(self, seq: Sequence) -> Gains:
        """Gains of the next row of ``seq`` if it waits, before there is a proposal."""
        if not self._looks(seq) or seq.guide is not None:  # a guided one waits anyway
            return NOTHING
        room = min(self.most, seq.max_len - len(seq.tokens) - seq.in_flight - 1)
        share = self._watch(seq).rates.offer(self._rates[self._name])
        return [share * g for g in self._gains(seq, max(0, room))]

    def _width(self, ready: Seq[Sequence], rows: list[Gains], load: Load) -> int:
        def seconds(width: int) -> float:
            return self._seconds(ready, load, width, behind=load.behind)

        return best_width(rows, self.widths, seconds, seconds(1), self.min_speed)

    def _look(self, ready: Seq[Sequence], found: list[Drafts], load: Load) -> int:
        """A width above 1, now and then, to see whether drafts have become worth it."""
        longest = max([len(d.ids) for d in found])
        if not longest:
            return 1
        if self.proposer is None:  # what the device drafted was paid for when it was asked to
            paid, self._paid = self._paid, False
            return next(w for w in self.widths if w > longest) if paid else 1
        width = self.widths[1]
        cost = self._seconds(ready, load, width, behind=load.behind)
        cost -= self._seconds(ready, load, 1, behind=load.behind)
        return width if self._purse.spend(cost) else 1

    def _ahead(self, ready: Seq[Sequence], load: Load) -> int:
        """Drafts that the device shall leave for the step after this one."""
        most = min(self.most, self.limits.device_drafts)
        rows = [self._gains(seq, most) if self._may_hold(seq) else NOTHING for seq in ready]
        later = Load(0, load.n_context, load.behind)

        def seconds(width: int) -> float:
            drafting = self._draft_s * min(width - 1, most) if width > 1 else 0.0
            return self._seconds(ready, later, width, behind=load.behind) + drafting

        width = best_width(rows, self.widths, seconds, seconds(1), self.min_speed)
        if width == 1 and max(len(gains) for gains in rows) > 1:
            width = self.widths[1]
            self._paid = self._purse.spend(seconds(width) - seconds(1))
            if not self._paid:
                return 0
        return min(width - 1, most)

    def _may_hold(self, seq: Sequence) -> bool:
        return seq.request.speculative and seq.guide is None

    def _seconds(self, ready: Seq[Sequence], load: Load, width: int, *, behind: bool) -> float:
        took = self.costs.seconds(len(ready), load.n_prefill, load.n_context, width)
        return took + self._gaps.seconds(behind)


class Gaps:
    """How long the device waits for the host between two steps: after a step that nothing followed
    in the queue (*behind*), and otherwise. From the times that plans and results carry."""

    def __init__(self) -> None:
        self._mean = {True: _GAP_S, False: 0.0}
        self._behind: dict[int, bool] = {}
        self._landed: float | None = None

    def seconds(self, behind: bool) -> float:
        return self._mean[behind]

    def planned(self, step: int, behind: bool) -> None:
        self._behind[step] = behind

    def landed(self, step: int, now: float, device_s: float) -> None:
        behind, before = self._behind.pop(step, None), self._landed
        self._landed = now
        if behind is None or before is None or device_s <= 0:
            return
        gap = min(max(0.0, now - before - device_s), device_s)
        self._mean[behind] += (1 - _GAP_KEEP) * (gap - self._mean[behind])

    def idle(self) -> None:
        """Nobody runs: what follows is no gap. Steps that were lost will not land."""
        self._landed = None
        self._behind.clear()
