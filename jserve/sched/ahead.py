"""When the device drafts, and how much: the policy of drafters that run inside the step.

Owns one choice per step: how many drafts it leaves for the next, 0 being a program without the drafter. Must
not know pages, budgets or how drafts are made. All times are those of whole programs (``sched.costs``): a
step of width W verifies W - 1 drafts and leaves as many, at one measured price.

::

    rate(W) = sum over rows of (1 + drafts expected to stand of W - 1) / (seconds(W) + the host's gap)

Rows are those that decode and those about to. Three things make waking differ from staying awake:

* *price*: programs that draft beside a prompt, what was missed while it slept (``sched.showing``), and a first
  step that has nothing to verify. It is paid only where the rows save more until one of them ends.
* *looks*: while it sleeps nothing is learned. A purse saves half a percent of that time; when it holds the price of
  waking and of a few steps, they are spent. What is left over is spent on staying awake a little too long,
  so that one unlucky round does not send it to sleep.
* *the first choice* of a request rests on what stood for others of its lane.

A drafter with a *shadow* (``sched.drafting``) needs no looks: what it would have brought is seen all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

from jserve.config import SpeculativeOptions
from jserve.ports import RunnerLimits
from jserve.sched.costs import MeasuredCosts
from jserve.sched.drafts import NOTHING, Gains, Load, Watches, may_hold
from jserve.sched.gaps import Gaps
from jserve.sched.showing import Showing
from jserve.spec.choice import Purse, best_width, gain, widths
from jserve.types import Sequence

LOOK_SHARE = 0.005
"""Of the time asleep, what may be lost by drafting although it seems not to pay."""
LOOK_STEPS = 2
REST = 8
"""Steps of the same rows after which a drafter that sleeps is thought of again."""
Expects = Callable[[Sequence, float], float]
"""Tokens that a sequence will still draw once it has drawn so many more."""


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What the next steps are about."""

    rows: Seq[Sequence]
    gains: list[Gains]
    n_decode: int
    """Rows that decode in this very step."""
    load: Load
    missing: int
    held: bool
    """Some row has drafts to verify."""


class Ahead:
    """The choice for one drafter; see above."""

    def __init__(
        self,
        limits: RunnerLimits,
        costs: MeasuredCosts,
        options: SpeculativeOptions,
        watches: Watches,
        gaps: Gaps,
        showing: Showing,
        expects: Expects,
        *,
        shadowed: bool = False,
    ) -> None:
        self.limits, self.costs, self.watches, self.gaps = limits, costs, watches, gaps
        self.showing, self.expects, self.shadowed = showing, expects, shadowed
        self.min_speed = options.min_speed
        self.most = min(limits.max_drafts, limits.device_drafts)
        # Of a tree all is verified or nothing.
        self.widths = (1, 1 + self.most) if limits.draft_depths else widths(self.most)
        self.most_rows = limits.draft_rows or limits.max_decode_rows
        self.purse = Purse(LOOK_SHARE)
        self.awake = False
        self.fixed: int | None = None
        """What a benchmark wants instead of the choice."""
        self._rows: list[Sequence] = []
        """Of the step before."""
        self._rested = 0

    def choose(self, ready: Seq[Sequence], load: Load) -> int:
        """Drafts that the step leaves; 0: the drafter sleeps."""
        rows = [*ready, *load.entering]
        width = 1
        if 0 < len(rows) <= self.most_rows and self.most:
            if self.fixed is not None:
                width = 1 + self.fixed
            elif not self._rests(rows):
                width = self._width(self._outlook(ready, rows, load))
        self.awake = width > 1
        return self.narrowed(width - 1, ready, load) if self.awake else 0

    def _rests(self, rows: list[Sequence]) -> bool:
        """True while it sleeps and nothing is new."""
        if self.shadowed:
            return False
        same, self._rows = rows == self._rows, rows
        self._rested = self._rested + 1 if same and not self.awake else 0
        return self._rested % REST > 0

    def narrowed(self, n: int, ready: Seq[Sequence], load: Load) -> int:
        """As many of ``n`` drafts as there are programs for beside this step's prompts."""
        widest = self.limits.prefill_width
        beside = load.entering or any([self.showing.due(seq) is not None for seq in ready])
        return min(n, widest - 1) if beside and widest else n

    def _outlook(self, ready: Seq[Sequence], rows: Seq[Sequence], load: Load) -> _Outlook:
        return _Outlook(
            rows=rows,
            gains=[self._gains(seq) for seq in rows],
            n_decode=len(ready),
            load=load,
            missing=sum([self.showing.missing(seq) for seq in ready]),
            held=any([self.watches.of(seq).left for seq in ready]),
        )

    def _width(self, look: _Outlook) -> int:
        def seconds(width: int) -> float:
            return self._seconds(look, width)

        width = best_width(look.gains, self._options(look), seconds, seconds(1), self.min_speed)
        if width > 1:
            price = self._price(look, width)
            return width if not price or price < self._saves(look, width) else 1
        if self.shadowed or max([len(gains) for gains in look.gains]) == 1:
            return 1
        return self._look(look, self.widths[1])

    def _options(self, look: _Outlook) -> tuple[int, ...]:
        """Widths to choose from: the narrowest while nothing is known but what stood for others."""
        new = not any([self.watches.of(seq).rates.drafts.tried for seq in look.rows])
        return self.widths[:2] if new else self.widths

    def _look(self, look: _Outlook, width: int) -> int:
        """``width`` although it seems not to pay, where the purse allows it."""
        least = min([gain(gains, width) for gains in look.gains])
        loss = max(0.0, self._seconds(look, width) - (1.0 + least) * self._seconds(look, 1))
        price = self._price(look, width)
        if self.awake and self.purse.spend(loss + price):
            return width
        if self.awake or not self.purse.holds(price + LOOK_STEPS * loss):
            return 1
        self.purse.spend(price)
        return width

    def _price(self, look: _Outlook, width: int) -> float:
        """Seconds that it takes to go on beside prompts, and to begin where it sleeps."""
        n, load, price = look.n_decode, look.load, 0.0
        beside = min(width, self.limits.prefill_width or width)
        if load.n_prefill:
            price += self._step(n, load.n_prefill, load, beside)
            price -= self._step(n, load.n_prefill, load, 1)
        if look.missing and not self.awake:
            n_shown, adds = self.showing.portion(
                look.missing, load.n_prefill, lambda p: self._step(n, p, load, beside)
            )
            price += adds * -(-look.missing // n_shown)
        if n and not look.held and not self.awake:
            price += self._step(n, 0, load, width) - self._step(n, 0, load, 1)
        return max(0.0, price)

    def _saves(self, look: _Outlook, width: int) -> float:
        """Seconds that the rows save by drafting until one of them ends: then the next prompt comes, and what
        is best for the others is another question. N rows that draw m tokens each end every m / N."""
        per_step = 1.0 + sum([gain(gains, width) for gains in look.gains]) / len(look.rows)
        left = [max(1.0, self.expects(seq, 0.0)) for seq in look.rows]
        whole = [seq.n_output + n for seq, n in zip(look.rows, left, strict=True)]
        soonest = min(*left, 1.0 / sum([1.0 / n for n in whole]))
        if look.load.n_prefill and not self.limits.drafts_from_kv:
            # It can as well wake a step later, when the prompts are done.
            soonest = min(soonest, per_step)
        return soonest * (self._seconds(look, 1) - self._seconds(look, width) / per_step)

    def _seconds(self, look: _Outlook, width: int) -> float:
        """A step of all rows once they decode, with the gap before it."""
        took = self._step(len(look.rows), 0, look.load, width)
        return took + self.gaps.seconds(look.load.behind)

    def _step(self, n_decode: int, n_prefill: int, load: Load, width: int) -> float:
        return self.costs.seconds(n_decode, n_prefill, load.n_context, width, width - 1)

    def _gains(self, seq: Sequence) -> Gains:
        """Also of one that is about to end: it should not put the others to sleep for a step."""
        if not self.shadowed:
            return self._before_its_end(seq) if may_hold(seq) else NOTHING
        if not seq.request.speculative:
            return NOTHING
        offers = self.watches.of(seq).rates.offer(self.watches.rates)
        return [offers * gain for gain in self.watches.gains(seq, self.most)]

    def _before_its_end(self, seq: Sequence) -> Gains:
        """Its gains, where beyond the narrowest width only those tokens count that it is likely to live for: any token
        may be its last, so where answers are short wide steps draw much that nobody asked for."""
        gains = self.watches.gains(seq, self.most)
        sure = gain(gains, self.widths[1])
        per_step = 1.0 + gain(gains, 1 + self.watches.of(seq).left)
        left = max(1.0, self.expects(seq, (seq.pending + 1) * per_step))
        lives = 1.0 - 1.0 / left
        return [
            g if g <= sure else sure + left * (lives ** (1.0 + sure) - lives ** (1.0 + g))
            for g in gains
        ]
