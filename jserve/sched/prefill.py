"""Plans prefill rows: the next chunk of running sequences, then admission from the wait queue."""

from __future__ import annotations

from jserve.sched.admission.gate import AdmissionGate
from jserve.sched.cache.disk_wait import DiskWaits
from jserve.sched.cache.prefix_wait import PrefixWaits
from jserve.sched.guided import lacks_mask
from jserve.sched.plan_builder import PlanBuilder
from jserve.sched.recovery.bisection import FaultBisection
from jserve.sched.resources import Resources, owes_prompt
from jserve.sched.versions import WeightVersions
from jserve.types import Sequence


class PrefillPlanner:
    """Makes the prefill rows of a step.

    Args:
        resources: the wait queue, the running sequences, and what they hold.
        gate: its cap bounds the prefill tokens of a step.
        versions: says whose turn it is.
        prefix_waits, disk_waits, bisection: the reasons for which a sequence stays in the queue.
    """

    def __init__(
        self,
        resources: Resources,
        gate: AdmissionGate,
        prefix_waits: PrefixWaits,
        disk_waits: DiskWaits,
        bisection: FaultBisection,
        versions: WeightVersions,
    ) -> None:
        self.resources, self.gate, self.versions = resources, gate, versions
        self.prefix_waits, self.disk_waits, self.bisection = prefix_waits, disk_waits, bisection

    def fill(self, builder: PlanBuilder, step: int, now: float) -> None:
        """Add the rows: running sequences first, then admitted ones. ``step`` counts plans."""
        running = self.versions.running(self.resources.running)
        begun = [seq for seq in running if seq.scheduled < seq.given]
        waiting = len(self.resources.waiting) > 0
        if begun or (waiting and not self.resources.full):
            self._go_on(builder, begun)
        if waiting:
            self._admit(builder, step, now)

    def held_back(self, seq: Sequence, step: int) -> bool:
        """True while ``seq`` (in the queue) has to wait for something else first."""
        return bool(self.waits_for(seq, step))

    def waits_for(self, seq: Sequence, step: int) -> str:
        """The reason in words; empty: none."""
        if self.bisection.holds(seq):
            return "requests of a failed step are retried one group at a time"
        if self.prefix_waits.wait(seq, step):
            return "another request computes its prefix"
        if self.disk_waits.wait(seq):
            return "its prefix is read from disk"
        return "its KV is on the way to the host" if self.resources.swap_policy.waits(seq) else ""

    def lacks(self, seq: Sequence) -> str:
        """The resources that ``seq`` (in the queue) lacks, in words; empty: none."""
        rows = self.resources.vocab_rows
        if rows.lacks(seq):
            return f"all {rows.n} places for sequences with penalties or biases are taken"
        return ""

    def _go_on(self, builder: PlanBuilder, begun: list[Sequence]) -> None:
        """Add the next chunk of each of ``begun``, within the step's prefill cap."""
        if self.gate.level:
            self.gate.update()
        cap = self.gate.cap
        n_context = builder.longest() if cap.bound_s else 0
        builder.limit(cap.tokens(len(builder.rows), n_context, short=self.gate.short))
        for seq in begun:
            if not builder.prefill_room or lacks_mask(seq):
                continue
            if seq.n_output and seq.scheduled >= seq.n_prompt:
                builder.load(seq)  # the device counts what it draws, and forced tokens it did not
            builder.prefill(seq, owed=owes_prompt(seq))

    def _admit(self, builder: PlanBuilder, step: int, now: float) -> None:
        """Admit candidates from the queue while slots, rows, budget and pages last."""
        candidates = self.resources.waiting.candidates(now)
        while self._may_admit(builder):
            seq = candidates.next()
            if seq is None or seq.pending:
                return  # rows of its last residence must come back before it may start again
            if self.resources.vocab_rows.lacks(seq):
                self.resources.vocab_rows.refuse(seq)
                candidates.skip(seq)
                continue
            if self.versions.waits(seq) or self.held_back(seq, step) or lacks_mask(seq):
                continue
            if self.resources.enter(seq):
                builder.load(seq)
                builder.prefill(seq, owed=owes_prompt(seq))
            elif not candidates.skip_blocked(seq):
                return

    def _may_admit(self, builder: PlanBuilder) -> bool:
        return builder.prefill_room > 0 and not self.resources.full
