"""Chooses the drafts of a step: a table k(rows, acceptance bin) from step times, with hysteresis and probes.

All rows of a step share one program,
so they share k. A cell holds the k with the most expected tokens per second::

    (1 + drafts expected to be accepted of k) / seconds(rows, k)        0 unless another is better

and no row may get fewer than ``min_speed`` of the tokens per second that it gets without drafts. Acceptance is
counted in tenths (*bins*), the number of rows in powers of two; cells are computed when first asked for, and anew
every REFRESH steps, since the machine's speed changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

from jserve.speculation.policy.acceptance import Odds

BINS = 10
REFRESH = 64
CHEAP = 1.03
"""A drafter whose steps take less than this factor longer always runs: its KV stays current, its acceptance known."""
MARGIN = 1.05
"""A k above 0 has to be better than none by this factor: what it takes to begin is in no cell."""
HOLD, FIRST_HOLD = 16, 4
"""Steps before drafting ends or begins again, and before the first ends, which is a guess."""
PROBE_EVERY, PROBE_AT_LAST = 200, 1000
"""Steps without drafts after which some are tried, to see what is accepted: beside the next prompt, which the
drafter then sees from its start; or, if none comes, after a backfill."""
PROBE_STEPS, PROBE_ROUNDS = 16, 2
"""A probe ends after so many steps, or when so many steps showed what was accepted."""


def widths(max_drafts: int) -> tuple[int, ...]:
    """Tokens per row for which there are programs: 1, all drafts, and of 4 and 8 those well below."""
    most = 1 + max_drafts
    return (*(w for w in (1, 4, 8) if w == 1 < most or 3 * w < 2 * most), most)


class KTable:
    """See above.

    Args:
        options: numbers of drafts that there are programs for, ascending, 0 first.
        depth: drafts -> most of them that can be accepted (of a tree, its depth).
        seconds: (rows, drafts, behind) -> predicted seconds of a step; ``behind``: the device waits for the host
            before it.
        min_speed: least share of its speed without drafts that each row keeps.
    """

    def __init__(
        self,
        options: Seq[int],
        depth: Callable[[int], int],
        seconds: Callable[[int, int, bool], float],
        min_speed: float,
    ) -> None:
        self.options, self.min_speed = options, min_speed
        self._depth, self._seconds = depth, seconds
        self._cells: dict[tuple[int, ...], int] = {}
        self._age = 0

    def step(self) -> None:
        """A step went by."""
        self._age = (self._age + 1) % REFRESH
        if not self._age:
            self._cells.clear()

    def k(self, odds: Seq[Odds], length: float, behind: tuple[bool, bool] = (False, False)) -> int:
        """Drafts of a step whose rows have these odds.

        Args:
            length: mean tokens of an answer.
            behind: whether the device waits for the host without drafts, and with them.
        """
        n, offers = len(odds), sum([o.offers for o in odds])
        if not offers:
            return 0
        mean = Odds(sum([o.accepts * o.offers for o in odds]) / offers, offers / n)
        least = min(odds, key=lambda o: o.accepts * o.offers)
        rung = 1 << (n - 1).bit_length()
        key = (rung, *_bin(mean), *_bin(least), int(length).bit_length(), *behind)
        if key not in self._cells:
            times = [self._seconds(rung, k, behind[k > 0]) for k in self.options]
            self._cells[key] = self._best(times, _middle(mean), _middle(least), max(1.0, length))
        return self._cells[key]

    def _best(self, times: Seq[float], mean: Odds, least: Odds, length: float) -> int:
        plain = times[0]
        best, most = 0, MARGIN / plain
        for k, took in zip(self.options[1:], times[1:], strict=True):
            n = self._depth(k)
            fair = (1.0 + least.expected(n)) * plain >= self.min_speed * took
            rate = _useful(mean.expected(n), length) / took
            if (fair and rate > most) or (not best and took < CHEAP * plain):
                best, most = k, rate
        return best


def _useful(accepted: float, length: float) -> float:
    """Tokens of a step that somebody asked for: the last step of an answer draws half of its drafts behind the
    end."""
    return (1.0 + accepted) / (1.0 + accepted / (2.0 * length))


def _bin(odds: Odds) -> tuple[int, int]:
    return tuple(min(BINS - 1, int(share * BINS)) for share in odds)  # type: ignore[return-value]


def _middle(odds: Odds) -> Odds:
    """The middle of the bin that ``odds`` are in; what never happens, or always does, as it is."""
    return Odds(
        *(x if x in (0.0, 1.0) else (b + 0.5) / BINS for b, x in zip(_bin(odds), odds, strict=True))
    )


class Hysteresis:
    """The k that is used: what the table wants, but that drafting begins or ends once in HOLD steps at most;
    and probes.

    Args:
        probe: drafts of a probe; 0: acceptance is known without any.
    """

    def __init__(self, probe: int) -> None:
        self.k, self.probe = 0, probe
        self.backfills = False
        """False for a probe of new sequences: the others get no drafts."""
        self._held, self._changed = HOLD, False
        self._off = self._probing = self._rounds = 0

    def step(self, wanted: int, *, new: bool = True) -> int:
        """Drafts of the next step, where the table wants ``wanted``. ``new``: a probe needs no backfill."""
        self._held += 1
        if wanted and self.k:
            self.k = wanted
        if wanted != self.k and self._held >= HOLD:
            self._held = 0 if self._changed else HOLD - FIRST_HOLD
            self.k, self._changed = wanted, True
        if self.k or not self.probe:
            self._off, self._probing, self.backfills = 0, 0, True
            return self.k
        self._off += 1
        if self._off >= (PROBE_EVERY if new else PROBE_AT_LAST):
            self._off, self._probing, self._rounds, self.backfills = 0, PROBE_STEPS, 0, not new
        self._probing = max(0, self._probing - 1) if self._rounds < PROBE_ROUNDS else 0
        return self.probe if self._probing else 0

    def end(self) -> None:
        """More rows run than drafts are made beside. What the drafter misses meanwhile is not backfilled
        unless drafting begins anew."""
        self.k = self._held = self._probing = 0
        self._changed = True

    def seen(self) -> None:
        """A step came back that shows what was accepted."""
        self._rounds += 1
