"""Tracks which positions lack drafter KV and plans the rows that backfill it.

A step without drafts runs a program without the drafter, so its KV lacks those tokens. None of this can change a
token: a drafter that lacks some only guesses badly.

Of a sequence one stretch may be missing, from the first token that was not shown to where drafting went on::

    tokens    0 ........ low ............ high ........ scheduled
              shown      | off: missing   | shown again

It is backfilled by rows like those of prefill: the target computes the stretch once more, since heads read its
hidden states, but keeps the KV it has; only the drafter writes. Such a row needs the token after each of its
own, so the newest wait until the host knows them.

Cached prefixes are accounted for by page. Where pages were computed without the drafter, whoever finds them in
the cache lacks them too, also after a way through host memory; pages that were read from disk count as shown, as
does everything where layers have windows, which forget it anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jserve.kv.ledger import Lease
from jserve.ports import RunnerLimits
from jserve.timing.prefill_cap import PrefillCap
from jserve.types import PageFetch, RowPlan, Sequence, StepPlan

if TYPE_CHECKING:
    from jserve.sched.plan_builder import PlanBuilder

_OPEN = 1 << 40
"""``high`` while no drafts are made."""


@dataclass(slots=True)
class _MissingRange:
    """The positions without drafter KV of a sequence that holds ``lease``: none where ``low >= high``."""

    low: int
    high: int
    lease: Lease | None


class DraftKVBackfill:
    """The account of one drafter. Without KV of its own (or none at all) nothing is ever missing."""

    def __init__(self, limits: RunnerLimits) -> None:
        self.on = limits.drafts_from_kv and not limits.window
        self._rungs = sorted({t.n_prefill for t in limits.step_times if t.n_draft and t.n_prefill})
        self._page = limits.page_size
        self._unseen_P = np.zeros(limits.n_pages if self.on else 0, bool)
        self._unseen_H = np.zeros(limits.n_host_pages if self.on else 0, bool)
        self._of: dict[Sequence, _MissingRange] = {}

    def missing(self, seq: Sequence) -> int:
        """Tokens of ``seq`` that the drafter has yet to be shown."""
        gap = self._gap(seq)
        return 0 if gap is None else max(0, min(gap.high, seq.scheduled) - gap.low)

    def fill(self, builder: PlanBuilder, running: Iterable[Sequence], cap: PrefillCap) -> None:
        """Add rows that show what is missing: as much as the smallest program has room for that takes this
        step's prompts and more."""
        if not self.on or not builder.n_draft or not builder.prefill_room:
            return
        room = [n - builder.n_prefill for n in self._rungs if n > builder.n_prefill]
        builder.limit(room[0] if room else builder.prefill_left)
        if cap.bound_s:
            n_decode = sum([row.from_slot for row in builder.rows])
            builder.limit(cap.fitting(n_decode, builder.longest(), builder.prefill_left))
        gaps = [(seq, gap) for seq in running if (gap := self._gap(seq)) and gap.high < _OPEN]
        known = [(gap.low, min(gap.high, len(seq.tokens) - 1), seq) for seq, gap in gaps]
        for low, end, seq in sorted(known, key=lambda one: one[1] - one[0]):
            if low < end and builder.prefill_room:
                builder.backfill(seq, low, end)

    def planned(self, plan: StepPlan, seqs: Seq[Sequence]) -> None:
        """``plan`` will run; ``seqs``: the sequence of each of its rows."""
        if not self.on:
            return
        for move in plan.moves:
            if move.out:
                self._unseen_H[move.host] = self._unseen_P[move.page]
            else:
                self._unseen_P[move.page] = self._unseen_H[move.host]
        for row, seq, page_M in zip(plan.rows, seqs, plan.page_table_RM, strict=True):
            gap = self._gap(seq)
            if gap is None:  # it begins at this row: what the cache held for it may be missing
                unseen_N = self._unseen_P[page_M[: -(-row.start // self._page)]]
                low = int(unseen_N.argmax()) * self._page if unseen_N.any() else row.start
                gap = self._of[seq] = _MissingRange(low, row.start, seq.lease)
            self._count(gap, row, seq, page_M, drafts=plan.n_draft > 0)

    def read(self, fetches: Iterable[PageFetch]) -> None:
        """These pages will be read from disk into host memory."""
        if self.on:
            self._unseen_H[[fetch.host for fetch in fetches]] = False

    def forget(self, seq: Sequence) -> None:
        self._of.pop(seq, None)

    def _gap(self, seq: Sequence) -> _MissingRange | None:
        """Of one that starts over, after a preemption or a fault, nothing of before counts: it has another
        lease, or none."""
        gap = self._of.get(seq)
        return gap if gap is not None and seq.lease is gap.lease is not None else None

    def _count(
        self, gap: _MissingRange, row: RowPlan, seq: Sequence, page_M: np.ndarray, *, drafts: bool
    ) -> None:
        # A row that reads its slot starts at its bound or before: the tokens known say how much.
        first = min(row.start, len(seq.tokens) - 1) if row.from_slot else row.start
        end, Z = row.start + row.count, self._page
        if row.backfill:
            gap.low = end
        elif not drafts:
            gap.low = gap.low if gap.low < gap.high else first
            gap.high = _OPEN
        elif gap.high == _OPEN:
            gap.high = row.start
        begins = first // Z if not drafts or row.backfill else -(-first // Z)
        # A page of which only a part was shown so far still lacks the rest.
        ends = end // Z if row.backfill and end < gap.high else -(-end // Z)
        self._unseen_P[page_M[begins:ends]] = not drafts
