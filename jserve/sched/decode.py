"""Plans decode and verify rows: one per running sequence whose known tokens are all scheduled.

It owns what a decode or verify row needs before it is made: pages for the most tokens it can draw, its share of the
step's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import islice

from jserve.ports import RunnerLimits
from jserve.sched.plan_builder import PlanBuilder
from jserve.sched.resources import Resources
from jserve.sched.versions import WeightVersions
from jserve.speculation.policy.controller import SpeculationController, StepLoad
from jserve.types import Sequence


class DecodePlanner:
    """Makes the decode and verify rows of a step."""

    def __init__(
        self,
        resources: Resources,
        limits: RunnerLimits,
        speculation: SpeculationController,
        versions: WeightVersions,
        *,
        guided: bool,
    ) -> None:
        self.resources, self.limits, self.speculation = resources, limits, speculation
        self.versions = versions
        self.guided = guided

    def waits(self, n_flights: int, n_context: int) -> bool:
        """True when planning should wait for the steps in flight, for the sake of drafts."""
        if not self.speculation.on or not n_flights:
            return False
        return self.speculation.waits(self.ready(), self._load(n_context, n_flights))

    def fill(self, builder: PlanBuilder, n_flights: int, n_context: int) -> None:
        """Add the rows, in order."""
        if self.guided or self.resources.entry.slides:
            self._grow_given()
        ready = self.ready()
        if self.speculation.on and (ready or self.speculation.device):
            load = self._load(n_context, n_flights)
            chosen = self.speculation.choose(ready, load)
            builder.n_draft = self.speculation.n_draft
            if 0 < self.limits.prefill_width <= builder.n_draft:
                builder.limit(0)  # no program takes prompts beside so many drafts
            if builder.n_draft or any(chosen):
                self._verify(builder, ready, chosen)
                return
        self._decode(builder, ready)

    def ready(self) -> list[Sequence]:
        """Sequences that can have such a row now."""
        return [
            seq
            for seq in self.versions.running(self.resources.running)
            if seq.scheduled >= seq.given
            and len(seq.tokens) + seq.in_flight < seq.max_len
            and (seq.guide is None or seq.guide.room(seq.in_flight) > 0)
        ]

    def _load(self, n_context: int, n_flights: int) -> StepLoad:
        """Beside the decode rows: who waits among the running for the rest of a prompt, and for a drafter of the
        device also who waits in the queue; who is admitted in this step is not known yet."""
        entering = [seq for seq in self.resources.running if seq.scheduled < seq.given]
        if self.speculation.device and not self.resources.full:
            free = self.resources.max_running - len(self.resources.running)
            entering += islice(self.resources.waiting, free)
        return StepLoad(n_context, behind=not n_flights, entering=entering)

    def _grow_given(self) -> None:
        """Pages for known tokens: those that guides forced, and with a window the next row's of a
        prompt. It runs before any row is planned, since growing may preempt."""
        for seq in self.resources.running.snapshot():
            if seq.lease is not None and seq.given > seq.lease.capacity:
                self.resources.grow(seq, self.resources.tokens_ahead(seq))

    def _decode(self, builder: PlanBuilder, ready: list[Sequence]) -> None:
        for seq in ready:
            # A sequence preempted earlier in this loop holds no lease any more.
            if seq.lease is not None and seq.scheduled >= seq.lease.capacity:
                self.resources.grow(seq, seq.scheduled + 1)
        builder.decode([seq for seq in ready if seq.lease is not None and seq.guide is None])
        for seq in ready:
            if seq.lease is not None and seq.guide is not None:
                builder.verify(seq, ())

    def _verify(self, builder: PlanBuilder, ready: list[Sequence], chosen: list[Seq[int]]) -> None:
        """Rows with drafts, as far as budget, length and free pages allow them."""
        spare = builder.tokens_left - len(self.resources.running)
        proposer = self.speculation.proposer
        for seq, drafts in zip(ready, chosen, strict=True):
            if seq.lease is None:
                continue
            drafts = drafts[: max(0, min(spare, self._room(seq)))]
            n = len(drafts)
            if n and not self.resources.cache.extend(seq.lease, seq.scheduled + 1 + n):
                drafts, n = (), 0  # drafts never preempt
            if self.resources.grow(seq, seq.scheduled + 1 + n):
                mask = proposer.mask(seq, drafts) if n and proposer is not None else None
                builder.verify(seq, drafts, mask)
                spare -= n
                self._look_ahead(seq, builder.n_draft)

    def _look_ahead(self, seq: Sequence, n: int) -> None:
        """Pages for ``n`` drafts that the device makes of the next tokens, if there are any free."""
        assert seq.lease is not None
        if n:
            most = min(seq.scheduled + n, self.limits.max_model_len)
            self.resources.cache.extend(seq.lease, most)

    def _room(self, seq: Sequence) -> int:
        """Drafts that length and guide leave room for beside the token that is drawn anyway."""
        room = seq.max_len - len(seq.tokens) - seq.in_flight - 1
        if seq.guide is not None:
            room = min(room, seq.guide.room(seq.in_flight) - 1)
        return room
