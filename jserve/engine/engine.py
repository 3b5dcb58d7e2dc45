"""The engine loop: reads requests, launches steps, commits results, emits outputs. One thread calls ``step``.

With overlap 1 the next step is planned and launched before the last one's result is awaited::

    step()    1st          2nd                             3rd
    host      plan launch  plan launch  collect 1  commit  plan launch  collect 2  commit
    device          [======== step 1 ========][======== step 2 ========][=== step 3 ...
    flights   [1]          [1 2]        [2]                [2 3]        [3]

Source of the loop: mini-sglang's overlapped scheduler, cut to what plan/commit and launch/collect
need.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from jserve.engine import operate
from jserve.engine.hold import Hold
from jserve.engine.kv_export import KVExports
from jserve.engine.pending_compile import PendingCompile
from jserve.engine.steplog import StepLog
from jserve.engine.wire import Cancel, Control, Create, HandleCommand, HandleReply, Stats, Submit
from jserve.errors import EngineDead, JserveError, RequestFailed, WeightsError, where
from jserve.ports import (
    Clock,
    DiskTier,
    InFlight,
    LiveWeights,
    PolledRunner,
    Profiler,
    Runner,
)
from jserve.sched.cache import handles as caching, tiers as tiering
from jserve.sched.scheduler import Scheduler
from jserve.types import FIRST_WEIGHTS, Finish, Output, Request, StepPlan, StepResult

log = logging.getLogger(__name__)

STATS_EVERY_S = 0.25
BLOCKED_WAIT_S, DISK_WAIT_S = 0.02, 0.001
"""Between two steps of a busy engine that has nothing to launch: usually, and while a page is read or written."""
COMPILE_WAIT_S = 0.005
"""Seconds that an idle engine waits for a grammar before it reads its inbox."""


class Engine:
    """A scheduler and a runner, stepped together.

    Args:
        scheduler: decides; its state changes only inside ``step``.
        runner: computes. One with a ``reset()`` method (a new state; raises where the device does not
            work) survives a step that raises.
        overlap: steps launched ahead of the one that is awaited (0, 1 or 2).
        clock: monotonic seconds.
        profiler: what records the device's work on command; None: nothing does.
        weights: a name of the weights it starts with that no others have; "" where there is none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        overlap: int = 1,
        clock: Clock = time.monotonic,
        profiler: Profiler | None = None,
        weights: str = "",
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.n_steps = 0
        self.n_read = 0
        """Requests that were taken from the inbox."""
        self.log = StepLog()
        self.describer: Callable[[Stats], Stats] | None = None
        """Adds to ``stats`` what those need who choose between several engines."""
        self.stats_every_s = STATS_EVERY_S
        """Between two statistics while there is work."""
        self.hold = Hold()
        self.version = FIRST_WEIGHTS
        """The name of the weights in use."""
        self.weights = self.first_weights = weights
        """Unlike versions, which an operator chooses, these names tell all weights apart."""
        self.beside = False
        """The runner has the weights of before, too, for sequences that end under them."""
        self.n_updates = 0
        """Counter: times that they were replaced."""
        self.update_s = 0.0
        """Counter: seconds that this took, in which no step was launched."""
        self.profiler = profiler
        self._overlap = overlap
        self._inbox: deque[Submit | Cancel | Create | HandleCommand | Control] = deque()
        self._answers: list[HandleReply] = []
        self._anteroom = PendingCompile(scheduler.guides)
        self._flights: deque[InFlight] = deque()
        self._landed: list[Output] = []
        self._live = runner if isinstance(runner, LiveWeights) else None
        stored = runner.stored() if isinstance(runner, DiskTier) else None
        self._disk = runner if isinstance(runner, DiskTier) and stored is not None else None
        self._exports = None if self._disk is None else KVExports(self._disk)
        if stored is not None:
            tiering.learn(scheduler, stored, clock())

    def submit(self, request: Request) -> None:
        """Hand in a request; read at the next step. A refusal comes back as an Output in error."""
        self._inbox.append(Submit(request=request))

    def check(self, request: Request) -> None:
        """Raises BadRequest for what ``submit`` would refuse at any time."""
        self.scheduler.check(request)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request (or its choice ``index``) at the next step. Unknown ids are ignored."""
        self._inbox.append(Cancel(request_id=request_id, index=index))

    def create(self, request: Request, ttl_s: float) -> None:
        """Compute the prompt of ``request`` and pin it as the handle ``request.cache``, from the next
        step on. It has outputs like any request."""
        self._inbox.append(Create(request=request, ttl_s=ttl_s))

    def ask(self, message: HandleCommand | Control) -> None:
        """Renew, drop or look at handles, or command; the next step's ``take_answers`` has the answer."""
        self._inbox.append(message)

    def take_answers(self) -> list[HandleReply]:
        """The answers to what was asked, each given once."""
        answers, self._answers = self._answers, []
        return answers

    @property
    def busy(self) -> bool:
        """True while a further step would do something."""
        ours = self._inbox or self._flights or self._landed
        over = self.beside and not len(self.scheduler.versions)
        if ours or over or self.hold.pending is not None or self._exports:
            return True
        return not self.hold.stopped and (bool(len(self._anteroom)) or self.scheduler.has_work)

    @property
    def blocked_wait_s(self) -> float:
        """Seconds after which ``step`` may do something, where it is busy and did nothing: short while a page is
        read or written that a request waits for."""
        waits = bool(self._exports) or self.scheduler.waits_for_disk
        return DISK_WAIT_S if waits else BLOCKED_WAIT_S

    @property
    def page_s(self) -> float:
        """Seconds that a page takes of late to be written for other engines, or read; 0 before the first."""
        return 0.0 if self._disk is None else self._disk.page_s()

    @property
    def n_waiting(self) -> int:
        """Sequences and messages that have not been admitted."""
        return self.scheduler.n_waiting + self.n_unread + self.n_compiling + len(self.hold)

    @property
    def n_compiling(self) -> int:
        """Requests whose grammar is being compiled."""
        return len(self._anteroom)

    @property
    def n_unread(self) -> int:
        """Messages that no step has read yet."""
        return len(self._inbox)

    @property
    def max_waiting(self) -> int:
        """Sequences that may wait before new ones are refused."""
        return self.scheduler.options.max_waiting

    @property
    def n_in_flight(self) -> int:
        """Steps launched and not yet committed."""
        return len(self._flights)

    def step(self, *, wait: bool = True) -> list[Output]:
        """Read the inbox, launch one step, collect the oldest when enough are in flight, commit it.

        Args:
            wait: for that step; False: only if it is done (a ``PolledRunner`` knows).

        Raises:
            EngineDead: a step raised, and the runner cannot be reset or did so three times a
            minute.
        """
        outputs = self._read_inbox()
        if self.beside:
            self._end_beside()
        if self._live is not None and (why := self._live.weights_fault()):
            outputs += self._without_weights(why)
        full = len(self._flights) > self._overlap
        plan = None if full or self.hold.stopped else self.scheduler.plan(self.clock())
        result = None
        try:
            if plan is not None:
                self._flights.append(self.runner.launch(plan))
            if self._disk is not None:
                self._disk.fetch(tiering.take_fetches(self.scheduler))
            due = self._flights and (plan is None or len(self._flights) > self._overlap)
            if due and (wait or self._is_done(self._flights[0])):
                result = self.runner.collect(self._flights[0])
        except Exception as error:
            return outputs + self._recover(error, plan)
        return outputs if result is None else outputs + self._commit(result)

    def _without_weights(self, why: str) -> list[Output]:
        """End all requests: there is nothing to draw their tokens from until other weights come."""
        self.abort_all()
        outputs, self._landed = self._landed, []
        return [
            msgspec.structs.replace(
                out,
                finish=Finish.ERROR,
                error=why,
                error_code=WeightsError.code,
                error_field="params",
            )
            if out.finish is Finish.ABORT
            else out
            for out in outputs
        ]

    def _end_beside(self) -> None:
        """Let go of the weights of before, once nobody needs them."""
        in_use = any(flight.plan.old_weights for flight in self._flights)
        if self._live is not None and not (in_use or len(self.scheduler.versions)):
            self._live.end_beside()
            self.beside = False

    def _is_done(self, flight: InFlight) -> bool:
        return not isinstance(self.runner, PolledRunner) or self.runner.is_done(flight)

    def _commit(self, result: StepResult) -> list[Output]:
        """Take over the result of the oldest step in flight."""
        plan, now = self._flights.popleft().plan, self.clock()
        outputs = self.scheduler.commit(plan, result, now)
        self.log.add(plan, result, now)
        self.n_steps += 1
        if self._exports is not None:
            outputs = self._exports.committed(tiering.take_exports(self.scheduler), outputs)
        return outputs

    @property
    def closed(self) -> bool:
        """Requests are kept until it goes on: it is paused or asleep."""
        return self.hold.closed

    def carry_out(self, command: Control) -> dict[str, Any] | None:
        """Carry out ``command`` at once, also with requests under way. None: it waits for them, and its answer comes by
        ``take_answers``, unless ``give_up_pending`` is called. Raises as ``operate.carry_out``."""
        return operate.carry_out(self, command)

    def give_up_pending(self) -> None:
        """The command that waits is not carried out."""
        self.hold.pending = None

    def drain(self) -> list[Output]:
        """Step until nothing is left."""
        outputs: list[Output] = []
        while self.busy:
            outputs += self.step()
        return outputs

    def swap(self, change: Callable[[], None]) -> None:
        """Change what the runner computes with between two steps.

        Steps in flight land first; their outputs come with the next ``step``. Then every running
        sequence is recomputed and no cached prefix survives.
        """
        self.land()
        change()
        self.scheduler.recover((), "", self.clock())

    def land(self) -> None:
        """Wait for all steps in flight; their outputs come with the next ``step``."""
        while self._flights:
            self._landed += self._commit(self.runner.collect(self._flights[0]))

    def abort_all(self) -> None:
        """End all requests that the scheduler has, with what they drew so far."""
        self.land()
        for request_id in list(self.scheduler.groups):
            self._landed += self.scheduler.cancel(request_id, self.clock())

    def stats(self) -> Stats:
        """Counters of the scheduler and the runner by their names, with what is in flight here and
        the steps since the last call."""
        values: dict[str, Any] = dataclasses.asdict(self.scheduler.stats())
        values |= values.pop("lanes", {})
        values |= {"weight_updates_total": self.n_updates, "paused": float(self.hold.closed)}
        values["weight_update_seconds_total"] = self.update_s
        for side in (self.scheduler, self.runner):
            counters = getattr(side, "counters", None)
            if counters is not None:
                values |= counters()
        made = Stats(
            step=self.n_steps,
            waiting=values.pop("waiting"),
            running=values.pop("running"),
            in_flight=len(self._flights),
            values=values,
            steps=self.log.take(),
        )
        return made if self.describer is None else self.describer(made)

    def close(self) -> None:
        """Write what is worth it to disk, and end who hears of pages. The engine is not stepped again."""
        listener = self.scheduler.resources.cache.listener
        if listener is not None:
            listener.close()
        if self._disk is not None:
            self._disk.flush(tiering.unstored_pages(self.scheduler))

    def _read_inbox(self) -> list[Output]:
        outputs, self._landed = self._landed, []
        if self._disk is not None:
            answers = self._disk.take_fetched()
            if answers:
                tiering.fetched(self.scheduler, answers, self.clock())
        if self._exports is not None:
            outputs += self._exports.written()
        self._settle()
        self._inbox.extendleft(reversed(self.hold.take()))
        while self._inbox:
            message = self._inbox.popleft()
            match message:
                case Cancel():
                    outputs += self._cancel(message)
                case HandleCommand():
                    self._answers.append(self._answer(message))
                case Control():
                    self._answers += self._run_command(message)
                    self._inbox.extendleft(reversed(self.hold.take()))
                case Create() | Submit() if self.hold.closed:
                    self.hold.put(message)
                case Create():
                    self.n_read += 1
                    outputs += self._create(message)
                case Submit():
                    self.n_read += 1
                    opened = self._anteroom.put(message.request, self.clock())
                    outputs += [] if opened is None else self._enter(*opened)
        outputs += self._landed
        self._landed = []
        idle = not self._flights and not self.scheduler.has_work
        wait_s = COMPILE_WAIT_S if idle else 0.0
        for request, error in self._anteroom.take(wait_s, self.clock()):
            outputs += self._enter(request, error)
        return outputs + self.scheduler.expire(self.clock())

    def _cancel(self, message: Cancel) -> list[Output]:
        now, (request_id, index) = self.clock(), (message.request_id, message.index)
        held = self.hold.cancel(request_id) if index is None else None
        if held is not None:
            return aborted(held.request)
        if self._exports is not None:
            self._exports.over([request_id])
        outputs = self._anteroom.cancel(request_id, index)
        return outputs + self.scheduler.cancel(request_id, now, index)

    def _create(self, message: Create) -> list[Output]:
        """Nothing, or the refusal of a cache handle."""
        try:
            caching.create(self.scheduler, message.request, message.ttl_s, self.clock())
        except JserveError as error:
            return refusal(message.request, error)
        return []

    def _answer(self, asked: HandleCommand) -> HandleReply:
        tenant, name, now = asked.tenant, asked.name, self.clock()
        try:
            if asked.action == "find":
                found = caching.find(self.scheduler, tenant, name, now)
            elif asked.action == "drop":
                found = [caching.drop(self.scheduler, tenant, name or "", now)]
            else:
                found = [caching.renew(self.scheduler, tenant, name or "", asked.ttl_s, now)]
        except JserveError as error:
            return failed_reply(asked.id, error)
        return HandleReply(id=asked.id, handles=found)

    def _run_command(self, command: Control) -> list[HandleReply]:
        """The answer, unless ``command`` waits."""
        try:
            info = operate.carry_out(self, command)
        except JserveError as error:
            return [failed_reply(command.id, error)]
        return [] if info is None else [HandleReply(id=command.id, info=info)]

    def _settle(self) -> None:
        """Answer the command that waited for running requests, if they have ended."""
        waited = self.hold.pending
        if waited is None:
            return
        try:
            done = operate.settle(self)
        except JserveError as error:
            self._answers.append(failed_reply(waited.id, error))
            return
        if done is not None:
            self._answers.append(HandleReply(id=waited.id, info=done[1]))

    def forget(self) -> None:
        """Drop every cached prefix; those who run are recomputed."""
        try:
            self.swap(lambda: None)
        except Exception as error:
            self._landed += self._recover(error, None)

    def _enter(self, request: Request, error: JserveError | None) -> list[Output]:
        """Hand a request to the scheduler, unless ``error`` or the scheduler refuses it."""
        try:
            if error is not None:
                raise error
            self.scheduler.submit(request, self.clock())
            if request.exports_kv and self._exports is not None:
                self._exports.add(request)
        except JserveError as refused:
            return refusal(request, refused)
        return []

    def _recover(self, error: Exception, plan: StepPlan | None) -> list[Output]:
        """Give up the steps in flight, rebuild the device state, and let the scheduler find out who
        was to blame."""
        log.error("step failed: %s", where(error))
        name = type(error).__name__
        lost = [flight.plan for flight in self._flights]
        if plan is not None and not any(plan is known for known in lost):
            lost.append(plan)  # its launch raised
        self._flights.clear()
        now = self.clock()
        outputs = self.scheduler.recover(lost, f"the step failed with {name}", now)
        if self._exports is not None:
            self._exports.over(out.request_id for out in outputs if out.finish is not None)
        reason = self.scheduler.device_fault(now)
        if reason is not None:
            raise EngineDead(f"a step failed with {name}, {reason}") from error
        self._reset(name)
        return outputs

    def _reset(self, name: str) -> None:
        reset = getattr(self.runner, "reset", None)
        if reset is None:
            raise EngineDead(f"a step failed with {name}")
        try:
            reset()
        except Exception as again:
            log.error("reset failed: %s", where(again))
            raise EngineDead(
                f"a step failed with {name}, and the reset after it with {type(again).__name__}"
            ) from again


def aborted(request: Request) -> list[Output]:
    """The terminal outputs of a request that was ended before the scheduler had it, one per choice."""
    return [
        Output(request_id=request.id, index=i, finish=Finish.ABORT, attempt=request.attempt)
        for i in request.open_choices
    ]


def failed_reply(asked: str, error: JserveError) -> HandleReply:
    """The answer to ``asked`` that says why not."""
    return HandleReply(
        id=asked, error=error.message, error_code=error.code, error_field=error.field
    )


def refusal(request: Request, error: JserveError) -> list[Output]:
    """The terminal outputs of a request that was not taken, one per choice."""
    return [
        Output(
            request_id=request.id,
            index=i,
            finish=Finish.ERROR,
            error=error.message,
            error_code=error.code or RequestFailed.code,
            error_field=error.field,
            retry_after=error.retry_after,
            attempt=request.attempt,
        )
        for i in request.open_choices
    ]
