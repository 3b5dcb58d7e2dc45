"""A simulated device: steps take their predicted time, tokens come from the trace.

It is a ``ports.Runner``, so that the engine's own loop drives it::

    host     launch 1   launch 2              collect 1   launch 3
    device     [======== step 1 ========][======== step 2 ========][== step 3 ...
    clock    moves by host_s at a launch, to the step's end at its collect
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from jserve.ports import InFlight, RunnerLimits, StepCosts
from jserve.sim.pages import PageThread, SharedPages
from jserve.types import Choice, PageFetch, PromptLogprobs, RowPlan, StepPlan, StepResult

Answers = Callable[[Choice], list[int]]
"""The tokens that a choice will draw; the end token is repeated behind them."""


class SimClock:
    """``ports.Clock`` that changes only when it is moved."""

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class _Step(NamedTuple):
    end: float
    result: StepResult


class _Blank(NamedTuple):
    """Read-only columns shared by all results of one number of rows."""

    ok_R: np.ndarray
    finite_R: np.ndarray
    logprob_R1: np.ndarray


class SimRunner:
    """``ports.Runner`` whose steps last ``costs`` and draw what ``answers`` says.

    Args:
        limits: what the scheduler plans inside.
        costs: seconds of a step on the device.
        clock: moved by launches (``host_s`` each) and collects.
        move_s: seconds of one page's way between device and host memory, before the rows of its step.
        answers: asked when a residence of a sequence begins to draw.
        jitter: sigma of a log-normal factor on each step's time; 0 is none.
        seed: of the jitter.
        claims: step id to microseconds that its result claims instead, for replays.
        shared: pages that other engines read and write too; without them it is no ``ports.DiskTier`` that is in use.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        costs: StepCosts,
        clock: SimClock,
        answers: Answers,
        *,
        host_s: float = 0.0,
        move_s: float = 0.0,
        jitter: float = 0.0,
        seed: int = 0,
        claims: Mapping[int, float] | None = None,
        shared: SharedPages | None = None,
    ) -> None:
        self.costs, self.clock, self.answers, self.claims = costs, clock, answers, claims
        self.host_s, self.move_s, self.jitter = host_s, move_s, jitter
        self.busy_s = 0.0
        """Seconds in which the device had a step."""
        self.n_tokens = self.n_moves = 0
        self._limits = limits
        self._free_at = 0.0
        self._rng = np.random.default_rng(seed)
        self._answers_C: list[list[int]] = [[]] * limits.n_slots
        self._blanks: dict[int, _Blank] = {}
        self._pages = None if shared is None else PageThread(shared, clock)

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    def launch(self, plan: StepPlan) -> InFlight:
        clock, rows = self.clock, plan.rows
        clock.now += self.host_s
        ends = [row.start + row.count for row in rows]
        n_decode = _count_decode(rows)
        prefill = rows[n_decode:]
        n_prefill = sum([row.count for row in prefill])
        seconds = self.costs.seconds(n_decode, n_prefill, sum(ends) // len(ends))
        if self.jitter:
            seconds *= float(self._rng.lognormal(0.0, self.jitter))
        seconds += len(plan.moves) * self.move_s
        self.n_moves += len(plan.moves)
        end = max(clock.now, self._free_at) + seconds
        self._free_at = end
        self.busy_s += seconds
        if self._pages is not None:
            self._pages.write([move.digest for move in plan.moves if move.digest], end)
        self.n_tokens += n_decode + n_prefill
        claimed = seconds * 1e6 if self.claims is None else self.claims.get(plan.id, 0.0)
        drawn = self._drawn(rows[:n_decode], ends) + [self._begun(row) for row in prefill]
        step = _Step(end, self._result(drawn, n_decode, prefill, claimed))
        return InFlight(plan=plan, launched=clock.now, handle=step)

    def collect(self, flight: InFlight) -> StepResult:
        step: _Step = flight.handle
        self.clock.now = max(self.clock.now, step.end)
        return step.result

    def stored(self) -> list[bytes] | None:
        """None: it shares no pages."""
        return None if self._pages is None else []

    def fetch(self, asked: list[PageFetch]) -> None:
        assert self._pages is not None
        self._pages.fetch(asked)

    def take_fetched(self) -> list[tuple[int, bool]]:
        assert self._pages is not None
        return self._pages.take_fetched()

    def export(self, pages: list[tuple[int, bytes]]) -> int:
        assert self._pages is not None
        return self._pages.export([digest for _, digest in pages])

    def exported(self) -> int:
        assert self._pages is not None
        return self._pages.exported()

    def page_s(self) -> float:
        return 0.0 if self._pages is None else self._pages.page_s

    def flush(self, pages: list[tuple[int, bytes]]) -> None:
        """Nothing outlives a simulation."""

    def lose(self, at: float) -> None:
        """Its process ended at ``at``, or stands still from then on: pages that are not written by then never are."""
        if self._pages is not None:
            self._pages.lose(at)

    def counters(self) -> dict[str, float]:
        """For ``Engine.stats``."""
        return {"device_busy_seconds_total": self.busy_s}

    def _drawn(self, decode: tuple[RowPlan, ...], ends: list[int]) -> list[int]:
        """The draws of rows that follow their own last token: the answer's next one."""
        answers = self._answers_C
        return [
            answers[row.slot][end - row.choice.n_prompt]
            for row, end in zip(decode, ends, strict=False)
        ]

    def _begun(self, row: RowPlan) -> int:
        """The draw of a prefill row, if it has one. Every residence of a slot begins with one."""
        at = row.start + row.count - row.choice.n_prompt
        if not row.emits:
            return 0
        answer = self._answers_C[row.slot] = self.answers(row.choice)
        return answer[at]

    def _result(
        self, drawn: list[int], n_decode: int, prefill: tuple[RowPlan, ...], device_us: float
    ) -> StepResult:
        blank = self._blanks.get(len(drawn)) or self._blank(len(drawn))
        ok_R = blank.ok_R
        if not all([row.emits for row in prefill]):
            ok_R = ok_R.copy()
            ok_R[n_decode:] = [row.emits for row in prefill]
        return StepResult(
            tokens_RJ=np.array(drawn, np.int32).reshape(-1, 1),
            n_ok_R=ok_R,
            finite_R=blank.finite_R,
            logprob_RJ=blank.logprob_R1,
            prompt={n_decode + i: _scores(row) for i, row in enumerate(prefill) if row.targets},
            device_us=device_us,
        )

    def _blank(self, n: int) -> _Blank:
        blank = _Blank(np.ones(n, np.int32), np.ones(n, bool), np.zeros((n, 1), np.float32))
        for column in blank:
            column.flags.writeable = False
        self._blanks[n] = blank
        return blank


def _count_decode(rows: tuple[RowPlan, ...]) -> int:
    """Decode rows come first, and the others are few."""
    n = len(rows)
    while n and not rows[n - 1].from_slot:
        n -= 1
    return n


def _scores(row: RowPlan) -> PromptLogprobs:
    """Log-probabilities of the row's prompt tokens: zeros, since nobody reads them."""
    n = len(row.targets)
    zeros, none = np.zeros(n, np.float32), np.zeros((n, 0), np.int32)
    ranks = np.ones(n, np.int32)
    return PromptLogprobs(
        start=row.start, logprob_n=zeros, rank_n=ranks, top_ids_nL=none, top_logprobs_nL=none
    )
