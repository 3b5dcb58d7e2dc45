"""Rows of known tokens: the next chunk of every sequence that runs and has some left, then who gets in.

Owns who may have such a row in this step and who has to wait for something else first. Must not know rows
that read their slots (``sched.decoding``), nor what results mean.
"""

from __future__ import annotations

from jserve.sched.draft import PlanDraft
from jserve.sched.fetching import Fetching
from jserve.sched.gate import Gate
from jserve.sched.guided import lacks_mask
from jserve.sched.leaders import Leaders
from jserve.sched.residency import Residency, owes_scores
from jserve.sched.trials import Trials
from jserve.types import Sequence


class Prefilling:
    """Makes the prefill rows of a step.

    Args:
        floor: who waits and who runs.
        gate: whether overload asks for shorter prefills; its cap bounds them.
        leaders, fetching, trials: what a sequence in the queue may have to wait for.
    """

    def __init__(
        self, floor: Residency, gate: Gate, leaders: Leaders, fetching: Fetching, trials: Trials
    ) -> None:
        self.floor, self.gate = floor, gate
        self.leaders, self.fetching, self.trials = leaders, fetching, trials

    def fill(self, draft: PlanDraft, step: int, now: float) -> None:
        """Add the rows: first of those who run, then of those who get in. ``step`` counts plans."""
        begun = [seq for seq in self.floor.running if seq.scheduled < seq.given]
        waiting = len(self.floor.waiting) > 0
        if begun or (waiting and not self.floor.full):
            self._go_on(draft, begun)
        if waiting:
            self._admit(draft, step, now)

    def held_back(self, seq: Sequence, step: int) -> bool:
        """True while ``seq`` (in the queue) has to wait for something else first."""
        return bool(self.waits_for(seq, step))

    def waits_for(self, seq: Sequence, step: int) -> str:
        """What that is, in words; empty: nothing."""
        if self.trials.holds(seq):
            return "others are tried first after a step that failed"
        if self.leaders.wait(seq, step):
            return "another request computes its prefix"
        if self.fetching.wait(seq):
            return "its prefix is read from disk"
        return "its KV is on the way to the host" if self.floor.swapping.waits(seq) else ""

    def _go_on(self, draft: PlanDraft, begun: list[Sequence]) -> None:
        """The next chunk of each of ``begun``, within what all of this step may have."""
        if self.gate.level:
            self.gate.update()
        cap = self.gate.cap
        n_context = draft.longest() if cap.bound_s else 0
        draft.limit(cap.tokens(len(draft.rows), n_context, short=self.gate.short))
        for seq in begun:
            if not draft.prefill_room or lacks_mask(seq):
                continue
            if seq.n_output and seq.scheduled >= seq.n_prompt:
                draft.load(seq)  # the device counts what it draws, and forced tokens it did not
            draft.prefill(seq, score=owes_scores(seq))

    def _admit(self, draft: PlanDraft, step: int, now: float) -> None:
        """Candidates from the queue, while slots, rows, budget and pages last."""
        walk = self.floor.waiting.walk(now)
        while self._may_admit(draft):
            seq = walk.next()
            if seq is None or seq.pending:
                return  # rows of its last residence must come back before it may start again
            if self.held_back(seq, step) or lacks_mask(seq):
                continue
            if self.floor.enter(seq):
                draft.load(seq)
                draft.prefill(seq, score=owes_scores(seq))
            elif not walk.pass_by(seq):
                return

    def _may_admit(self, draft: PlanDraft) -> bool:
        return draft.prefill_room > 0 and not self.floor.full
