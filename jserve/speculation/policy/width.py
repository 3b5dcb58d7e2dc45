"""How many drafts a step verifies: the width with the most expected tokens per second.

Owns the choice, as pure functions over expectations and predicted times. Must not know sequences, requests or
where either comes from. All rows of a step share one width W (its program's), so within W every row tries as
many of its drafts as fit: what a width costs is paid once::

    rate(W) = sum over rows of (1 + drafts expected to stand of W - 1)  /  seconds(W)

Nobody may pay for others: a width is passed over when some row would get fewer than ``min_speed`` of the tokens
per second that it gets without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

Gains = Seq[float]
"""Of one row: drafts expected to stand of 0, 1, 2 ... tried; as long as it has drafts, and one more."""


def widths(max_drafts: int) -> tuple[int, ...]:
    """Tokens per row for which there are programs: 1, all drafts, and of 4 and 8 those well below."""
    most = 1 + max_drafts
    return (*(w for w in (1, 4, 8) if w == 1 < most or 3 * w < 2 * most), most)


def gain(gains: Gains, width: int) -> float:
    """Drafts expected to stand in a row of ``width`` tokens."""
    return gains[min(width, len(gains)) - 1]


def rate(rows: Seq[Gains], width: int, seconds: float) -> float:
    """Expected tokens per second of a step."""
    return sum([1.0 + gain(gains, width) for gains in rows]) / seconds


def best_width(
    rows: Seq[Gains],
    options: Seq[int],
    seconds: Callable[[int], float],
    without: float,
    min_speed: float,
) -> int:
    """The width to run, 1 unless another is better.

    Args:
        rows: every row that decodes in the step; one that cannot draft has ``(0.0,)``.
        options: widths that there are programs for, ascending.
        seconds: predicted seconds of a step of that width.
        without: seconds of a step without drafts.
        min_speed: least share of its speed without drafts that each row keeps.
    """
    longest = max([len(gains) for gains in rows], default=1)
    if longest == 1:
        return 1
    best, most = 1, rate(rows, 1, without)
    for width in options:
        if width == 1:
            continue
        took = seconds(width)
        slowest = 1.0 + min([gain(gains, width) for gains in rows])
        fair = slowest * without >= min_speed * took
        if fair and rate(rows, width, took) > most:
            best, most = width, rate(rows, width, took)
        if width >= longest:
            break
    return best


class ProbeBudget:
    """Bounds what looking costs: a share of the time spent, saved up until a look is paid for.

    Without drafts nothing is learned of a drafter on the device. So now and then some are tried although
    that seems to lose; over any stretch of time such steps lose at most ``share`` of it.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._saved = 0.0

    def earn(self, seconds: float) -> None:
        """``seconds`` went by."""
        self._saved += self.share * seconds

    def holds(self, cost: float) -> bool:
        """True when ``cost`` seconds are saved up; what is beyond them is lost, so that nothing is
        saved for a long look."""
        if self._saved < cost:
            return False
        self._saved = cost
        return True

    def spend(self, cost: float) -> bool:
        """True, and paid, when ``cost`` seconds are saved up."""
        if self._saved < cost:
            return False
        self._saved -= cost
        return True
