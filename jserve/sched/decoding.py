"""Rows that read their slots: one for every sequence whose known tokens are all scheduled, with drafts or without.

Owns what a decode or verify row needs before it is made: pages for the most tokens it can draw, its share of the
step's tokens. Must not know who drafts or why so many (``sched.drafting``), nor prefill.
"""

from __future__ import annotations

from itertools import islice

from jserve.ports import RunnerLimits
from jserve.sched.draft import PlanDraft
from jserve.sched.drafting import Drafting
from jserve.sched.drafts import Drafts, Load
from jserve.sched.residency import Residency
from jserve.types import Sequence


class Decoding:
    """Makes the decode and verify rows of a step."""

    def __init__(
        self, floor: Residency, limits: RunnerLimits, drafting: Drafting, *, guided: bool
    ) -> None:
        self.floor, self.limits, self.drafting = floor, limits, drafting
        self.guided = guided

    def waits(self, n_flights: int, n_context: int) -> bool:
        """True when planning should wait for the steps in flight, for the sake of drafts."""
        if not self.drafting.on or not n_flights:
            return False
        return self.drafting.waits(self.ready(), n_flights, self._load(n_context, n_flights))

    def fill(self, draft: PlanDraft, n_flights: int, n_context: int) -> None:
        """Add the rows, in order."""
        if self.guided or self.floor.window_pages:
            self._grow_given()
        ready = self.ready()
        if self.drafting.on and (ready or self.drafting.device):
            load = self._load(n_context, n_flights)
            chosen = self.drafting.choose(ready, load)
            draft.n_draft = self.drafting.n_draft
            if 0 < self.limits.prefill_width <= draft.n_draft:
                draft.limit(0)  # no program takes prompts beside so many drafts
            if draft.n_draft or any([d.ids for d in chosen]):
                self._verify(draft, ready, chosen)
                return
        self._decode(draft, ready)

    def ready(self) -> list[Sequence]:
        """Those who may have such a row now."""
        return [
            seq
            for seq in self.floor.running
            if seq.scheduled >= seq.given
            and len(seq.tokens) + seq.in_flight < seq.max_len
            and (seq.guide is None or seq.guide.room(seq.in_flight) > 0)
        ]

    def _load(self, n_context: int, n_flights: int) -> Load:
        """The prefill that waits among the running, and for a drafter of the device also in the queue;
        who is admitted in this step is not known yet."""
        entering = [seq for seq in self.floor.running if seq.scheduled < seq.given]
        n_prefill = sum([seq.given - seq.scheduled for seq in entering])
        if self.drafting.device and not self.floor.full:
            free = self.floor.max_running - len(self.floor.running)
            waiting = list(islice(self.floor.waiting, free))
            n_prefill += sum([len(seq.tokens) for seq in waiting])
            entering += waiting
        n_prefill = min(n_prefill, self.limits.max_prefill_tokens)
        return Load(n_prefill, n_context, behind=not n_flights, entering=entering)

    def _grow_given(self) -> None:
        """Pages for known tokens: those that guides forced, and with a window the next row's of a
        prompt. Before any row, since growing may push others out."""
        for seq in self.floor.running.snapshot():
            if seq.lease is not None and seq.given > seq.lease.capacity:
                self.floor.grow(seq, self.floor.tokens_ahead(seq))

    def _decode(self, draft: PlanDraft, ready: list[Sequence]) -> None:
        for seq in ready:
            # One that gave way to an earlier one in this very loop holds no lease any more.
            if seq.lease is not None and seq.scheduled >= seq.lease.capacity:
                self.floor.grow(seq, seq.scheduled + 1)
        draft.decode([seq for seq in ready if seq.lease is not None and seq.guide is None])
        for seq in ready:
            if seq.lease is not None and seq.guide is not None:
                draft.verify(seq, ())

    def _verify(self, draft: PlanDraft, ready: list[Sequence], chosen: list[Drafts]) -> None:
        """Rows with drafts, as far as budget, length and free pages allow them."""
        spare = draft.tokens_left - len(self.floor.running)
        for seq, drafts in zip(ready, chosen, strict=True):
            if seq.lease is None:
                continue
            drafts = drafts.cut(min(spare, self._room(seq)))
            n = len(drafts.ids)
            if n and not self.floor.cache.extend(seq.lease, seq.scheduled + 1 + n):
                drafts, n = Drafts(), 0  # nobody gives way to a guess
            if self.floor.grow(seq, seq.scheduled + 1 + n):
                mask = self.drafting.mask(seq, drafts) if n else None
                draft.verify(seq, drafts.ids, drafts.source, mask)
                spare -= n
                self._look_ahead(seq, draft.n_draft)

    def _look_ahead(self, seq: Sequence, n: int) -> None:
        """Pages for ``n`` drafts that the device makes of the next tokens, if there are any free."""
        assert seq.lease is not None
        if n:
            most = min(seq.scheduled + n, self.limits.max_model_len)
            self.floor.cache.extend(seq.lease, most)

    def _room(self, seq: Sequence) -> int:
        """Drafts that length and guide leave room for beside the token that is drawn anyway."""
        room = seq.max_len - len(seq.tokens) - seq.in_flight - 1
        if seq.guide is not None:
            room = min(room, seq.guide.room(seq.in_flight) - 1)
        return room
