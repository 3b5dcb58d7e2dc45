"""What the device drafter has seen of each sequence, and the rows that show it the rest.

Owns the account of a drafter that sleeps: a step in which nobody drafts runs a program without it, so its KV
lacks those tokens. Must not know why it sleeps or wakes (``policy.device_drafts``). None of this can change a token: a
drafter that misses some only guesses badly.

Of a sequence one stretch may be missing, from the first token it was not shown to where it woke::

    tokens    0 ........ low ............ high ........ scheduled
              shown      | asleep: missed | shown again

Awake, it is shown the stretch by rows like those of prefill: the target computes it once more, since heads read
its hidden states, but keeps the KV it has; only the drafter writes. Such a row needs the token after each of
its own, so the newest wait until the host knows them.

Cached prefixes are accounted for by page. Where pages were computed while the drafter slept, whoever finds
them in the cache misses them too, also after a way through host memory; pages that were read from disk count as
shown, as does everything where layers have windows, which forget it anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from jserve.kv.pages import PageLease
from jserve.ports import RunnerLimits
from jserve.timing.prefill_cap import PrefillCap
from jserve.timing.step_costs import MeasuredCosts
from jserve.types import PageFetch, PageMove, RowPlan, Sequence, StepPlan

if TYPE_CHECKING:
    from jserve.sched.plan_builder import PlanBuilder

_OPEN = 1 << 40
"""``high`` while it sleeps."""


class _MissingRange:
    """What is missing of a sequence while it holds ``lease``: nothing where ``low >= high``."""

    __slots__ = ("high", "lease", "low")

    def __init__(self, low: int, high: int, lease: PageLease | None) -> None:
        self.low, self.high, self.lease = low, high, lease


class DraftKVBackfill:
    """The account of one drafter. Without KV of its own (or none at all) nothing is ever missing."""

    def __init__(self, limits: RunnerLimits, costs: MeasuredCosts) -> None:
        self.on = limits.drafts_from_kv and not limits.window
        self.costs = costs
        self._rungs = sorted({t.n_prefill for t in limits.step_times if t.n_draft and t.n_prefill})
        self._page = limits.page_size
        self._unseen_P = np.zeros(limits.n_pages if self.on else 0, bool)
        self._unseen_H = np.zeros(limits.n_host_pages if self.on else 0, bool)
        self._of: dict[Sequence, _MissingRange] = {}

    def missing(self, seq: Sequence) -> int:
        """Tokens of ``seq`` that the drafter has yet to be shown."""
        gap = self._gap(seq)
        return 0 if gap is None else max(0, min(gap.high, seq.scheduled) - gap.low)

    def due(self, seq: Sequence) -> tuple[int, int] | None:
        """First and last + 1 of what ``seq`` can be shown in a step that drafts."""
        gap = self._gap(seq)
        if gap is None or gap.high == _OPEN:
            return None
        end = min(gap.high, len(seq.tokens) - 1)
        return (gap.low, end) if end > gap.low else None

    def portion(self, due: int, beside: int, step: Callable[[int], float]) -> tuple[int, float]:
        """Of ``due`` tokens as many as are shown in one step beside ``beside`` of prompts, and the
        seconds they add to it: what costs least per token. ``step``: prefill tokens -> seconds."""
        sizes = [n for n in self._rungs if n > beside] or [beside + due]
        options = [(min(due, n - beside), step(n) - step(beside)) for n in sizes]
        return min(options, key=lambda option: option[1] / option[0])

    def fill(self, builder: PlanBuilder, running: Iterable[Sequence], cap: PrefillCap) -> None:
        """Add rows that show what is missing, as far as the step has room."""
        if not self.on or not builder.n_draft:
            return
        found = [(seq, due) for seq in running if (due := self.due(seq)) is not None]
        if not found or not builder.prefill_room:
            return
        n_decode = sum([row.from_slot for row in builder.rows])

        def step(n: int) -> float:
            width = builder.n_draft + 1
            return self.costs.seconds(n_decode, n, builder.longest(), width, builder.n_draft)

        total = sum([end - start for _, (start, end) in found])
        builder.limit(self.portion(total, builder.n_prefill, step)[0])
        if cap.bound_s:
            builder.limit(cap.fitting(n_decode, builder.longest(), builder.prefill_left))
        for seq, due in found:
            if builder.prefill_room:
                builder.backfill(seq, *due)

    def planned(self, plan: StepPlan, seqs: Seq[Sequence]) -> None:
        """``plan`` will run; ``seqs``: the sequence of each of its rows."""
        if not self.on:
            return
        self._move(plan.moves)
        for row, seq, page_M in zip(plan.rows, seqs, plan.page_table_RM, strict=True):
            gap = self._gap(seq)
            if gap is None:
                gap = self._of[seq] = self._found(row, seq, page_M)
            self._count(gap, row, seq, page_M, active=plan.n_draft > 0)

    def read(self, fetches: Iterable[PageFetch]) -> None:
        """These pages will be read from disk into host memory."""
        if self.on:
            self._unseen_H[[fetch.host for fetch in fetches]] = False

    def forget(self, seq: Sequence) -> None:
        self._of.pop(seq, None)

    def _move(self, moves: Iterable[PageMove]) -> None:
        for move in moves:
            if move.out:
                self._unseen_H[move.host] = self._unseen_P[move.page]
            else:
                self._unseen_P[move.page] = self._unseen_H[move.host]

    def _gap(self, seq: Sequence) -> _MissingRange | None:
        """Of one that starts over, after giving way or a fault, nothing of before counts: it has another
        lease, or none."""
        gap = self._of.get(seq)
        return gap if gap is not None and seq.lease is gap.lease is not None else None

    def _found(self, row: RowPlan, seq: Sequence, page_M: np.ndarray) -> _MissingRange:
        """What is missing of ``seq``, which begins at ``row``: of what the cache held for it."""
        unseen_N = self._unseen_P[page_M[: -(-row.start // self._page)]]
        low = int(unseen_N.argmax()) * self._page if unseen_N.any() else row.start
        return _MissingRange(low, row.start, seq.lease)

    def _count(
        self, gap: _MissingRange, row: RowPlan, seq: Sequence, page_M: np.ndarray, *, active: bool
    ) -> None:
        # A row that reads its slot starts at its bound or before: the tokens known say how much.
        first = min(row.start, len(seq.tokens) - 1) if row.from_slot else row.start
        end, Z = row.start + row.count, self._page
        if row.backfill:
            gap.low = end
        elif not active:
            gap.low = gap.low if gap.low < gap.high else first
            gap.high = _OPEN
        elif gap.high == _OPEN:
            gap.high = row.start
        begins = first // Z if not active or row.backfill else -(-first // Z)
        self._unseen_P[page_M[begins : -(-end // Z)]] = not active
