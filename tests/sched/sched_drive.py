"""Drives a Scheduler with a FakeRunner as the engine does, and checks invariants after every step.

The I-numbers name invariants: I1-I8 the page ledger (``kv.audit``), I9 visibility, I10 states, I11
budgets, I12 tokens, I13 lengths, I14-I16 progress, I17 quiescence, I18-I28 equalities.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from dataclasses import dataclass, field

from jserve.config import EngineConfig, sections
from jserve.option_names import flat_name
from jserve.ports import InFlight, RunnerLimits, StepTime
from jserve.sampling import SamplingParams
from jserve.sched import policy
from jserve.sched.recovery import deadlock
from jserve.sched.scheduler import Scheduler
from jserve.testing import FakeProposer, FakeRunner, model as fake_model
from jserve.testing.runner import RESTORED
from jserve.timing import prefill_cap
from jserve.types import Finish, Output, Request, SeqState, StepPlan

VOCAB = 11


def wants_prompt(asked: object) -> bool:
    """Step feature echo of the fake runner says the prompt again where it is asked for that."""
    return asked == "prompt"


def limits(**changes) -> RunnerLimits:
    base = {
        "n_slots": 4,
        "max_rows": 4,
        "max_decode_rows": 4,
        "max_prefill_tokens": 16,
        "max_prefill_rows": 3,
        "max_drafts": 0,
        "n_pages": 33,
        "page_size": 4,
        "max_model_len": 64,
        "vocab_size": VOCAB,
        "picks": 4,
        "features": {"echo": str},
        "prompt_features": {"echo": wants_prompt},
    }
    return RunnerLimits(**(base | changes))


def config(**options) -> EngineConfig:
    """Flat options without the range checks, which are for users (tests want pages of 1 token)."""
    base = EngineConfig.of(max_num_seqs=64, max_num_batched_tokens=64)
    flat = base.flat() | options
    parts = {
        name: kind(**{f.name: flat[flat_name(name, f)] for f in dataclasses.fields(kind)})
        for name, kind in sections()
    }
    return EngineConfig(**parts)


DRAFT_S = 2e-4
"""What a draft adds to a step."""
DECODE_RUNGS, PREFILL_RUNGS = (2, 4), (0, 4, 8, 16)


def seconds_of(n_rows: int, n_prefill: int) -> float:
    """What a step takes on the device of these tests: the time of the program it runs in."""
    rows = next((n for n in DECODE_RUNGS if n >= n_rows), n_rows)
    prefill = next((n for n in PREFILL_RUNGS if n >= n_prefill), n_prefill)
    return 1e-3 * (2 + 0.1 * rows + 0.5 * prefill)


def step_times() -> tuple[StepTime, ...]:
    """The times of its programs, for contexts up to 64 tokens."""
    return tuple(
        StepTime(
            n_decode=d,
            n_prefill=p,
            n_context=64,
            seconds=seconds_of(d, p) + (w - 1) * DRAFT_S,
            width=w,
        )
        for d in DECODE_RUNGS
        for p in PREFILL_RUNGS
        for w in (1, 4, 8)
    )


def known_pages(cache):
    """(root key, node, page of the device) of all that can be found."""
    for part in cache.parts:
        for key, node in part.tree.nodes():
            if node.page:  # else it went from the middle of a path; the audit judges that
                yield from ((key, node, page) for page in part.pool.pages_of(node.page))


def folded(req: Request, vocab: int) -> Request:
    """``req`` over the first ``vocab`` ids. Over two of them prefixes collide and branch at every page."""

    def fold(ids):
        return tuple(i % vocab for i in ids)

    params = req.params
    stops = fold(params.stop_token_ids)
    eos = fold(req.eos_ids) if not stops or vocab > 2 else ()  # both ids would leave none to draw
    allowed = params.allowed_token_ids
    params = dataclasses.replace(
        params,
        stop_token_ids=stops,
        logit_bias={i % vocab: bias for i, bias in params.logit_bias.items()},
        logprob_token_ids=params.logprob_token_ids and fold(params.logprob_token_ids),
        allowed_token_ids=None if allowed is None else tuple(sorted({*fold(allowed)})),
    )
    return dataclasses.replace(req, prompt_ids=fold(req.prompt_ids), eos_ids=eos, params=params)


SERVICE = (
    "batch",
    "lane",
    "tenant",
    "speculative",
    "ttft_deadline_ms",
    "tpot_deadline_ms",
    "deadline_ms",
    "arrival",
)


def request(id: str, prompt, *, eos=(), priority=0, salt="", skip=False, **params) -> Request:
    params.setdefault("temperature", 0.0)
    params.setdefault("max_tokens", 8)
    service = {name: params.pop(name) for name in SERVICE if name in params}
    return Request(
        id=id,
        prompt_ids=tuple(prompt),
        params=SamplingParams(**params),
        eos_ids=tuple(eos),
        priority=priority,
        cache_salt=salt,
        skip_prefix_cache=skip,
        **service,
    )


@dataclass
class Told:
    """What the client of one choice has seen."""

    tokens: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    end: Output | None = None


class Drive:
    """An engine loop of ``depth`` steps ahead, with oracles on."""

    def __init__(
        self, lim: RunnerLimits | None = None, *, depth=1, eos_rate=0, checks=True, **options
    ):
        sched = {k: options.pop(k) for k in ("proposer", "journal") if k in options}
        self.limits = lim or limits()
        self.config = config(**options)
        self.runner = FakeRunner(self.limits, eos_rate=eos_rate)
        self.scheduler = Scheduler(self.limits, self.config, **sched)
        self.depth = depth
        self.checks = checks
        self.flight: deque[InFlight] = deque()
        self.requests: dict[str, Request] = {}
        self.told: dict[tuple[str, int], Told] = {}
        self.committed: set[int] = set()
        self.held: list[int] = []
        self.starved = False
        """Pages were held outside when a plan was last asked for in vain."""
        self.poisoned: set[tuple[str, int]] = set()
        self.doomed: set[tuple[str, int]] = set()
        self.late: set[tuple[str, int]] = set()
        self.jammed: set[str] = set()
        self.given_up: set[tuple[str, int]] = set()
        self.n_faults = 0
        self._oracles: dict[tuple[str, int], list[int]] = {}
        self.now, self.tick = 0.0, 1.0
        self.n_steps = 0

    # -- inputs

    def add(self, req: Request) -> None:
        self.scheduler.submit(req, self.now)
        self.requests[req.id] = req
        for i in range(req.params.n):
            self.told[req.id, i] = Told()
        self.check()

    def cancel(self, id: str, index: int | None = None) -> None:
        outputs = self.scheduler.cancel(id, self.now, index)
        assert all(out.finish is Finish.ABORT and not out.token_ids for out in outputs)
        self._hear(outputs)
        self.check()  # I16: the page ledger balances without the cancelled ones, at once

    def poison(self, id: str, index: int = 0) -> None:
        """The next row of this choice computes KV that is not finite."""
        self.runner.nan.add((id, index))
        self.poisoned.add((id, index))

    def jam(self, id: str) -> None:
        """A bug: nobody of this request gets in any more."""
        if not self.jammed:
            enter = self.scheduler.resources.enter
            self.scheduler.resources.enter = lambda seq: (
                seq.request.id not in self.jammed and enter(seq)
            )
        self.jammed.add(id)

    @property
    def is_jammed(self) -> bool:
        return not self.jammed.isdisjoint(self.scheduler.groups)

    def preempt(self, pick: int) -> None:
        """One of the running gives way, as if pages had run out."""
        resources = self.scheduler.resources
        able = [seq for seq in resources.running if not policy.protected(seq)]
        if able:
            resources.preempt(able[pick % len(able)])
        self.check()

    def next_turn(self, id: str, of: str, tail: list[int], **params) -> Request:
        """A request that goes on where choice 0 of ``of`` ended."""
        return request(
            id, [*self.requests[of].prompt_ids, *self.told[of, 0].tokens, *tail], **params
        )

    def hold(self, n: int) -> None:
        """Someone outside takes free pages."""
        pool = self.scheduler.resources.cache.pool
        self.held += pool.take(min(n, pool.n_free))

    def let_go(self) -> None:
        self.scheduler.resources.cache.pool.drop(self.held)
        self.held = []

    # -- steps

    def step(self) -> bool:
        """One turn of the loop; False when nothing was done."""
        launched = self.launch()
        if self.flight and (not launched or len(self.flight) > self.depth):
            self.commit()
            return True
        if not launched:
            self.check_rest()
        return launched

    def check_rest(self) -> None:
        """Nothing moves: then nothing is left, unless it cannot."""
        may_stand = self.held or self.is_jammed
        assert may_stand or not self.scheduler.has_work, "I14: work is left and nothing moves"

    def launch(self) -> bool:
        self.now += self.tick
        self.n_steps += 1
        self._expire()
        plan = self.scheduler.plan(self.now)
        if plan is None:
            self.starved = bool(self.held)
            self.check()
            return False
        self._check_plan(plan)
        self.flight.append(self.runner.launch(plan))
        self.check()
        return True

    def _expire(self) -> None:
        outputs = self.scheduler.expire(self.now)
        given_up = [out for out in outputs if out.error_code == "unschedulable"]
        assert self.starved or {out.request_id for out in given_up} <= self.jammed, "an innocent"
        assert len(given_up) <= 1
        self.given_up |= {(out.request_id, out.index) for out in given_up}
        late = [out for out in outputs if out not in given_up]
        self.late |= {(out.request_id, out.index) for out in late}
        assert all(out.error_code == "deadline_exceeded" and out.error_field for out in late)
        self._hear(outputs)

    def commit(self) -> None:
        flight = self.flight.popleft()
        self.committed.add(flight.plan.id)
        try:
            result = self.runner.collect(flight)
        except RuntimeError as error:
            self._recover(flight.plan, str(error))
        else:
            result = dataclasses.replace(result, device_us=self.took(flight.plan) * 1e6)
            self._hear(self.scheduler.commit(flight.plan, result, self.now))
        self.check()

    def took(self, plan: StepPlan) -> float:
        """Seconds of a step, as the scheduler is told; 0 teaches it nothing."""
        n_prefill = sum(row.count for row in plan.rows if not row.from_slot)
        n_drafts = sum(len(row.drafts) for row in plan.rows)
        return seconds_of(len(plan.rows), n_prefill) + DRAFT_S * n_drafts

    def _recover(self, culprit: StepPlan, error: str) -> None:
        """As the engine does after a step that raised: everything in flight is lost."""
        lost = [culprit, *(flight.plan for flight in self.flight)]
        rows = [row for plan in lost for row in plan.rows]
        groups = self.scheduler.groups.values()
        live = {seq.choice for group in groups for seq in group if seq.finish is None}
        present = {row.choice.request.id for row in rows if row.choice in live}
        self.n_faults += 1
        self.flight.clear()
        self.runner.reset()
        outputs = self.scheduler.recover(lost, error, self.now)
        assert {out.request_id for out in outputs} <= present
        assert not outputs or len(present) == 1, "faulty without having been alone"
        self.doomed |= {(out.request_id, out.index) for out in outputs}
        self._hear(outputs)

    def run(self) -> dict[tuple[str, int], list[int]]:
        """Until nothing is left, within a bound on steps (I14, I15); the tokens of each choice."""
        self.let_go()
        for _ in range(self._most_steps()):
            if not self.step() and not self.scheduler.has_work:
                break
        assert not self.scheduler.has_work, "I15: not done within the bound on steps"
        self.check_idle()
        return {key: told.tokens for key, told in self.told.items()}

    def _most_steps(self) -> int:
        """All work one after the other, each recomputed three times, and slack for overlap."""
        chunk = self.config.scheduler.max_prefill_chunk or self.limits.max_prefill_tokens
        options = self.config.scheduler
        chunk = min(chunk, options.max_num_batched_tokens, options.max_prefill_tokens or chunk)
        chunk = max(1, chunk // prefill_cap.SHORTENED)
        total = 0
        for req in self.requests.values():
            n_out = (
                self.limits.max_model_len
                if req.params.max_tokens is None
                else req.params.max_tokens
            )
            longest = len(req.prompt_ids) + n_out
            again = 1 + 3 + self.n_faults
            if self.config.scheduler.itl_bound_ms:
                chunk, again = min(chunk, self.limits.page_size), again * prefill_cap.PATIENCE
            total += req.params.n * (again * (longest // chunk + 1) + n_out + 2 * self.depth + 4)
        n_jammed = sum(self.requests[id].params.n for id in self.jammed)
        return total + 10 + n_jammed * round(deadlock.LIMIT_S / self.tick + 1 if self.tick else 0)

    # -- oracles

    def _hear(self, outputs: list[Output]) -> None:
        for out in outputs:
            told = self.told[out.request_id, out.index]
            assert told.end is None, f"I10: {out} after the end {told.end}"
            first = not told.outputs
            told.outputs.append(out)
            told.tokens += out.token_ids
            assert (out.seed is not None) == first, "the seed goes out with the first output"
            if out.finish is not None:
                told.end = out
                if out.finish is Finish.ERROR:
                    key = (out.request_id, out.index)
                    assert key in self.poisoned | self.doomed | self.late | self.given_up, (
                        f"I29: {key} failed without a fault"
                    )
                    assert out.error, "an error without a text"
            self._check_tokens(out.request_id, out.index, told)
            self._check_scores(self.requests[out.request_id], out.index, out)

    def _check_tokens(self, id: str, index: int, told: Told) -> None:
        """The output oracle, I12 and I13: every token is the one the definition gives."""
        req = self.requests[id]
        expected = self.oracle(req, index, told.outputs[0].seed)
        assert told.tokens == expected[: len(told.tokens)], f"{id}/{index} diverged"
        if told.end is None:
            assert len(told.tokens) < max(1, len(expected)), "it should have ended"
        elif told.end.finish in (Finish.STOP, Finish.LENGTH):
            assert told.tokens == expected, f"{id}/{index} ended early"
            stops = (*req.params.stop_token_ids, *(() if req.params.ignore_eos else req.eos_ids))
            n_min = req.params.min_tokens
            by_stop = bool(expected) and expected[-1] in stops and len(expected) > n_min
            assert told.end.finish == (Finish.STOP if by_stop else Finish.LENGTH)

    def oracle(self, req: Request, index: int, seed: int | None) -> list[int]:
        key = (req.id, index)
        if key not in self._oracles:
            self._oracles[key] = self.runner.expected(req, index, seed)
        return self._oracles[key]

    def _check_scores(self, req: Request, index: int, out: Output) -> None:
        """Log-probabilities are complete, of the tokens sent, and those of the definition."""
        told = self.told[req.id, index]
        n_before = len(told.tokens) - len(out.token_ids)
        params, prompt = req.params, list(req.prompt_ids)
        if params.shows_logprobs and out.token_ids:
            assert out.logprobs is not None
            assert [p.token for p in out.logprobs] == list(out.token_ids)
            picks = params.logprob_token_ids
            if picks is None:
                assert all(len(p.top_ids) == params.logprobs for p in out.logprobs)
            else:
                assert all(p.named and p.top_ids == picks for p in out.logprobs)
            if not (params.needs_vocab_row or params.bans_words):
                self._check_drawn(prompt, [*told.tokens[:n_before], *out.token_ids], out, picks)
        else:
            assert out.logprobs is None
        first = n_before == 0 and (out.token_ids or out.finish is Finish.LENGTH)
        said = {"echo": req.prompt_ids} if wants_prompt(params.extra_args.get("echo")) else None
        assert out.prompt_extra == (said if first else None)
        if params.prompt_logprobs is None or not first:
            assert out.prompt_logprobs is None
            return
        assert out.prompt_logprobs is not None
        assert out.prompt_logprobs[0] is None
        assert [p.token for p in out.prompt_logprobs[1:]] == prompt[1:]
        visible = fake_model.Visible(self.runner.model)
        for i, entry in enumerate(out.prompt_logprobs[1:]):
            visible.add(prompt[i])
            now = fake_model.mix(visible.seen)
            assert entry.logprob == fake_model.logprob_at(now, prompt[i + 1])
            assert entry.rank == fake_model.rank_of(now, prompt[i + 1], self.limits.vocab_size)
            assert entry.top_ids == tuple(
                fake_model.top_of(now, self.limits.vocab_size)[0][: params.prompt_logprobs]
            )

    def _check_drawn(
        self, prompt: list[int], tokens: list[int], out: Output, picks: tuple[int, ...] | None
    ) -> None:
        """Ranks and the log-probabilities of named ids are those of the definition."""
        visible = fake_model.Visible(self.runner.model)
        for token in [*prompt, *tokens[: len(tokens) - len(out.token_ids)]]:
            visible.add(token)
        for entry in out.logprobs or ():
            now = fake_model.mix(visible.seen)
            assert entry.rank == fake_model.rank_of(now, entry.token, self.limits.vocab_size)
            if picks is not None:
                assert entry.top_logprobs == tuple(fake_model.logprob_at(now, t) for t in picks)
            visible.add(entry.token)

    def _check_plan(self, plan: StepPlan) -> None:
        """I11: budgets; everyone past its prefill gets a row; decode rows come first."""
        options, running = self.config.scheduler, self.scheduler.resources.running
        assert plan.n_tokens <= options.max_num_batched_tokens, "I11: over the token budget"
        rows = {row.choice for row in plan.rows}
        for seq in running:
            done = len(seq.tokens) + seq.in_flight >= seq.max_len
            assert seq.choice in rows or seq.scheduled < seq.given or done, (
                "I11: a decoder was skipped"
            )
        chunk = options.max_prefill_chunk
        for row in plan.rows:
            assert row.from_slot or not chunk or row.count <= chunk, "a chunk is too large"
        prefill = sum(row.count for row in plan.rows if not row.from_slot)
        assert prefill <= (options.max_prefill_tokens or prefill), "over the prefill budget"

    def check(self) -> None:
        if not self.checks:
            return
        resources = self.scheduler.resources
        resources.check(tuple(self.held))  # I1 - I8
        self._check_states()
        tier = resources.cache.tier
        for key, node, page in known_pages(resources.cache):
            if tier is not None and tier.loading([page]):
                continue  # it is there before the rows of the next plan
            written = int(self.runner.step_P[page])
            assert written == RESTORED or written in self.committed, "I9: a page is known too soon"
            assert not self.runner.poison_PZ[page].any(), "a page that is not finite is known"
            stored = tuple(self.runner.token_PZ[page].tolist())
            assert stored == node.key, (
                f"I6: the tree says {node.key}, the page holds {stored}, {key}"
            )

    def _check_states(self) -> None:
        """I10, I12, I13: counters and states of every live sequence."""
        sched = self.scheduler
        waiting, running = list(sched.resources.waiting), list(sched.resources.running)
        rows = [row for flight in self.flight for row in flight.plan.rows]
        live = [seq for group in sched.groups.values() for seq in group if seq.finish is None]
        assert {id(s) for s in waiting} | {id(s) for s in running} == {id(s) for s in live}
        assert len(waiting) + len(running) == len(live), "I10: in two places"
        for seq in live:
            told = self.told[seq.request.id, seq.index]
            assert told.tokens == seq.tokens[seq.n_prompt :], "I12: told and known differ"
            assert len(seq.tokens) <= seq.max_len <= self.limits.max_model_len, "I13"
            assert seq.n_preempted <= 3, "I15: preempted too often"
            mine = [row for row in rows if row.choice is seq.choice]
            assert seq.pending == len(mine)
            assert seq.in_flight == sum(1 + len(row.drafts) for row in mine if row.emits)
            assert len(seq.tokens) + seq.in_flight <= seq.max_len + (seq.max_len == seq.n_prompt)
            if seq.state is SeqState.RUNNING:
                assert seq.lease is not None, "I10"
                assert seq.scheduled <= seq.lease.capacity, "KV without a page"
                if seq.scheduled >= seq.given:
                    assert len(seq.tokens) + seq.in_flight == seq.scheduled + 1
        keys = [s.order for s in running]
        assert keys == sorted(keys), "the running are out of order"
        self._check_accounts(waiting, running)

    def _check_accounts(self, waiting: list, running: list) -> None:
        """I2 for the queue: every count is that of its members."""
        resources = self.scheduler.resources
        assert len(resources.waiting) == len(waiting)
        fresh = [s for s in waiting if s.state is SeqState.WAITING]
        assert resources.waiting.n_tokens == sum(s.n_prompt for s in fresh)
        assert resources.waiting.held_by == Counter(s.request.tenant for s in waiting)
        assert all(s.charged is None for s in fresh if s.n_preempted == 0)
        for lane, queue in resources.waiting.lanes.items():
            mine = [s for s in fresh if s.request.lane == lane]
            assert queue.n == sum(s.request.lane == lane for s in waiting)
            assert resources.n_running[lane] == sum(s.request.lane == lane for s in running)
            tokens = Counter()
            for seq in mine:
                tokens[seq.request.tenant] += seq.n_prompt
            assert queue.tokens == tokens
            assert queue.tenants.keys() == tokens.keys()
        for seq in running:
            counts = resources.demand.parts
            n_held = sum(
                n * sum(1 for page in part.pages if page)
                for (n, _), part in zip(counts, seq.lease.parts, strict=True)
            )
            spare = self.limits.max_drafts * resources.demand.n_groups
            assert n_held <= resources._most(seq) + spare, "more pages than foreseen"
        Z = self.limits.page_size
        assert resources._most_pages == sum(resources._most(s) for s in running)
        assert resources.demand.slides or resources._most_pages == sum(
            -(-policy.kv_tokens(s) // Z) for s in running
        )
        assert set(resources.waiting._passed) <= set(waiting), "someone holds the door from outside"

    def check_idle(self) -> None:
        """I10 and I17: one end each; clearing the cache brings every page back."""
        self.let_go()
        sched, cache = self.scheduler, self.scheduler.resources.cache
        for key, told in self.told.items():
            assert told.end is not None, f"I10: {key} has no end"
        assert not sched.groups, "I17: a request is left"
        assert not len(sched.scores), "I17: scores are left"
        assert not len(sched.deadlines), "I17: a deadline is left"
        assert not sched.resources.waiting.held_by
        assert not sched.resources.vocab_rows._waiting, "I17: a wait for a vocab row is left"
        assert not sched.resources.waiting._arrivals
        assert not sched.speculation._of, "I17: a watched text is left"
        assert sched.stats().running == sched.stats().waiting == sched.stats().preempted == 0
        parts = list(zip(sched.resources.demand.parts, cache.parts, strict=True))
        cached = sum(n * part.tree.n_nodes for (n, _), part in parts)
        assert cache.pool.n_free + cached == cache.pool.n_usable, "I17: pages are lost"
        for (_, bound), part in parts:
            tree = part.tree
            assert tree.n_evictable == tree.n_nodes - tree.n_pinned, "I17: a lock is left"
            assert tree.n_hollow == 0 or bound, "I17: a node without a page is left"
            assert not part.table.rows.any(), "I17: a table row is left"
        if self.checks:
            sched.resources.check()


def tokens_of(reqs: list[Request], lim: RunnerLimits | None = None, **kw) -> dict:
    """Run ``reqs`` to the end in a fresh drive; the tokens of each choice."""
    drive = Drive(lim, **kw)
    for req in reqs:
        drive.add(req)
    return drive.run()


def truth(drive: Drive, seq) -> list[int]:
    """What comes after the tokens known and in flight, if all that is in flight is drawn."""
    expected = drive.oracle(seq.request, seq.index, seq.seed)
    return expected[seq.n_output + seq.in_flight :]


class RightDrafts(FakeProposer):
    """A proposer that is always right."""

    def __init__(self, *, blind: bool = True) -> None:
        self.drive: Drive | None = None
        self.blind = blind

    def truth(self, seq) -> list[int]:
        """Who is not blind looks at the known tokens, in flight or not."""
        n = 0 if self.blind else seq.in_flight
        expected = self.drive.oracle(seq.request, seq.index, seq.seed)
        return truth(self.drive, seq) if not n else expected[seq.n_output :]

    def propose(self, seq, most):
        return self.truth(seq)[:most]


class MixedDrafts(RightDrafts):
    """Right for a while, then wrong; sometimes none. A function of the sequence alone."""

    def propose(self, seq, most):
        h = fake_model.mix(len(seq.tokens) * 31 + seq.in_flight)
        right = self.truth(seq)[: h % (most + 1)]
        wrong = [(h >> i) % self.drive.limits.vocab_size for i in range(3)]
        return [*right, *wrong][:most] if h % 5 else []


class WrongDrafts(RightDrafts):
    """A proposer that is never right where the last id is not allowed."""

    def propose(self, seq, most):
        return [VOCAB - 1] * most


def drafting(proposer, lim: RunnerLimits | None = None, **kw) -> Drive:
    """A drive with a proposer that knows the truth."""
    drive = Drive(lim or limits(max_drafts=3), proposer=proposer, **kw)
    proposer.drive = drive
    return drive
