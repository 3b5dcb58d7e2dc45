"""Counts what speculation does, for metrics.

A key with braces carries labels, which the HTTP side turns into Prometheus labels.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from jserve.types import Lane


class SpeculationCounters:
    """Counters by proposer, by lane and by position."""

    def __init__(self) -> None:
        self.rows = self.tokens = 0
        self.device_s = self.decode_s = self.draft_s = self.gap_s = 0.0
        self.decode_steps = 0
        self._rounds: Counter[tuple[str, Lane, int, int, int]] = Counter()
        """(proposer, lane, drafts, most of them that could be accepted, accepted) -> rows."""

    def row(
        self, source: str, lane: Lane, n_drafts: int, n_deep: int, n_accepted: int, n_drawn: int
    ) -> None:
        """A row that read its slot came back; of its drafts, ``n_deep`` could be accepted at most."""
        self.rows += 1
        self.tokens += n_drawn
        if n_drafts:
            self._rounds[source, lane, n_drafts, n_deep, n_accepted] += 1

    def step(self, device_s: float, gap_s: float, draft_s: float, *, prefills: bool) -> None:
        """A step took ``device_s`` after the device had waited ``gap_s`` for the host, ``draft_s`` of it (estimated)
        for the making of drafts; ``prefills``: it carried prompt tokens too."""
        self.device_s += device_s
        self.draft_s += draft_s
        if not prefills:
            self.decode_s += device_s
            self.decode_steps += 1
            self.gap_s += gap_s

    def counters(self) -> dict[str, float]:
        found: defaultdict[str, float] = defaultdict(float)
        found |= {
            "decode_rows_total": self.rows,
            "decode_tokens_total": self.tokens,
            "step_seconds_total": self.device_s,
            "decode_step_seconds_total": self.decode_s,
            "decode_steps_total": self.decode_steps,
            "decode_step_gap_seconds_total": self.gap_s,
            "spec_decode_drafting_seconds_total": self.draft_s,
        }
        for (source, lane, n_drafts, n_deep, n_accepted), rows in self._rounds.items():
            labels = f"proposer={source},lane={lane.value}"
            found[f"spec_decode_num_drafts_total{{proposer={source}}}"] += rows
            for name, n in (("draft", n_drafts), ("accepted", n_accepted)):
                found[f"spec_decode_num_{name}_tokens_total{{{labels}}}"] += n * rows
            for place in range(n_deep):
                for name, n in (("draft", n_deep), ("accepted", n_accepted)):
                    key = (
                        f"spec_decode_num_{name}_tokens_per_pos_total{{{labels},position={place}}}"
                    )
                    found[key] += rows * (place < n)
        return dict(found)
