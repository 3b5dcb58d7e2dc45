"""A scheduler and a runner just large enough to drive the engine, with faults to order.

Token i of a sequence is a function of its prompt and i only (``expected``), so that any lost,
doubled or misdirected output shows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from jserve import testing
from jserve.config import EngineConfig
from jserve.engine.engine import Engine
from jserve.errors import BadRequest, ConfigError, Overloaded
from jserve.ports import InFlight, RunnerLimits
from jserve.sampling import SamplingParams
from jserve.sched.recovery.bisection import FaultBisection
from jserve.sched.scheduler import Scheduler
from jserve.sched.versions import WeightVersions
from jserve.types import Finish, Output, Request, RowPlan, SeqState, Sequence, StepPlan, StepResult

LIMITS = RunnerLimits(
    n_slots=256,
    max_rows=256,
    max_decode_rows=256,
    max_prefill_tokens=4096,
    max_prefill_rows=256,
    max_drafts=0,
    n_pages=4096,
    page_size=16,
    max_model_len=4096,
    vocab_size=1000,
)

HOST_CORE_LIMITS = dataclasses.replace(LIMITS, n_slots=32, max_rows=32, max_decode_rows=32)


def request(id: str, n_prompt: int = 4, max_tokens: int = 8, **params: Any) -> Request:
    return Request(
        id=id,
        prompt_ids=tuple(range(1, n_prompt + 1)),
        params=SamplingParams(max_tokens=max_tokens, **params),
    )


def expected(r: Request, index: int = 0) -> list[int]:
    assert r.params.max_tokens is not None
    return [token(r, index, i) for i in range(r.params.max_tokens)]


def token(r: Request, index: int, i: int) -> int:
    return (sum(r.prompt_ids) * 31 + index * 7 + i) % 1000


@dataclasses.dataclass(frozen=True)
class FakeStats:
    waiting: int
    running: int
    resets_total: int


class FakeScheduler:
    """One row per live sequence and step, its first a prefill row; refuses ids "full..."."""

    def __init__(self) -> None:
        self.guides = None
        self.seqs: dict[tuple[str, int], Sequence] = {}
        self.planned: list[int] = []
        self.committed: list[int] = []
        self.lost: list[int] = []
        self.cancelled: list[tuple[str, int | None]] = []
        self.n_resets = 0
        self.live: dict[str, list[Sequence]] = {}
        self.in_flight: dict[int, list[Sequence]] = {}
        self.versions = WeightVersions()
        self.resources = SimpleNamespace(cache=SimpleNamespace(listener=None))
        self.bisection = FaultBisection(self.live)
        self.device_fault = self.bisection.device_fault

    def submit(self, request: Request, now: float) -> None:
        if len(request.prompt_ids) > LIMITS.max_model_len:
            raise BadRequest("prompt is too long", field="prompt")
        if request.id.startswith("full"):
            raise Overloaded("the queue is full", retry_after=2.0)
        for i in request.open_choices:
            said = (request.said[i] or ()) if request.said else ()
            seq = Sequence(
                request=request,
                index=i,
                seed=0,
                tokens=[*request.prompt_ids, *said],
                n_prompt=len(request.prompt_ids),
                max_len=len(request.prompt_ids) + (request.params.max_tokens or 0),
            )
            self.seqs[request.id, i] = seq
            self.live.setdefault(request.id, []).append(seq)

    def cancel(self, request_id: str, now: float, index: int | None = None) -> list[Output]:
        self.cancelled.append((request_id, index))
        keys = [k for k in self.seqs if k[0] == request_id and index in (None, k[1])]
        for key in keys:
            self.seqs.pop(key).finish = Finish.ABORT
        return [Output(request_id=i, index=n, finish=Finish.ABORT) for i, n in keys]

    def expire(self, now: float) -> list[Output]:
        return []

    def plan(self, now: float) -> StepPlan | None:
        self.bisection.clear_passed(now)
        live = [
            s
            for s in self.seqs.values()
            if s.n_output + s.in_flight < s.max_len - s.n_prompt
            and (s.state is SeqState.RUNNING or not self.bisection.holds(s))
        ]
        rows = [
            RowPlan(
                choice=s.choice,
                slot=0,
                start=s.n_output + s.in_flight,
                count=1,
                from_slot=s.state is SeqState.RUNNING,
            )
            for s in live
        ]
        if not rows:
            return None
        for seq in live:
            seq.in_flight += 1
            seq.state = SeqState.RUNNING
        plan = StepPlan(
            id=len(self.planned),
            rows=tuple(rows),
            page_table_RM=np.zeros((len(rows), 1), np.int32),
        )
        self.planned.append(plan.id)
        self.in_flight[plan.id] = live
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Output]:
        self.committed.append(plan.id)
        self.bisection.succeeded()
        outputs = []
        for r, seq in enumerate(self.in_flight.pop(plan.id)):
            seq.in_flight -= 1
            if seq.finish is not None:
                continue
            drawn = int(result.tokens_RJ[r, 0])
            seq.tokens.append(drawn)
            if len(seq.tokens) == seq.max_len:
                seq.finish = Finish.LENGTH
                del self.seqs[seq.request.id, seq.index]
            outputs.append(
                Output(
                    request_id=seq.request.id,
                    index=seq.index,
                    token_ids=(drawn,),
                    finish=seq.finish,
                    attempt=seq.request.attempt,
                )
            )
        return outputs

    def recover(self, plans, error: str, now: float) -> list[Output]:
        self.lost += [plan.id for plan in plans]
        self.n_resets += 1
        lost = [seq for plan in plans for seq in self.in_flight.pop(plan.id)]
        blame = self.bisection.step_failed(lost, now) or ""
        for seq in self.seqs.values():
            seq.in_flight = 0
            seq.state = SeqState.WAITING
        keys = [key for key in self.seqs if key[0] == blame]
        for key in keys:
            self.seqs.pop(key).finish = Finish.ERROR
        return [Output(request_id=i, index=n, finish=Finish.ERROR, error=error) for i, n in keys]

    waits_for_disk = False

    @property
    def has_work(self) -> bool:
        return bool(self.seqs)

    def stats(self) -> FakeStats:
        return FakeStats(waiting=0, running=len(self.seqs), resets_total=self.n_resets)


class FakeRunner:
    """Draws ``token`` after ``step_s`` seconds, a row's ``start`` saying which; ``before(call, plan id)``
    may raise."""

    limits = LIMITS

    def __init__(self, *, step_s: float = 0.0, before: Callable[[str, int], None] | None = None):
        self.step_s = step_s
        self.before = before or (lambda what, n: None)
        self.log: list[tuple[str, int]] = []

    def launch(self, plan: StepPlan) -> InFlight:
        self._note("launch", plan)
        drawn = [[token(row.choice.request, row.choice.index, row.start)] for row in plan.rows]
        return InFlight(plan=plan, launched=0.0, handle=np.array(drawn, np.int32))

    def collect(self, flight: InFlight) -> StepResult:
        if self.step_s:
            time.sleep(self.step_s)
        self._note("collect", flight.plan)
        n = len(flight.plan.rows)
        return StepResult(
            tokens_RJ=flight.handle,
            n_ok_R=np.ones(n, np.int32),
            finite_R=np.ones(n, bool),
            logprob_RJ=np.zeros((n, 1), np.float32),
        )

    def _note(self, what: str, plan: StepPlan) -> None:
        self.before(what, plan.id)
        self.log.append((what, plan.id))


class ResettableRunner(FakeRunner):
    n_resets = 0

    def reset(self) -> None:
        self.n_resets += 1


def build(config: EngineConfig, progress: Callable[[str, int, int], None]) -> tuple[Engine, dict]:
    """The engine of the tests; ``config.model.model`` orders how the start goes wrong."""
    model = config.model.model
    progress("compile", 1, 2)
    if model == "no such model":
        raise ConfigError("model: no such directory", field="model")
    if model == "crash at start":
        raise RuntimeError("boom")
    if model == "hang at start":
        time.sleep(60)
    progress("compile", 2, 2)
    if model == "host core":
        scheduler = Scheduler(HOST_CORE_LIMITS, config)
        return Engine(scheduler, testing.FakeRunner(HOST_CORE_LIMITS)), {"model": model}
    runner = ResettableRunner(
        step_s=60.0 if model == "hang in a step" else 0.002,
        before=_poison if model == "poison" else None,
    )
    engine = Engine(FakeScheduler(), runner, overlap=config.scheduler.overlap)  # type: ignore[arg-type]
    return engine, {"model": model, "vocab_size": LIMITS.vocab_size}


def _poison(what: str, n: int) -> None:
    raise RuntimeError("poison")
