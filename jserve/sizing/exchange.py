"""The ways in which the devices of a layout may exchange, and which of them can be the cheapest at some step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from jserve.sharding import LOGITS, RESIDUAL, SUMS
from jserve.sim.roofline import Roofline

Exchange = dict[str, str]
"""``sums``, ``logits`` and ``residual`` of a sharding."""
WHOLE: Exchange = {"sums": SUMS[0], "logits": LOGITS[0], "residual": RESIDUAL[0]}


def exchanges(n_devices: int, itemsize: int) -> Iterator[Exchange]:
    """Those that differ, of an engine over so many devices whose weights take ``itemsize`` bytes a number."""
    if n_devices == 1:
        yield WHOLE
        return
    for sums, logits, residual in itertools.product(SUMS, LOGITS, RESIDUAL):
        if sums == SUMS[0] or itemsize < 4:
            yield {"sums": sums, "logits": logits, "residual": residual}


@dataclass(frozen=True, slots=True)
class Cheapest:
    """``ports.StepCosts``: of each step those of the cheapest of ``lines``; none: no engine starts."""

    lines: tuple[Roofline, ...]
    _apart: tuple[list[tuple[float, ...]], ...] = field(init=False, compare=False, repr=False)
    """Of steps that decode alone, and of others, ``Roofline.exchange_rates`` of each line."""

    def __post_init__(self) -> None:
        apart = tuple([line.exchange_rates(p) for line in self.lines] for p in (False, True))
        object.__setattr__(self, "_apart", apart)

    def seconds(self, n_decode: int, n_prefill: int, n_context: int) -> float:
        if not self.lines:
            return math.inf
        least = self.lines[0].seconds(n_decode, n_prefill, n_context)
        if len(self.lines) == 1:
            return least
        tokens, drawn = n_decode + n_prefill, n_decode + (n_prefill > 0)
        apart = [a + b * tokens + c * drawn for a, b, c in self._apart[n_prefill > 0]]
        return least - apart[0] + min(apart)


def lines_of(line: Roofline, itemsize: int, ways: Sequence[Exchange]) -> tuple[Roofline, ...]:
    """``line`` for each of ``ways``; ``itemsize`` is that of weights that are not quantised."""
    # Quantised products round what they read by themselves.
    read = itemsize if line.itemsize == itemsize else 4
    return tuple(
        replace(
            line,
            sum_itemsize=itemsize if way["sums"] == "weights" else 4,
            splits_logits=way["logits"] == "split",
            splits_residual=way["residual"] == "split",
            read_itemsize=read,
        )
        for way in ways
    )


def no_dearer(lines: Sequence[Roofline], rows: int, tokens: int) -> list[int | None]:
    """Of each line the number of another one that exchanges in no more time at any step of so many rows and tokens at
    most; of those that are alike the first has none."""
    # Seconds are linear in (tokens, drawn), so what holds at the corners holds at all steps.
    corners = [(1, 1, False), (rows, rows, False)]
    corners += [(n, drawn, True) for drawn in (1, rows) for n in (drawn, tokens)]
    costs = [[line.exchange_s(*corner) for corner in corners] for line in lines]

    def beats(i: int, j: int) -> bool:
        return all(map(float.__le__, costs[i], costs[j])) and (costs[i] != costs[j] or i < j)

    numbers = range(len(lines))
    return [next((i for i in numbers if beats(i, j)), None) for j in numbers]
