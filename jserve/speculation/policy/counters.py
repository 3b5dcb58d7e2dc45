"""Counts what speculation does, for metrics.

A key with braces carries labels, which the HTTP side turns into Prometheus labels.
"""

from __future__ import annotations

from collections import Counter

from jserve.types import Lane


class SpeculationCounters:
    """Counters by proposer, by lane and by position."""

    def __init__(self) -> None:
        self.rows = self.tokens = 0
        self.device_s = self.decode_s = self.draft_s = self.gap_s = 0.0
        self.decode_steps = 0
        self._rounds: Counter[str] = Counter()
        self._drafted: Counter[tuple[str, Lane]] = Counter()
        self._stood: Counter[tuple[str, Lane]] = Counter()
        self._tried_at: Counter[tuple[str, Lane, int]] = Counter()
        self._stood_at: Counter[tuple[str, Lane, int]] = Counter()

    def row(
        self, source: str, lane: Lane, n_drafts: int, n_deep: int, n_stood: int, n_drawn: int
    ) -> None:
        """A row that read its slot came back; of its drafts, ``n_deep`` could be accepted at most."""
        self.rows += 1
        self.tokens += n_drawn
        if not n_drafts:
            return
        self._rounds[source] += 1
        self._drafted[source, lane] += n_drafts
        self._stood[source, lane] += n_stood
        for j in range(n_deep):
            self._tried_at[source, lane, j] += 1
            self._stood_at[source, lane, j] += j < n_stood

    def step(self, device_s: float, gap_s: float, *, prefills: bool) -> None:
        """A step took ``device_s`` after the device had waited ``gap_s`` for the host; ``prefills``: it
        carried prompt tokens too."""
        self.device_s += device_s
        if not prefills:
            self.decode_s += device_s
            self.decode_steps += 1
            self.gap_s += gap_s

    def drafted(self, seconds: float) -> None:
        """The device drafted for so long (estimated from what such steps take longer than others of as many tokens)."""
        self.draft_s += seconds

    def counters(self) -> dict[str, float]:
        found: dict[str, float] = {
            "decode_rows_total": self.rows,
            "decode_tokens_total": self.tokens,
            "step_seconds_total": self.device_s,
            "decode_step_seconds_total": self.decode_s,
            "decode_steps_total": self.decode_steps,
            "decode_step_gap_seconds_total": self.gap_s,
            "spec_decode_drafting_seconds_total": self.draft_s,
        }
        for source, n in self._rounds.items():
            found[f"spec_decode_num_drafts_total{{proposer={source}}}"] = n
        by_lane = (("draft", self._drafted), ("accepted", self._stood))
        for name, counts in by_lane:
            for (source, lane), n in counts.items():
                labels = f"proposer={source},lane={lane.value}"
                found[f"spec_decode_num_{name}_tokens_total{{{labels}}}"] = n
        by_place = (("draft", self._tried_at), ("accepted", self._stood_at))
        for name, counts in by_place:
            for (source, lane, place), n in counts.items():
                labels = f"proposer={source},lane={lane.value},position={place}"
                found[f"spec_decode_num_{name}_tokens_per_pos_total{{{labels}}}"] = n
        return found
