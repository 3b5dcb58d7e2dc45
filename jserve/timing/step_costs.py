"""Predicts step times from measured program times, corrected by every step that completes.

A step runs in the cheapest program that covers it, so its time is that of the smallest measured
size that is nowhere below it; above the table the time grows with the tokens::

    n_prefill  128 |  31 ms   33 ms   40 ms        seconds(n_decode=5, n_prefill=40, ...)
                32 |  11 ms   12 ms   15 ms   <--  is the entry (8, 128): 33 ms
                 0 |   4 ms    5 ms    8 ms        times its correction
                     2       8      32   n_decode

The making of drafts on the device is part of a program, hence of its time: a step that leaves some
has its own entry, separate from one that leaves none.

A correction has two factors: one that all programs share, since a machine that is slower today is
so for all, and a program's own. So a program that has not run for a while is not judged by the speed
that the machine had then.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jserve.ports import StepTime


class Size(NamedTuple):
    """The size of a step, on which its time depends."""

    n_decode: int
    n_prefill: int
    n_context: int
    width: int = 1
    """Tokens of a decode row."""
    n_draft: int = 0

    @property
    def n_tokens(self) -> int:
        return self.n_decode * self.width + self.n_prefill


ENOUGH = 8
"""Observed steps after which predictions count as known where nothing was measured before."""
_STEP_S, _TOKEN_S = 2e-3, 5e-5
"""The costs where nothing was measured: a guess of the shape; the correction finds the scale."""
_SLOWEST_GAIN = 0.1
SETTLED = 10
"""The first so many steps say how fast the machine is. Of a program, the first so many say how fast that
is; of what it is off by later, half is taken to be the machine's."""
WEIGHT = 2
"""Steps that a measured time counts as."""
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
            size = Size(t.n_decode, t.n_prefill, t.n_context, t.width, t.n_draft)
            self._table[size] = min(max(t.seconds, 1e-9), MAX_SECONDS)
        self._axes = tuple(sorted({size[i] for size in self._table}) for i in range(5))
        self._covers = _covers(self._table, self._axes)
        self._own: dict[Size, tuple[float, int]] = {}
        self._shared, self._n_seen = 1.0, 0

    @property
    def known(self) -> bool:
        """False until predictions rest on anything but a guess."""
        return bool(self._table) or self._n_seen >= ENOUGH

    @property
    def rungs(self) -> tuple[int, ...]:
        """Prefill sizes at which the time steps up, ascending; () where nothing was measured."""
        return tuple(n for n in self._axes[1] if n)

    def seconds(
        self, n_decode: int, n_prefill: int, n_context: int, width: int = 1, n_draft: int = 0
    ) -> float:
        """Predicted time of a step: decode rows of ``width`` tokens, prefill tokens, longest context
        in tokens, drafts that the device leaves."""
        if not n_decode and not n_prefill:
            return 0.0
        cell, base = self._base(Size(n_decode, n_prefill, n_context, width, n_draft))
        return base * self._shared * self._own.get(cell, (1.0, 0))[0]

    def program(
        self, n_decode: int, n_prefill: int, n_context: int, width: int = 1, n_draft: int = 0
    ) -> Size:
        """The size whose correction holds for such a step: steps of one program have one."""
        return self._base(Size(n_decode, n_prefill, n_context, width, n_draft))[0]

    def observe(
        self,
        n_decode: int,
        n_prefill: int,
        n_context: int,
        seconds: float,
        width: int = 1,
        n_draft: int = 0,
    ) -> None:
        """A step of this size took ``seconds``; nothing is learned from a time of 0."""
        if seconds <= 0 or not (n_decode or n_prefill):
            return
        cell, base = self._base(Size(n_decode, n_prefill, n_context, width, n_draft))
        ratio = seconds / base
        own, n = self._own.get(cell, (1.0, 0))
        gain = own * self._shared
        step = _moved(gain, ratio, n + (WEIGHT if self._table else 0)) / gain
        shared = step ** self._share(n)
        self._shared *= shared
        self._own[cell] = (own * step / shared, n + 1)
        self._n_seen += 1

    def _share(self, n: int) -> float:
        """The share of a program's error, after ``n`` steps of its own, that is the machine's."""
        if self._n_seen < (SETTLED if self._table else 1):
            return 1.0  # the table was measured at once, so its ratios are right
        return 0.5 if n >= SETTLED else 0.0

    def _base(self, size: Size) -> tuple[Size, float]:
        """(the cell whose correction holds, uncorrected seconds)."""
        if not self._table:
            cell = Size(*(n.bit_length() for n in size))
            return cell, _STEP_S + _TOKEN_S * size.n_tokens
        size_up = Size(*(_up(axis, n) for axis, n in zip(self._axes, size, strict=True)))
        base, cell = self._covers[size_up]
        over = size.n_tokens / max(1, cell.n_tokens)
        if size.n_draft and not cell.n_draft:  # none that drafts was measured: its own correction
            cell = cell._replace(n_draft=size.n_draft)
        return cell, base * max(1.0, over)


def _covers(table: dict[Size, float], axes: Sequence[list[int]]) -> dict[Size, tuple[float, Size]]:
    """For every crossing of the axes: (seconds, entry) of the cheapest entry that is nowhere below it,
    else of the largest there is. Entries that draft replace only one another."""
    if not table:
        return {}
    largest = max(table, key=lambda e: (e.n_tokens, e.n_context))
    following = [dict(itertools.pairwise(axis)) for axis in axes]
    found: dict[Size, tuple[float, Size] | None] = {}
    for values in itertools.product(*(list(reversed(axis)) for axis in axes)):
        size = Size(*values)
        beyond = [
            found.get(Size(*(*size[:i], following[i].get(n, -1), *size[i + 1 :])))
            for i, n in enumerate(size)
            if i < 4 or n
        ]
        own = (table[size], size) if size in table else None
        found[size] = min([one for one in (own, *beyond) if one is not None], default=None)
    return {size: one or (table[largest], largest) for size, one in found.items()}


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
