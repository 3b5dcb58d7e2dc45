"""Counts what speculation does, for metrics.

A key with braces carries labels, which the HTTP side turns into Prometheus labels.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from jserve.types import Lane


class SpeculationCounters:
    """Sums over rows and steps; rounds of drafts by proposer, by lane and by position."""

    def __init__(self) -> None:
        self._sums = {
            "decode_rows_total": 0.0,
            "decode_tokens_total": 0.0,
            "step_seconds_total": 0.0,
            "decode_step_seconds_total": 0.0,
            "decode_steps_total": 0.0,
            "decode_step_gap_seconds_total": 0.0,
            "spec_decode_drafting_seconds_total": 0.0,
        }
        self._rounds: Counter[tuple[str, Lane, int, int, int]] = Counter()
        """(proposer, lane, drafts, most of them that could be accepted, accepted) -> rows."""

    def row(
        self, source: str, lane: Lane, n_drafts: int, n_deep: int, n_accepted: int, n_drawn: int
    ) -> None:
        """A row that read its slot came back; of its drafts, ``n_deep`` could be accepted at most."""
        self._sums["decode_rows_total"] += 1
        self._sums["decode_tokens_total"] += n_drawn
        if n_drafts:
            self._rounds[source, lane, n_drafts, n_deep, n_accepted] += 1

    def step(self, device_s: float, gap_s: float, draft_s: float, *, prefills: bool) -> None:
        """A step took ``device_s`` after the device had waited ``gap_s`` for the host, ``draft_s`` of it (estimated)
        for the making of drafts; ``prefills``: it carried prompt tokens too."""
        self._sums["step_seconds_total"] += device_s
        self._sums["spec_decode_drafting_seconds_total"] += draft_s
        if not prefills:
            self._sums["decode_step_seconds_total"] += device_s
            self._sums["decode_steps_total"] += 1
            self._sums["decode_step_gap_seconds_total"] += gap_s

    def counters(self) -> dict[str, float]:
        found = defaultdict(float, self._sums)
        for (source, lane, n_drafts, n_deep, n_accepted), rows in self._rounds.items():
            labels = f"proposer={source},lane={lane.value}"
            found[f"spec_decode_num_drafts_total{{proposer={source}}}"] += rows
            found[f"spec_decode_num_draft_tokens_total{{{labels}}}"] += rows * n_drafts
            found[f"spec_decode_num_accepted_tokens_total{{{labels}}}"] += rows * n_accepted
            for place in range(n_deep):
                at, accepted = f"{{{labels},position={place}}}", place < n_accepted
                found[f"spec_decode_num_draft_tokens_per_pos_total{at}"] += rows
                found[f"spec_decode_num_accepted_tokens_per_pos_total{at}"] += rows * accepted
        return dict(found)
