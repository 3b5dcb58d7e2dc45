"""The scheduler: plans each step and commits its results, as a pure state machine over its inputs.

The plan of the next step is made from counts and upper bounds while earlier steps run; values (last
token, true length) live on the device; commit reconciles.

A sequence has no phase; a step schedules ``todo = known + in_flight + drafts - scheduled`` tokens::

    WAITING --admit--> RUNNING --stop, length, cancel, fault--> FINISHED
       ^                  |                                        ^
       '---- PREEMPTED <--' (pages and slot gone, tokens stay) ----'

A prefix that another sequence is computing is waited for (``cache.prefix_wait``).

A guided sequence (structured output, a reasoning budget) is the exception: its next bitmask depends on
the last token. It is planned when nothing of it is in flight and its bitmask is ready; other sequences
continue meanwhile. Jump-forward tokens become known tokens, which its next row carries like a prompt's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import replace

from jserve.config import EngineConfig
from jserve.errors import BadRequest, DeadlineExceeded, RequestFailed
from jserve.faults import point
from jserve.ports import Guide, Guides, Journal, Proposer, RunnerLimits
from jserve.sched import policy, sampled
from jserve.sched.admission import check as admission, estimate
from jserve.sched.admission.deadlines import Deadlines
from jserve.sched.admission.demand import Demand
from jserve.sched.admission.gate import AdmissionGate
from jserve.sched.cache.disk_wait import DiskWaits
from jserve.sched.cache.prefix_wait import PrefixWaits
from jserve.sched.decode import DecodePlanner
from jserve.sched.finalize import Finalizer
from jserve.sched.plan_builder import PlanBuilder
from jserve.sched.prefill import PrefillPlanner
from jserve.sched.prompt_scores import PromptScores, PromptValues
from jserve.sched.recovery.bisection import FaultBisection
from jserve.sched.recovery.deadlock import DeadlockGuard
from jserve.sched.resources import resources_of
from jserve.sched.stats import LaneCounts, SchedStats, stats_of
from jserve.sched.versions import WeightVersions
from jserve.speculation.policy.controller import SpeculationController
from jserve.timing.prefill_cap import cap_of
from jserve.timing.slowness import Slowness
from jserve.timing.step_costs import MeasuredCosts
from jserve.types import (
    Finish,
    Lane,
    Output,
    Request,
    Sequence,
    StepPlan,
    StepResult,
)

MASK_PATIENCE_S = 0.0005
"""The time that planning waits for bitmasks while a step is in flight; rows without one wait for the next plan."""


class Scheduler:
    """``submit`` and ``cancel`` at any time; ``plan``, launch, then ``commit`` in that order."""

    def __init__(
        self,
        limits: RunnerLimits,
        config: EngineConfig,
        *,
        proposer: Proposer | None = None,
        journal: Journal | None = None,
        guides: Guides | None = None,
        speculation: type[SpeculationController] = SpeculationController,
    ) -> None:
        """``speculation`` decides what is drafted; the default asks ``proposer``. What ``config`` leaves to the
        device is as on a CPU."""
        config = config.on("cpu")
        self.limits = limits
        self.options = config.scheduler
        self.seed = config.model.seed
        self.journal = journal
        self.guides = guides
        self.costs, self.slowness = MeasuredCosts(limits.step_times), Slowness()
        self.cap = cap_of(self.costs, limits, self.options)
        self.resources = resources_of(limits, config, self.cap)
        self.groups: dict[str, list[Sequence]] = {}
        self.bisection = FaultBisection(self.groups)
        self.prefix_waits, self.disk_waits = PrefixWaits(self.resources), DiskWaits(self.resources)
        self.speculation = speculation(limits, self.costs, config.speculative, proposer)
        self.versions = WeightVersions()
        self.decode_planner = DecodePlanner(
            self.resources, limits, self.speculation, self.versions, guided=guides is not None
        )
        self.gate = AdmissionGate(self.options, self.cap, self.resources)
        cache = self.resources.cache
        self.demand = Demand(
            self.costs,
            self.resources.lengths,
            max_rows=limits.max_decode_rows,
            chunk=self.cap.most,
            kv_tokens=cache.pool.n_usable * cache.page_size,
        )
        self.prefill_planner = PrefillPlanner(
            self.resources,
            self.gate,
            self.prefix_waits,
            self.disk_waits,
            self.bisection,
            self.versions,
        )
        self.deadlock = DeadlockGuard(self.prefill_planner)
        self.deadlines = Deadlines()
        self.scores, self.prompt_values = PromptScores(), PromptValues()
        self.counts = {lane: LaneCounts() for lane in Lane}
        self.finalizer = Finalizer(
            resources=self.resources,
            speculation=self.speculation,
            scores=self.scores,
            prompt_values=self.prompt_values,
            versions=self.versions,
            finish_intervals=self.gate.finish_intervals,
            groups=self.groups,
            counts=self.counts,
            remember=(
                self.prefix_waits,
                self.disk_waits,
                self.speculation,
                self.scores,
                self.prompt_values,
                self.deadlines,
                self.demand,
                self.versions,
            ),
            vocab_size=limits.vocab_size,
            journal=journal,
        )
        self._n_submitted = self.n_steps = 0
        self._in_flight: dict[int, list[Sequence]] = {}
        """Plan id -> the sequence of each of its rows, until the plan is committed or lost."""
        self.n_prefilled = 0
        """Counter: prompt tokens (and, after a preemption, output tokens) planned to be computed."""

    @point("sched.submit")
    def submit(self, request: Request, now: float) -> None:
        """Queue ``request`` (one sequence per choice).

        Raises:
            BadRequest: see ``admission.check`` (ContextTooLong, NotFound too); or the id is live.
            CacheNotFound: ``request.cache`` names no handle.
            Overloaded, RateLimited, DeadlineInfeasible, DeadlineUnreachable: see ``AdmissionGate.check``.
        """
        self.resources.retention.advance(now)
        request = self.with_kv_name(request)
        if self.journal is not None:
            self.journal.arrival(request, now)
        whole = self.resources.retention.with_prefix(request)
        self.enqueue(request if whole is request else self.with_kv_name(whole), now)

    def with_kv_name(self, request: Request) -> Request:
        """``request`` with what tells its KV from that of the same tokens: the name of what its step features change,
        whatever name it came with, and whether it is long. What a feature refuses is refused by ``check``."""
        limits, kv_name = self.limits, request.kv_name
        if kv_name or (request.params.extra_args and limits.kv_names):
            kv_name = admission.kv_name_of(request, limits)
        is_long = admission.is_long(request, limits.short_context)
        if (kv_name, is_long) == (request.kv_name, request.is_long):
            return request
        return replace(request, kv_name=kv_name, is_long=is_long)

    def check(self, request: Request) -> int:
        """The most tokens that ``request`` may reach. Raises what ``submit`` would raise at any time."""
        return admission.check(request, self.limits, demand=self.resources.demand)

    def enqueue(self, request: Request, now: float) -> None:
        """``submit`` without the journal, of a prompt that is complete."""
        max_len = self.check(request)
        if self.speculation.proposer is not None:
            self.speculation.proposer.check(request)
        if request.params.guided and self.guides is None:
            raise BadRequest("structured output is off on this server", field="structured_outputs")
        if request.id in self.groups:
            raise BadRequest(f"request id {request.id[:64]!r} is in use", field="id")
        max_len = self.gate.capped(request, max_len)
        if not request.said:  # what was taken once is not refused for want of room
            self.gate.check(request, max_len, now)
        if not self.has_work:
            self.gate.finish_intervals.busy_from(now)
        group = [self._sequence(request, i, max_len, now) for i in request.open_choices]
        self.groups[request.id] = group
        n_cached = self.resources.tokens_known(request)
        for i, seq in enumerate(group):
            self.demand.add(seq, n_cached if i == 0 else seq.n_prompt)  # a prompt is computed once
            self.resources.waiting.add(seq)
            self._watch(seq, now)
        self.gate.update()

    def _watch(self, seq: Sequence, now: float) -> None:
        """Mind the deadlines of ``seq``; its first admission must come a prefill before the first."""
        first_by, end_by = estimate.due_times(seq.request, now)
        if seq.n_output:
            first_by = None  # it was told
        if first_by is not None and self.costs.known:
            alone = estimate.alone(
                self.cap, seq.n_prompt - self.resources.tokens_known(seq.request), 1, 0
            )
            first_by -= alone.ttft_s / 2  # half, since a wrong guess must not end who could make it
        self.deadlines.add(seq, first_by, end_by)

    def expire(self, now: float) -> list[Output]:
        """End sequences whose deadline passed or cannot be met from the queue, and one that deadlocks the
        engine (``DeadlockGuard``). Call it before ``plan``.

        They end in error with code ``deadline_exceeded`` and the field, or ``unschedulable``; tokens
        already emitted remain.
        """
        passed, given_up = self.deadlines.passed(now), self.deadlock.find(self.n_steps, now)
        if passed or given_up is not None:
            self.resources.retention.advance(now)
            if self.journal is not None:
                self.journal.expire(now)
        outputs = []
        for seq, field in passed:
            self.counts[seq.request.lane].expired += 1
            late = DeadlineExceeded(f"{field} of {getattr(seq.request, field):g} ms has passed")
            outputs.append(
                self.finalizer.end(seq, Finish.ERROR, now, late.message, late.code, field)
            )
        if given_up is not None and given_up.seq.finish is None:
            seq, error = given_up
            outputs.append(self.finalizer.end(seq, Finish.ERROR, now, error.message, error.code))
        return outputs

    def cancel(self, request_id: str, now: float = 0.0, index: int | None = None) -> list[Output]:
        """End a request (or one choice): its terminal outputs, none if it is unknown or over."""
        self.resources.retention.advance(now)
        if self.journal is not None:
            self.journal.cancel(request_id, now, index)
        group = self.groups.get(request_id, ())
        chosen = [s for s in group if s.finish is None and index in (None, s.index)]
        return [self.finalizer.end(seq, Finish.ABORT, now) for seq in chosen]

    @point("sched.plan")
    def plan(self, now: float) -> StepPlan | None:
        """The plan of the next step; None when nothing can or should run before a result returns."""
        self.resources.retention.advance(now)
        waits = self.decode_planner.waits(len(self._in_flight), self.gate.n_context)
        plan = None if waits else self._plan(now)
        self.deadlock.planned(now, moves=bool(self._in_flight) or not self.has_work)
        if self.journal is not None:
            self.journal.plan(now, plan, waited=waits)
        return plan

    def _plan(self, now: float) -> StepPlan | None:
        self.bisection.clear_passed(now)
        self.resources.preempt_for_interactive(
            now, lambda seq: self.prefill_planner.held_back(seq, self.n_steps)
        )
        if self.guides is not None:
            self.guides.wait_masks(MASK_PATIENCE_S)
        builder = self._filled(now)
        if self.guides is not None and not builder.rows and not self._in_flight:
            self.guides.wait_masks(None)  # no other sequence has work
            builder = self._filled(now)
        if not builder.rows:
            return None
        old = self.versions.old_turn
        plan = builder.freeze(self.n_steps, self.resources.cache, old_weights=old)
        self.speculation.planned(plan, builder.seqs, behind=not self._in_flight)
        self.n_prefilled += builder.n_prefill
        self.n_steps += 1
        self._in_flight[plan.id] = builder.seqs
        return plan

    def _filled(self, now: float) -> PlanBuilder:
        """The rows of the version of weights whose turn it is, or else of the other."""
        first, *other = self.versions.turns()
        builder = self._fill(now, old_turn=first)
        return builder if builder.rows or not other else self._fill(now, old_turn=other[0])

    def _fill(self, now: float, *, old_turn: bool) -> PlanBuilder:
        self.versions.old_turn = old_turn
        builder = PlanBuilder(
            tokens=self.options.max_num_batched_tokens,
            prefill_tokens=self.cap.most,
            prefill_rows=self.limits.max_prefill_rows,
            chunk=self.resources.chunk,
            loads_text=self.limits.drafts_from_text,
            slot_features=self.limits.slot_features,
        )
        self.decode_planner.fill(builder, len(self._in_flight), self.gate.n_context)
        self.prefill_planner.fill(builder, self.n_steps, now)
        running = self.versions.running(self.resources.running)
        if self.speculation.backfills:
            self.speculation.backfill.fill(builder, running, self.cap)
        return builder

    @point("sched.commit")
    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Output]:
        """Apply the results of ``plan``; returns one output per row that advanced a live sequence."""
        self.resources.retention.advance(now)
        if self.journal is not None:
            self.journal.commit(now, plan, result)
        seqs = self._in_flight.pop(plan.id)
        self.bisection.succeeded()
        self.resources.cache.landed(plan.id)
        self._observe(plan, result, now)
        outputs = self.finalizer.advance(plan, seqs, result, now)
        if self.guides is not None:
            self.guides.start_masks()
        if not len(self.resources.running):
            self.speculation.gaps.idle()
        return outputs

    def _observe(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Learn from the step's time; prefill rows come last."""
        n_rows = len(plan.rows)
        n_decode, n_prefill = n_rows, 0
        while n_decode and not plan.rows[n_decode - 1].from_slot:
            n_decode -= 1
            n_prefill += plan.rows[n_decode].count
        self.gate.n_context = plan.page_table_RM.shape[1] * self.limits.page_size
        took, width = result.device_us * 1e-6, 1
        if self.speculation.on:
            width = max([row.count for row in plan.rows[:n_decode]], default=1)
            plain = self.costs.seconds(n_decode * width, n_prefill, self.gate.n_context)
            self.speculation.observe(plan, now, took, plain)
        n_context = self.gate.n_context
        self.costs.observe(n_decode, n_prefill, n_context, took, width, plan.n_draft)
        program = self.costs.program(n_decode, n_prefill, n_context, width, plan.n_draft)
        self.slowness.observe(program, sum([row.start for row in plan.rows]), took)

    def reweigh(
        self,
        version: str,
        now: float,
        *,
        name: str,
        keep: bool = False,
        beside: bool = False,
        directory: str = "",
    ) -> None:
        """The weights are those of ``version`` from the next plan on; no step is in flight. What others may find in
        the cache is forgotten.

        Args:
            name: in the names of KV pages: other weights, another name; "" for the first ones.
            keep: running sequences go on with the KV that they have; else they requeue with their tokens.
            beside: all who are here end under the weights of before; plans say so of their rows.
            directory: that has all of them, for the journal.
        """
        assert not self._in_flight, f"{len(self._in_flight)} more steps are in flight"
        self.resources.retention.advance(now)
        if self.journal is not None:
            self.journal.weights(now, version, name, keep, beside, directory)
        live = [seq for group in self.groups.values() for seq in group if seq.finish is None]
        self.versions.replace(version, live if beside else ())
        if keep or beside:
            self.resources.keep_running(name)
        else:
            self.speculation.gaps.idle()
            self.versions.n_recomputed += sum(seq.scheduled for seq in self.resources.running)
            self.resources.requeue_all(weights=name)

    def recover(self, plans: Iterable[StepPlan], error: str, now: float) -> list[Output]:
        """A step raised with ``error`` and the device lost its state; ``plans`` are all that were in
        flight. Or an operator wants the cache emptied: then there is neither.

        All running sequences requeue with their tokens, and the prefix cache is empty. The requests of
        those plans are retried by ``FaultBisection``; one found faulty ends with ``error``.
        """
        plans = list(plans)
        self.resources.retention.advance(now)
        if self.journal is not None:
            self.journal.recover(now, error)
        lost = [seq for plan in plans for seq in self._in_flight.pop(plan.id)]
        faulty = self.bisection.step_failed(lost, now) if plans else None
        for seq in lost:
            seq.pending = seq.in_flight = 0
        self.speculation.gaps.idle()
        assert not self._in_flight, f"{len(self._in_flight)} more steps are in flight"
        blamed = [s for s in self.groups.get(faulty or "", ()) if s.finish is None]
        outputs = [self.finalizer.end(seq, Finish.ERROR, now, error) for seq in blamed]
        self.resources.requeue_all(keep_disk=bool(error))
        return outputs

    def _sequence(self, request: Request, index: int, max_len: int, now: float) -> Sequence:
        params, n_prompt = request.params, len(request.prompt_ids)
        said = (request.said[index] or ()) if request.said else ()
        self._n_submitted += 1
        return Sequence(
            request=request,
            index=index,
            seed=policy.seed_of(request.id, self.seed, params.seed, index),
            tokens=[*request.prompt_ids, *said],
            n_prompt=n_prompt,
            max_len=max_len,
            stop_ids=sampled.stop_ids(request.eos_ids, params.stop_token_ids, params.ignore_eos),
            min_len=n_prompt + params.min_tokens,
            guide=self._guide(request, index, said, max_len - n_prompt),
            prompt_features=admission.prompt_features_of(params, self.limits),
            plain=request.cache is None and not params.shows_more,
            order=policy.order_of(request.lane, request.priority, self._n_submitted),
            arrived=now,
            due=estimate.due(request, now),
        )

    def _guide(self, request: Request, index: int, said: Seq[int], most: int) -> Guide | None:
        """The guide of a choice, moved past what was ``said``."""
        guide = None if self.guides is None else self.guides.guide(request, most)
        if guide is None or not said:
            return guide
        verdict = guide.resume(said)
        if self.journal is not None:
            self.journal.guided(request.id, index, verdict)
        if verdict.error is not None or verdict.ended:
            why = verdict.error or "the structure is complete"
            raise RequestFailed(f"it cannot go on behind what was said: {why}")
        return None if verdict.free else guide

    @property
    def has_work(self) -> bool:
        """True while anything waits, runs or is in flight."""
        return bool(len(self.resources.waiting) or len(self.resources.running) or self._in_flight)

    @property
    def waits_for_disk(self) -> bool:
        """A page is being read that a sequence may wait for."""
        tier = self.resources.cache.tier
        return tier is not None and tier.n_fetching > 0

    @property
    def n_waiting(self) -> int:
        """Sequences in the queue, preempted ones included."""
        return len(self.resources.waiting)

    @property
    def n_evicted(self) -> int:
        """Counter: pages evicted from the prefix cache."""
        return self.resources.cache.n_evicted

    def device_fault(self, now: float) -> str | None:
        """The reason why the device itself must be at fault for the steps that raised; None while it need not be."""
        return self.bisection.device_fault(now)

    def stats(self) -> SchedStats:
        return stats_of(self.resources, self.gate, self.counts)

    def counters(self) -> dict[str, float]:
        """More for /metrics: the tiers, handles, sessions, waits for a prefix under way."""
        return {
            **self.resources.retention.counters(),
            **(self.speculation.counters() if self.speculation.on else {}),
            **self.resources.tier_counters(),
            **self.bisection.counters(),
            **self.prefix_waits.counters(),
            **self.deadlock.counters(),
            **self.resources.vocab_rows.counters(),
            **self.finalizer.counters(),
            **self.demand.counters(),
            "queue_seconds": self.gate.queue_s(),
            "step_slowness": self.slowness.value,
            "prefill_tokens_total": float(self.n_prefilled),
            "weight_recomputed_tokens_total": float(self.versions.n_recomputed),
        }
