"""Measures step times relative to their usual time, to detect a degraded device.

It compares steps of one program that read about as many tokens of KV (within a factor of two), because long
contexts take long on a healthy device.
"""

from __future__ import annotations

from collections.abc import Hashable

FIRST = 8
"""Steps whose mean is the first guess of what is usual."""
_FASTER, _SLOWER = 0.05, 0.01
"""The rates at which the usual time follows quicker steps, and slower ones."""
_TWICE = 2.0
"""A step that takes longer than so many times the usual does not count as usual."""
_GAIN, _MOST = 0.05, 20.0
"""Of ``value``: a moving average over some twenty steps, in which one counts as this at the most."""


class Slowness:
    """``value``: times the usual; 0 until anything is usual."""

    def __init__(self) -> None:
        self.value = 0.0
        self._usual: dict[Hashable, tuple[float, int]] = {}

    def observe(self, program: Hashable, n_kv: int, seconds: float) -> None:
        """A step of ``program`` over ``n_kv`` tokens of KV, of all rows, took ``seconds``."""
        if seconds <= 0:
            return
        key = program, n_kv.bit_length()
        usual, n = self._usual.get(key, (0.0, 0))
        if n < FIRST:
            self._usual[key] = usual + (seconds - usual) / (n + 1), n + 1
            return
        ratio = seconds / usual
        if ratio < _TWICE:
            gain = _FASTER if ratio < 1.0 else _SLOWER
            self._usual[key] = usual + gain * (seconds - usual), n
        before = self.value or 1.0
        self.value = before + _GAIN * (min(ratio, _MOST) - before)
