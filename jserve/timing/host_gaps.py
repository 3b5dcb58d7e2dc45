"""Measures how long the device idles between steps, waiting for the host.

It owns the two means: after a step with no other step queued behind it (*behind*), and otherwise. They come from
the times that plans and results carry.
"""

from __future__ import annotations

_GAP_S, _KEEP = 3e-4, 0.95


class HostGaps:
    """Decayed means of the gaps between steps, in seconds."""

    def __init__(self) -> None:
        self._mean = {True: _GAP_S, False: 0.0}
        self._behind: dict[int, bool] = {}
        self._landed: float | None = None

    def seconds(self, behind: bool) -> float:
        return self._mean[behind]

    def planned(self, step: int, behind: bool) -> None:
        self._behind[step] = behind

    def landed(self, step: int, now: float, device_s: float) -> float:
        """``step``, which took ``device_s``, came back at ``now``: seconds that the device had waited
        before it, 0 where that is unknown."""
        behind, before = self._behind.pop(step, None), self._landed
        self._landed = now
        if behind is None or before is None or device_s <= 0:
            return 0.0
        gap = min(max(0.0, now - before - device_s), device_s)
        self._mean[behind] += (1 - _KEEP) * (gap - self._mean[behind])
        return gap

    def idle(self) -> None:
        """No sequence runs: the time that follows is no gap. Lost steps will not complete."""
        self._landed = None
        self._behind.clear()
