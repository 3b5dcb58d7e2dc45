"""How long a step will take: measured bucket times, corrected by every step that comes back.

Owns the table of step times and its corrections. Must not know queues, policy or wall time: what it
says depends only on the times given at the start and on the results observed since, in order, so a
replay of the journal predicts the same.

A step runs in the cheapest program that covers it, so its time is that of the smallest measured
size that is nowhere below it; above the table the time grows with the tokens::

    n_prefill  128 |  31 ms   33 ms   40 ms        seconds(n_decode=5, n_prefill=40, ...)
                32 |  11 ms   12 ms   15 ms   <--  is the entry (8, 128): 33 ms
                 0 |   4 ms    5 ms    8 ms        times its correction
                     2       8      32   n_decode
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from jserve.ports import StepTime

Size = tuple[int, int, int, int]
"""(decode rows, prefill tokens, tokens of context, tokens of a decode row)."""

ENOUGH = 8
"""Observed steps after which predictions count as known where nothing was measured before."""
_STEP_S, _TOKEN_S = 2e-3, 5e-5
"""Where nothing was measured: a guess of the shape; the correction finds the scale."""
_SLOWEST_GAIN = 0.1
_WILDEST = 4.0
"""One step moves a correction as if it were at most this factor off: a late compile, a stalled host."""
MAX_SECONDS = 3600.0


class MeasuredCosts:
    """``ports.StepCosts`` from step times, refined by ``observe``.

    Args:
        step_times: what is known before the first step; may be empty.
    """

    def __init__(self, step_times: Iterable[StepTime] = ()) -> None:
        self._table: dict[Size, float] = {}
        for t in step_times:
            size = (t.n_decode, t.n_prefill, t.n_context, t.width)
            self._table[size] = min(max(t.seconds, 1e-9), MAX_SECONDS)
        self._axes = tuple(sorted({size[i] for size in self._table}) for i in range(4))
        self._covers = _covers(self._table, self._axes)
        self._gains: dict[Size, tuple[float, int]] = {}
        self._gain, self._n_seen = 1.0, 0

    @property
    def known(self) -> bool:
        """False until predictions rest on anything but a guess."""
        return bool(self._table) or self._n_seen >= ENOUGH

    @property
    def rungs(self) -> tuple[int, ...]:
        """Prefill sizes at which the time steps up, ascending; () where nothing was measured."""
        return tuple(n for n in self._axes[1] if n)

    def seconds(self, n_decode: int, n_prefill: int, n_context: int, width: int = 1) -> float:
        """Predicted time of a step: decode rows of ``width`` tokens, prefill tokens, longest context
        in tokens."""
        if not n_decode and not n_prefill:
            return 0.0
        cell, base = self._base((n_decode, n_prefill, n_context, width))
        gain = self._gains.get(cell)
        return base * (self._gain if gain is None else gain[0])

    def observe(
        self, n_decode: int, n_prefill: int, n_context: int, seconds: float, width: int = 1
    ) -> None:
        """A step of this size took ``seconds``; nothing is learned from a time of 0."""
        if seconds <= 0 or not (n_decode or n_prefill):
            return
        cell, base = self._base((n_decode, n_prefill, n_context, width))
        ratio = seconds / base
        self._gain = _moved(self._gain, ratio, self._n_seen)
        self._n_seen += 1
        gain, n = self._gains.get(cell, (self._gain, 0))
        self._gains[cell] = (_moved(gain, ratio, n), n + 1)

    def _base(self, size: Size) -> tuple[Size, float]:
        """(the cell whose correction holds, uncorrected seconds)."""
        if not self._table:
            cell = tuple(n.bit_length() for n in size)
            return cell, _STEP_S + _TOKEN_S * _tokens(size)  # type: ignore[return-value]
        rounded = tuple(_up(axis, n) for axis, n in zip(self._axes, size, strict=True))
        base, cell = self._covers[rounded]  # type: ignore[index]
        over = _tokens(size) / max(1, _tokens(cell))
        return cell, base * max(1.0, over)


def _covers(table: dict[Size, float], axes: Sequence[list[int]]) -> dict[Size, tuple[float, Size]]:
    """For every crossing of the axes: (seconds, entry) of the cheapest entry that is nowhere below it,
    else of the largest there is."""
    if not table:
        return {}
    largest = max(table, key=lambda e: (_tokens(e), e[2]))
    following = [dict(itertools.pairwise(axis)) for axis in axes]
    found: dict[Size, tuple[float, Size] | None] = {}
    for size in itertools.product(*map(reversed, axes)):
        beyond = [
            found.get((*size[:i], after.get(size[i], -1), *size[i + 1 :]))  # type: ignore[arg-type]
            for i, after in enumerate(following)
        ]
        own = (table[size], size) if size in table else None
        found[size] = min([one for one in (own, *beyond) if one is not None], default=None)
    return {size: one or (table[largest], largest) for size, one in found.items()}


def _tokens(size: Size) -> int:
    return size[0] * size[3] + size[1]


def _up(axis: list[int], n: int) -> int:
    """The smallest rung of ``axis`` at or above ``n``, or its last."""
    return axis[min(bisect_left(axis, n), len(axis) - 1)]


def _moved(gain: float, ratio: float, n: int) -> float:
    """``gain`` after one more ``ratio``: the mean of the first ten, then a slow average.

    The first one sets it; later ones are cut to what one step may be off.
    """
    if n == 0:
        return ratio
    ratio = min(max(ratio, gain / _WILDEST), gain * _WILDEST)
    return gain + max(_SLOWEST_GAIN, 1 / (n + 1)) * (ratio - gain)
