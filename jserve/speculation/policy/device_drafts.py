"""When the device drafts, and how much: the policy of drafters that run inside the step.

Owns one choice per step: how many drafts it leaves for the next, 0 being a program without the drafter. Must
not know pages, budgets or how drafts are made. All times are those of whole programs (``timing.step_costs``): a
step of width W verifies W - 1 drafts and leaves as many, at one measured price.

::

    rate(W) = sum over rows of (1 + drafts expected to stand of W - 1) / (seconds(W) + the host's gap)

Rows are those that decode and those about to. Three things make waking differ from staying awake:

* *price*: programs that draft beside a prompt, what was missed while it slept (``draft_kv_backfill``), and a first
  step that has nothing to verify. Waking pays where the rows save more than that in the time they have left, or
  in as many steps as it was awake of late, less what the prompts cost that come meanwhile. Staying awake beside
  a prompt pays where that is less than what the rows save until one of them ends, or than waking again.
* *looks*: while it sleeps nothing is learned. A purse saves half a percent of that time; when it holds the price of
  waking and of a few steps, they are spent. What is left over is spent on staying awake a little too long,
  so that one unlucky round does not send it to sleep.
* *the first choice* of a request rests on what stood for others of its lane; that of an engine on a guess, so
  its first ``FIRST_STEPS`` are not asked what they cost to begin.

A drafter with a *shadow* (``policy.controller``) needs no looks: what it would have brought is seen all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

from jserve.config import SpeculativeOptions
from jserve.ports import RunnerLimits
from jserve.speculation.policy.draft_kv_backfill import DraftKVBackfill
from jserve.speculation.policy.row_drafts import NOTHING, AcceptanceStats, Gains, StepLoad, may_hold
from jserve.speculation.policy.width import ProbeBudget, best_width, gain, widths
from jserve.timing.host_gaps import HostGaps
from jserve.timing.step_costs import MeasuredCosts
from jserve.types import Sequence

PROBE_SHARE = 0.005
"""Of the time asleep, what may be lost by drafting although it seems not to pay."""
PROBE_STEPS = 2
FIRST_STEPS = 8
LATELY = 0.3
"""Weight of the last of its kind, in what prompts cost beside drafts and in how long it stays awake."""
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
    load: StepLoad
    missing: int
    held: bool
    """Some row has drafts to verify."""


class DeviceDraftPolicy:
    """The choice for one drafter; see above."""

    def __init__(
        self,
        limits: RunnerLimits,
        costs: MeasuredCosts,
        options: SpeculativeOptions,
        acceptance: AcceptanceStats,
        gaps: HostGaps,
        backfill: DraftKVBackfill,
        expects: Expects,
        *,
        shadowed: bool = False,
    ) -> None:
        self.limits, self.costs, self.acceptance, self.gaps = limits, costs, acceptance, gaps
        self.backfill, self.expects, self.shadowed = backfill, expects, shadowed
        self.min_speed = options.min_speed
        self.most = min(limits.max_drafts, limits.device_drafts)
        # Of a tree all is verified or nothing.
        self.widths = (1, 1 + self.most) if limits.draft_depths else widths(self.most)
        self.most_rows = limits.draft_rows or limits.max_decode_rows
        self.probe_budget = ProbeBudget(PROBE_SHARE)
        self.active = False
        self.fixed: int | None = None
        """What a benchmark wants instead of the choice."""
        self._beside = 0.0
        """Seconds that a prompt takes longer beside drafts."""
        self._steps, self._all_steps = 0, 0
        """Awake: since it woke, and in all."""
        self._spell = 0.0
        """Of late, steps until it did not pay any more; 0: it always did."""
        self._rows: list[Sequence] = []
        """Of the step before."""
        self._rested = 0

    def choose(self, ready: Seq[Sequence], load: StepLoad) -> int:
        """Drafts that the step leaves; 0: the drafter sleeps."""
        rows = [*ready, *load.entering]
        width = 1
        if 0 < len(rows) <= self.most_rows and self.most:
            if self.fixed is not None:
                width = 1 + self.fixed
            elif not self._rests(rows):
                width = self._width(self._outlook(ready, rows, load))
        self._wakes(width > 1, rows)
        return self.narrowed(width - 1, ready, load) if self.active else 0

    def _wakes(self, active: bool, rows: list[Sequence]) -> None:
        if self.active and not active and rows:
            self._spell = _lately(self._spell, self._steps)
        self._steps = self._steps + 1 if active else 0
        self._all_steps += active
        self.active = active

    def _rests(self, rows: list[Sequence]) -> bool:
        """True while it sleeps and nothing is new."""
        if self.shadowed:
            return False
        same, self._rows = rows == self._rows, rows
        self._rested = self._rested + 1 if same and not self.active else 0
        return self._rested % REST > 0

    def narrowed(self, n: int, ready: Seq[Sequence], load: StepLoad) -> int:
        """As many of ``n`` drafts as there are programs for beside this step's prompts."""
        widest = self.limits.prefill_width
        beside = load.entering or any([self.backfill.due(seq) is not None for seq in ready])
        return min(n, widest - 1) if beside and widest else n

    def _outlook(self, ready: Seq[Sequence], rows: Seq[Sequence], load: StepLoad) -> _Outlook:
        return _Outlook(
            rows=rows,
            gains=[self._gains(seq) for seq in rows],
            n_decode=len(ready),
            load=load,
            missing=sum([self.backfill.missing(seq) for seq in ready]),
            held=any([self.acceptance.of(seq).left for seq in ready]),
        )

    def _width(self, look: _Outlook) -> int:
        def seconds(width: int) -> float:
            return self._seconds(look, width)

        width = best_width(look.gains, self._options(look), seconds, seconds(1), self.min_speed)
        if look.load.n_prefill:
            dearer = self._dearer(look, max(width, self.widths[1]))
            self._beside = _lately(self._beside, dearer)
        if width > 1:
            price = self._price(look, width)
            new = self._all_steps < FIRST_STEPS and not self.shadowed
            return width if not price or new or price < self._worth(look, width) else 1
        if self.shadowed or max([len(gains) for gains in look.gains]) == 1:
            return 1
        return self._look(look, self.widths[1])

    def _options(self, look: _Outlook) -> tuple[int, ...]:
        """Widths to choose from: the narrowest while nothing is known but what stood for others."""
        new = not any([self.acceptance.of(seq).rates.drafts.tried for seq in look.rows])
        return self.widths[:2] if new else self.widths

    def _look(self, look: _Outlook, width: int) -> int:
        """``width`` although it seems not to pay, where the purse allows it."""
        least = min([gain(gains, width) for gains in look.gains])
        loss = max(0.0, self._seconds(look, width) - (1.0 + least) * self._seconds(look, 1))
        price = self._price(look, width)
        if self.active and self.probe_budget.spend(loss + price):
            return width
        if self.active or not self.probe_budget.holds(price + PROBE_STEPS * loss):
            return 1
        self.probe_budget.spend(price)
        return width

    def _price(self, look: _Outlook, width: int) -> float:
        """Seconds that it takes to go on beside prompts, and to begin where it sleeps."""
        n, load, price = look.n_decode, look.load, self._dearer(look, width)
        if look.missing and not self.active:
            price += self._catch_up(look, width, look.missing, load.n_prefill)
        if n and not look.held and not self.active:
            price += self._step(n, 0, load, width) - self._step(n, 0, load, 1)
        return max(0.0, price)

    def _dearer(self, look: _Outlook, width: int) -> float:
        """Seconds that this step's prompts take longer beside drafts."""
        n, load = look.n_decode, look.load
        if not load.n_prefill:
            return 0.0
        took = self._step(n, load.n_prefill, load, self._beside_prompts(width))
        return max(0.0, took - self._step(n, load.n_prefill, load, 1))

    def _beside_prompts(self, width: int) -> int:
        return min(width, self.limits.prefill_width or width)

    def _catch_up(self, look: _Outlook, width: int, missing: int, beside: int = 0) -> float:
        """Seconds that it takes to show ``missing`` tokens: as many as are cheap beside this step's prompts, the
        rest beside none."""
        price, width = 0.0, self._beside_prompts(width)

        def step(n_prefill: int) -> float:
            return self._step(look.n_decode, n_prefill, look.load, width)

        if beside:
            n_shown, price = self.backfill.portion(missing, beside, step)
            missing -= n_shown
        if missing > 0:
            n_shown, adds = self.backfill.portion(missing, 0, step)
            price += adds * -(-missing // n_shown)
        return price

    def _worth(self, look: _Outlook, width: int) -> float:
        """Seconds that may be paid to go on beside prompts, or to begin. N rows that draw m tokens each end
        every m / N."""
        per_step = 1.0 + sum([gain(gains, width) for gains in look.gains]) / len(look.rows)
        per_round = self._seconds(look, 1) - self._seconds(look, width) / per_step
        left = [max(1.0, self.expects(seq, 0.0)) for seq in look.rows]
        ends = sum([1.0 / (seq.n_output + m) for seq, m in zip(look.rows, left, strict=True)])
        rounds = min(*left, 1.0 / ends)
        if not self.limits.drafts_from_kv:
            if look.load.n_prefill:  # it can as well wake a step later, when the prompts are done
                rounds = min(rounds, per_step)
            return rounds * per_round
        n = len(left)
        lasts = sum(left) / n
        if self._spell:
            lasts = min(lasts, self._spell * per_step)
        saves = lasts * (per_round - ends * (1.0 - 1.0 / n) * self._beside)
        if not self.active:
            return saves
        again = self._catch_up(look, width, look.load.n_prefill)
        return max(rounds * per_round, min(saves, again))

    def _seconds(self, look: _Outlook, width: int) -> float:
        """A step of all rows once they decode, with the gap before it."""
        took = self._step(len(look.rows), 0, look.load, width)
        return took + self.gaps.seconds(look.load.behind)

    def _step(self, n_decode: int, n_prefill: int, load: StepLoad, width: int) -> float:
        return self.costs.seconds(n_decode, n_prefill, load.n_context, width, width - 1)

    def _gains(self, seq: Sequence) -> Gains:
        """Also of one that is about to end: it should not put the others to sleep for a step."""
        if not self.shadowed:
            return self._before_its_end(seq) if may_hold(seq) else NOTHING
        if not seq.request.speculative:
            return NOTHING
        offers = self.acceptance.of(seq).rates.offer(self.acceptance.rates)
        return [offers * gain for gain in self.acceptance.gains(seq, self.most)]

    def _before_its_end(self, seq: Sequence) -> Gains:
        """Its gains, where beyond the narrowest width only those tokens count that it is likely to live for: any token
        may be its last, so where answers are short wide steps draw much that nobody asked for."""
        gains = self.acceptance.gains(seq, self.most)
        sure = gain(gains, self.widths[1])
        per_step = 1.0 + gain(gains, 1 + self.acceptance.of(seq).left)
        left = max(1.0, self.expects(seq, (seq.pending + 1) * per_step))
        lives = 1.0 - 1.0 / left
        return [
            g if g <= sure else sure + left * (lives ** (1.0 + sure) - lives ** (1.0 + g))
            for g in gains
        ]


def _lately(mean: float, new: float) -> float:
    """A decayed mean; the first sets it."""
    return mean + LATELY * (new - mean) if mean else new
