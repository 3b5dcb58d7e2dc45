"""Judges engine health from recent steps: failing, non-finite, slow or stuck.

An engine that completes steps is alive, and may still be degraded::

    failing   the last steps all raised, one after the other
    unsound   of the sequences that ended, many had logits that are not finite: bad weights or memory
    slow      steps take several times what such steps usually take, for a minute without a break
    stuck     a step has been running for long; liveness waits longer, since it triggers a restart

A symptom shows at its limit, and is over below half of it, ``REST_S`` later at the earliest. What is older than
``WINDOW_S`` does not count, so an engine without traffic becomes ready again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

WINDOW_S = 60.0
REST_S = 10.0
FEW = 3
"""So many sequences with logits that are not finite are an accident, whatever their share."""
BREAK_S = 5.0
"""A pause between two steps that begins the minute of a slow engine anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    """The threshold of each symptom; 0: it is not looked for."""

    failed_steps: float = 5
    """Steps that raised, in a row."""
    nonfinite_share: float = 0.1
    """Of the sequences that ended within the window."""
    slowness: float = 5.0
    """Step time over that of such steps before."""
    step_s: float = 30.0
    """Seconds without a step while there is work."""


class Symptom:
    """One value and its limit, with memory: whether it ``shows``, and in what ``words`` it was last seen."""

    def __init__(self, limit: float, lasts_s: float = 0.0) -> None:
        self.limit, self.lasts_s = limit, lasts_s
        self.shows, self.words = False, ""
        self._since: float | None = None
        self._last = 0.0

    def look(self, now: float, value: float, words: str = "") -> None:
        """It is ``value`` at ``now``."""
        if not self.limit:
            return
        if value >= self.limit:
            self._since = now if self._since is None else self._since
            self._last, self.words = now, words
            self.shows = self.shows or now - self._since >= self.lasts_s
        else:
            self._since = None
            if value < self.limit / 2 and now - self._last >= REST_S:
                self.shows = False

    def interrupted(self) -> None:
        """Interrupt the stretch: earlier observations do not continue."""
        self._since = None


class EngineHealth:
    """Observes the engine's statistics and reports what is degraded."""

    def __init__(self, limits: HealthLimits | None = None) -> None:
        self.limits = limits or HealthLimits()
        self.n_degraded = 0
        """Counter: times that a healthy engine became degraded."""
        self._fit = True
        self.forget()

    def forget(self) -> None:
        """Forget the history: another engine starts."""
        limits = self.limits
        self._failing = Symptom(limits.failed_steps)
        self._nonfinite = Symptom(limits.nonfinite_share)
        self._slow = Symptom(limits.slowness, lasts_s=WINDOW_S)
        self._stuck = Symptom(limits.step_s)
        self._ends: deque[tuple[float, float, float]] = deque([(float("-inf"), 0.0, 0.0)])
        """(time, sequences ended, of these non-finite): reported totals, the first one before the window."""
        self._step, self._stepped_at = 0, float("-inf")
        self._n_faults, self._failed_at, self._in_row = 0.0, float("-inf"), 0.0

    def observe(self, step: int, values: Mapping[str, float], now: float) -> None:
        """Take the statistics ``values`` that the engine reported after ``step`` steps."""
        ended = values.get("finished", 0.0), values.get("sequences_nonfinite_total", 0.0)
        if ended != self._ends[-1][1:]:
            self._ends.append((now, *ended))
            self._forget_ends(now)
        n_faults = values.get("step_faults_total", 0.0)
        if n_faults != self._n_faults:
            self._n_faults, self._failed_at = n_faults, now
        self._in_row = values.get("steps_failed_in_row", 0.0)
        if step != self._step:
            if now - self._stepped_at > BREAK_S:
                self._slow.interrupted()
            self._step, self._stepped_at = step, now
            times = values.get("step_slowness", 0.0)
            self._slow.look(now, times, f"steps take {times:.1f} times as long as usual")

    def degraded_reasons(self, now: float, without_step_s: float) -> list[str]:
        """The symptoms of an engine, for an operator; empty: nothing. There has been work, and no step, for
        ``without_step_s`` seconds."""
        n_nonfinite, n_ended = self._nonfinite_of(now)
        share = n_nonfinite / max(1.0, n_ended) if n_nonfinite > FEW else 0.0
        self._nonfinite.look(
            now,
            share,
            f"{n_nonfinite:.0f} of {n_ended:.0f} sequences of a minute had logits that are not finite",
        )
        in_row = self._in_row if now - self._failed_at < WINDOW_S else 0.0
        self._failing.look(now, in_row, f"{in_row:.0f} steps failed in a row")
        if now - self._stepped_at >= WINDOW_S:
            self._slow.look(now, 0.0)
        self._stuck.look(
            now, without_step_s, f"no step for {without_step_s:.0f} s while there is work"
        )
        symptoms = (self._failing, self._nonfinite, self._slow, self._stuck)
        found = [symptom.words for symptom in symptoms if symptom.shows]
        self.n_degraded += self._fit and bool(found)
        self._fit = not found
        return found

    def _forget_ends(self, now: float) -> None:
        while len(self._ends) > 1 and now - self._ends[1][0] >= WINDOW_S:
            self._ends.popleft()

    def _nonfinite_of(self, now: float) -> tuple[float, float]:
        """(unsound, all) of the sequences that ended within the window."""
        self._forget_ends(now)
        ends = self._ends
        return ends[-1][2] - ends[0][2], ends[-1][1] - ends[0][1]
