"""Replays a journal and compares every decision with the recorded one, and on a device every token.

Recorded proposers and guides replace those that are no pure function of the inputs. On a device the plans run again, in
the order in which they ran, and recorded results go on: the first token that differs is named.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jserve.config import EngineConfig
from jserve.errors import JserveError
from jserve.ports import (
    Guide,
    Guides,
    InFlight,
    LiveWeights,
    Proposer,
    Runner,
    RunnerLimits,
    Verdict,
)
from jserve.sched.cache import handles as caching, tiers as tiering
from jserve.sched.record.journal import (
    Arrival,
    Cancelled,
    Committed,
    Created,
    Decision,
    Dropped,
    Event,
    Expired,
    Fetched,
    Guided,
    Operated,
    Planned,
    Recovered,
    Renewed,
    Reweighed,
    Started,
    Stored,
    read_events,
)
from jserve.sched.scheduler import Scheduler
from jserve.speculation.policy.controller import SpeculationController, StepLoad
from jserve.types import Output, Request, Sequence, StepPlan, StepResult


class Recomputing(Runner, LiveWeights, Protocol):
    """A runner that goes on after a failed step, and under other weights."""

    def reset(self) -> None: ...


class Diverged(JserveError):
    """A replay decided otherwise than the journal says; the message names the line."""

    code = "replay_diverged"


@dataclass(slots=True)
class LogprobBits:
    """A comparison of log-probabilities of drawn tokens, bit by bit."""

    n: int = 0
    n_other: int = 0
    first: str = ""
    """The place of the first that differs, and both values."""
    largest: float = 0.0
    """The largest difference."""

    def compare(self, where: str, recorded: np.ndarray, made: np.ndarray) -> None:
        """Take in float32[n] each."""
        self.n += len(recorded)
        other = np.flatnonzero(recorded.view(np.int32) != made.view(np.int32))
        if not len(other):
            return
        then, now = float(recorded[other[0]]), float(made[other[0]])
        self.first = self.first or f"{where}, token {other[0]}: {then!r} then, {now!r} now"
        self.n_other += len(other)
        self.largest = max(self.largest, float(np.max(np.abs(recorded - made))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A replay that agreed with its journal."""

    n_events: int
    n_steps: int
    outputs: list[Output]
    n_tokens: int = 0
    """Computed again on a device."""
    bits: LogprobBits
    """The comparison of their log-probabilities, of requests that asked for them."""
    until: str = ""
    """The reason that no more were; empty: nothing was left."""


def replay(
    path: str | Path,
    limits: RunnerLimits,
    config: EngineConfig,
    *,
    proposer: Proposer | None = None,
    anew: bool = False,
    runner: Recomputing | None = None,
    masks: Guides | None = None,
) -> Replayed:
    """Drive a fresh scheduler with the inputs in ``path``.

    Drafts are taken from the journal; or decided ``anew`` and compared, with a ``proposer`` as it was when the
    run started. A last line that was cut off (the process died) is left out.

    Args:
        runner: computes every step again, as far as it has the weights that the engine had.
        masks: what ``runner`` needs for structured output.

    Raises:
        Diverged: a plan, or a token that ``runner`` computed, differs from the recorded one.
    """
    guides = _RecordedGuides(Path(path), masks)
    device = _Device(runner)
    if anew:
        scheduler = Scheduler(limits, config, proposer=proposer, guides=guides)
    else:
        scheduler = Scheduler(limits, config, guides=guides, speculation=_RecordedDrafting)
    plans: dict[int, StepPlan] = {}
    outputs: list[Output] = []
    n_events = 0
    for event in read_events(Path(path)):
        n_events += 1
        if isinstance(event, Started):
            device.first_weights = event.weights
        if isinstance(event, Guided | Operated | Started):
            continue
        if isinstance(event, Planned):
            guides.decision = event.decision
            if isinstance(scheduler.speculation, _RecordedDrafting):
                scheduler.speculation.recorded = event
            plan = scheduler.plan(event.now)
            _compare(n_events, event.decision, Decision.of(plan))
            if plan is not None:
                plans[plan.id] = plan
                device.launch(plan)
        else:
            device.compare(n_events, event)
            outputs += _feed(scheduler, event, plans)
    return Replayed(
        n_events=n_events,
        n_steps=scheduler.n_steps,
        outputs=outputs,
        n_tokens=device.n_tokens,
        bits=device.bits,
        until=device.until,
    )


class _Device:
    """Runs the plans again.

    Args:
        runner: None: nothing runs.
    """

    def __init__(self, runner: Recomputing | None) -> None:
        self.n_tokens, self.until = 0, ""
        self.first_weights = ""
        """Their stamp."""
        self.bits = LogprobBits()
        self._runner = runner
        self._flights: dict[int, InFlight] = {}

    def launch(self, plan: StepPlan) -> None:
        if self._runner is not None and not self.until:
            self._flights[plan.id] = self._runner.launch(plan)

    def compare(self, line: int, event: Event) -> None:
        """Take in what happened behind the launches so far.

        Raises:
            Diverged: a token is not the recorded one.
        """
        if self._runner is None or self.until:
            return
        if isinstance(event, Committed):
            flight = self._flights.pop(event.step)
            self.n_tokens += _compare_tokens(
                line, flight.plan, event.result(), self._runner.collect(flight), self.bits
            )
        elif isinstance(event, Recovered):
            self._flights.clear()
            self._runner.reset()
        elif isinstance(event, Reweighed):
            if why := self._reweigh(self._runner, event):
                name = event.version or "without a name"
                self.until = f"line {line}: other weights, {name}: {why}"
        elif isinstance(event, Fetched) and any(found for _, found in event.answers):
            self.until = f"line {line}: pages were read from disk"

    def _reweigh(self, runner: Recomputing, event: Reweighed) -> str:
        """Take the weights of the event's directory; the reason where they are not those that the engine had."""
        if not event.directory:
            return "they came from no directory"
        if not Path(event.directory).exists():
            return f"{event.directory} is no longer there"
        runner.end_beside()
        try:
            stamp = runner.update_weights(
                event.directory, partial=False, donate=False, alias=False, beside=event.beside
            )
        except JserveError as error:
            return error.message
        is_same = stamp == (event.name or self.first_weights)
        return "" if is_same else f"{event.directory} has other files than then"


def _compare_tokens(
    line: int, plan: StepPlan, recorded: StepResult, made: StepResult, bits: LogprobBits
) -> int:
    """Tokens that are equal, which are all; their log-probabilities go to ``bits``."""
    n = 0
    for r, row in enumerate(plan.rows):
        if not row.emits:
            continue
        told, again = (one.tokens_RJ[r, : one.n_ok_R[r]].tolist() for one in (recorded, made))
        choice = row.choice
        where = (
            f"line {line}: step {plan.id}, request {choice.request.id!r}, choice {choice.index},"
            f" behind position {row.start}"
        )
        if told != again:
            raise Diverged(f"{where}: the journal has tokens {told}, the device {again}")
        if choice.request.params.shows_logprobs:
            bits.compare(where, *(one.logprob_RJ[r, : len(told)] for one in (recorded, made)))
        n += len(told)
    return n


class _RecordedDrafting(SpeculationController):
    """A policy that waits when the recorded one did, and drafts what that one drafted."""

    recorded: Planned
    """The decision to reproduce next."""

    def waits(self, ready: Seq[Sequence], load: StepLoad) -> bool:
        return self.recorded.waited

    def choose(self, ready: Seq[Sequence], load: StepLoad) -> list[Seq[int]]:
        decision = self.recorded.decision
        rows = decision.rows if decision is not None else ()
        self.n_draft = decision.n_draft if decision is not None else 0
        self.hysteresis.k = int(any(row.backfill for row in rows))
        said = {(row.request_id, row.index): row.drafts for row in rows if row.from_slot}
        return [said.get((seq.request.id, seq.index), ()) for seq in ready]


class _RecordedGuides:
    """Guides that return the recorded verdicts and hold back the same sequences.

    Args:
        masks: guides that know what a device needs beside that; None: no device asks.
    """

    def __init__(self, path: Path, masks: Guides | None = None) -> None:
        self._masks = masks
        self.decision: Decision | None = None
        """The recorded decision of the step being planned."""
        self.waited = False
        """True where planning waited for drafts."""
        self.said: dict[tuple[str, int], deque[Verdict]] = defaultdict(deque)
        for event in read_events(path):
            if isinstance(event, Guided):
                self.said[event.id, event.index].append(event.verdict())
        self._n_choices: dict[str, int] = {}

    def compile(self, request: Request) -> None:
        return None

    def guide(self, request: Request, most: int) -> _RecordedGuide | None:
        if not request.params.guided:
            return None
        choices = request.open_choices
        nth = self._n_choices.get(request.id, 0)
        self._n_choices[request.id] = (nth + 1) % len(choices)
        return _RecordedGuide(self, (request.id, choices[nth]), self._masking(request, most))

    def _masking(self, request: Request, most: int) -> Guide | None:
        if self._masks is None:
            return None
        try:
            compiled = self._masks.compile(request)
            if compiled is not None:
                compiled.result()
            return self._masks.guide(request, most)
        except JserveError:  # so it was then, and the record says what came of it
            return None

    def start_masks(self) -> None:
        if self._masks is not None:
            self._masks.start_masks()

    def wait_masks(self, timeout_s: float | None) -> None:
        """All of them: which sequences had to wait is recorded."""
        if self._masks is not None:
            self._masks.wait_masks(None)


class _RecordedGuide:
    """``ports.Guide`` of one recorded sequence."""

    def __init__(
        self, guides: _RecordedGuides, key: tuple[str, int], masking: Guide | None
    ) -> None:
        self._guides, self._key, self._masking = guides, key, masking

    @property
    def forced(self) -> tuple[int, ...]:
        return ()

    @property
    def fault(self) -> Verdict | None:
        said = self._guides.said[self._key]
        return said[0] if said and said[0].error is not None else None

    def room(self, in_flight: int) -> int:
        rows = self._guides.decision.rows if self._guides.decision is not None else ()
        return 2**30 if any((row.request_id, row.index) == self._key for row in rows) else 0

    def trim(self, drafts: Seq[int]) -> Seq[int]:
        return drafts

    def mask(self, drafts: Seq[int]) -> Any:
        return None if self._masking is None else self._masking.mask(drafts)

    def redraw(self, drafts: Seq[int]) -> Seq[int]:
        return () if self._masking is None else self._masking.redraw(drafts)

    def take(self, drawn: Seq[int]) -> Verdict:
        if self._masking is not None:
            self._masking.take(drawn)
        return self._said()

    def resume(self, said: Seq[int]) -> Verdict:
        if self._masking is not None:
            self._masking.resume(said)
        return self._said()

    def _said(self) -> Verdict:
        said = self._guides.said[self._key]
        return said.popleft() if said else Verdict()


def _feed(scheduler: Scheduler, event: Event, plans: dict[int, StepPlan]) -> list[Output]:
    if isinstance(event, Committed):
        return scheduler.commit(plans.pop(event.step), event.result(), event.now)
    if isinstance(event, Cancelled):
        return scheduler.cancel(event.id, event.now, event.index)
    if isinstance(event, Expired):
        return scheduler.expire(event.now)
    if isinstance(event, Recovered):
        lost = [plans.pop(step) for step in sorted(plans)]
        return scheduler.recover(lost, event.error, event.now)
    if isinstance(event, Reweighed):
        scheduler.reweigh(
            event.version, event.now, name=event.name, keep=event.keep, beside=event.beside
        )
        return []
    with contextlib.suppress(JserveError):  # it was refused then too, which changed nothing
        _ask(scheduler, event)
    return []


def _ask(scheduler: Scheduler, event: Event) -> None:
    """An input that may be refused."""
    match event:
        case Arrival():
            scheduler.submit(event.request, event.now)
        case Created():
            caching.create(scheduler, event.request, event.ttl_s, event.now)
        case Renewed():
            caching.renew(scheduler, event.tenant, event.name, event.ttl_s, event.now)
        case Stored():
            tiering.learn(scheduler, event.digests, event.now)
        case Fetched():
            tiering.fetched(scheduler, event.answers, event.now)
        case Dropped():
            caching.drop(scheduler, event.tenant, event.name, event.now)
        case _:
            raise AssertionError(f"{event} is no request")


def _compare(line: int, recorded: Decision | None, made: Decision | None) -> None:
    if recorded != made:
        raise Diverged(f"line {line}: the journal has {recorded}, the replay {made}")
