"""The stateful property test's rules: random arrivals, steps, cancels and faults, in any order."""

from __future__ import annotations

import contextlib
import dataclasses

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jserve.errors import (
    BadRequest,
    ContextTooLong,
    DeadlineInfeasible,
    DeadlineUnreachable,
    JserveError,
    Overloaded,
    RateLimited,
)
from jserve.speculation.host.lookup import Lookup
from jserve.speculation.host.ngram import NgramIndex
from jserve.speculation.host.suffix import SuffixIndex
from jserve.types import Lane
from tests.sched.sched_drive import (
    VOCAB,
    Drive,
    MixedDrafts,
    drafting,
    folded,
    limits,
    request,
    step_times,
)

LOOKUPS = {
    "ngram": lambda: Lookup("ngram", lambda: (NgramIndex(1, 3, 24),)),
    "suffix": lambda: Lookup("suffix", lambda: (SuffixIndex(1, 24),)),
    "copying": lambda: Lookup("ngram", lambda: (NgramIndex(1, 3, 24),)),
}
"""What proposes on the host; of ``copying``, as the shadow of the device."""

# Overlapping prefixes over few tokens, so that the tree branches and pages are shared.
PREFIXES = [(), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 9), (1, 2, 3, 4) * 4, (5,) * 12]

requests = st.fixed_dictionaries(
    {
        "prefix": st.sampled_from(PREFIXES),
        "tail": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
        "max_tokens": st.sampled_from([0, 1, 2, 5, 9, 17, 30]),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "temperature": st.sampled_from([0.0, 1.0]),
        "priority": st.sampled_from([0, 0, 0, 1, -1]),
        "salt": st.sampled_from(["", "", "tenant"]),
        "skip": st.sampled_from([False, False, False, True]),
        "eos": st.sampled_from([(), (), (3,)]),
        "lane": st.sampled_from([*Lane, Lane.STANDARD]),
        "tenant": st.sampled_from(["", "", "ann", "bob"]),
        "speculative": st.sampled_from([True, True, True, False]),
        "deadlines": st.sampled_from(
            [
                {},
                {},
                {},
                {"ttft_deadline_ms": 3000.0},
                {"deadline_ms": 9000.0},
                {"ttft_deadline_ms": 20000, "tpot_deadline_ms": 30.0, "deadline_ms": 60000},
            ]
        ),
        "extras": st.sampled_from(
            [
                {},
                {},
                {"presence_penalty": 1.0},
                {"logit_bias": {3: 1.5}},
                {"allowed_token_ids": (1, 2, 3, 5)},
                {"allowed_token_ids": (1, 2)},
                {"logprobs": 2},
                {"logprob_token_ids": (3, 0, 3)},
                {"prompt_logprobs": 3},
                {"extra_args": {"echo": "prompt"}},
                {"stop_token_ids": (4,), "min_tokens": 1},
                {"seed": 7, "repetition_penalty": 1.3},
                {"ignore_eos": True},
            ]
        ),
    }
)


def make(id: str, spec: dict, vocab: int = VOCAB):
    spec = dict(spec)
    extras = spec.pop("extras") | spec.pop("deadlines")
    prompt = (*spec.pop("prefix"), *spec.pop("tail"))
    if extras.get("min_tokens", 0) > spec["max_tokens"]:
        del extras["min_tokens"]
    return folded(request(id, prompt, **spec, **extras), vocab)


class SchedulerMachine(RuleBasedStateMachine):
    """Every rule ends in ``Drive.check``; the teardown runs everything to its end."""

    @initialize(
        depth=st.sampled_from([0, 1, 2]),
        n_pages=st.sampled_from([9, 14, 18, 40]),
        page_size=st.sampled_from([1, 4, 4, 8]),
        chunk=st.sampled_from([0, 1, 5, 8]),
        budget=st.sampled_from([4, 7, 64]),
        reuse=st.booleans(),
        drafts=st.sampled_from([0, 0, 3, 7]),
        drafter=st.sampled_from(["blind", "host", "ngram", "suffix", "device", "copying"]),
        eos_rate=st.sampled_from([0, 7]),
        bound_ms=st.sampled_from([0.0, 0.0, 9.0, 0.001]),
        ageing_s=st.sampled_from([0.0, 5.0, 1e6]),
        measured=st.booleans(),
        most_prefill=st.sampled_from([0, 6]),
        tokens=st.sampled_from([0, 120]),
        window=st.sampled_from([(0, 0), (0, 0), (3, 0), (9, 0), (14, 5), (6, 1)]),
        n_host=st.sampled_from([0, 0, 2, 30]),
        preemption=st.sampled_from(["auto", "recompute", "swap", "swap"]),
        vocab=st.sampled_from([VOCAB, 2]),
        n_vocab_rows=st.sampled_from([1, 2, 99]),
    )
    def start(
        self,
        depth,
        n_pages,
        page_size,
        chunk,
        budget,
        reuse,
        drafts,
        drafter,
        eos_rate,
        bound_ms,
        ageing_s,
        measured,
        most_prefill,
        tokens,
        window,
        n_host,
        preemption,
        vocab,
        n_vocab_rows,
    ):
        n_pages = 1 + -(-(n_pages - 1) * 4 // page_size)  # as many tokens at any page size
        times = step_times() if measured else ()
        seen = {"window": window[0], "sinks": window[1]}
        tier = {"n_host_pages": n_host, "page_move_s": 1e-4 if measured else 0.0}
        pool = {"n_pages": n_pages, "page_size": page_size}
        few = {"vocab_size": vocab, "n_vocab_rows": n_vocab_rows}
        lim = limits(max_drafts=drafts, step_times=times, **pool, **tier, **seen, **few)
        if drafts and drafter in ("device", "copying"):
            lim = dataclasses.replace(
                lim,
                device_drafts=drafts - 1,
                draft_rows=2,
                prefill_width=2,
                drafts_from_kv=drafter == "device",
                drafts_from_text=drafter == "copying",
            )
        options = {
            "depth": depth,
            "overlap": depth,
            "eos_rate": eos_rate,
            "max_prefill_chunk": chunk,
            "max_num_batched_tokens": budget,
            "prefix_caching": reuse,
            "max_waiting": 8,
            "itl_bound_ms": bound_ms,
            "ageing_s": ageing_s,
            "max_prefill_tokens": most_prefill,
            "max_waiting_tokens": tokens,
            "tenant_share": 0.5,
            "max_tokens_bulk": 20,
            "preemption": preemption,
        }
        if drafts and drafter in ("blind", "host"):
            self.drive = drafting(MixedDrafts(blind=drafter == "blind"), lim, **options)
        elif drafts and drafter in LOOKUPS:
            self.drive = Drive(lim, proposer=LOOKUPS[drafter](), **options)
        else:
            self.drive = Drive(lim, **options)
        self.n = 0

    @rule(spec=requests)
    def add(self, spec):
        """Taken, or refused for a reason that holds."""
        self.n += 1
        req = make(f"r{self.n}", spec, self.drive.limits.vocab_size)
        before = self.shape()
        try:
            self.drive.add(req)
        except JserveError as error:
            assert self.shape() == before, "a refusal left a trace"
            self.check_refusal(req, error)

    def shape(self) -> tuple:
        resources = self.drive.scheduler.resources
        return len(resources.waiting), len(resources.running), resources.waiting.n_tokens

    def check_refusal(self, req, error) -> None:
        sched = self.drive.scheduler
        if isinstance(error, Overloaded):
            full = sched.gate.load() >= 1.125
            assert full or sched.gate.level >= (1 if req.lane is Lane.BULK else 3)
            assert full or req.lane is not Lane.INTERACTIVE, "the last to be refused"
        elif isinstance(error, RateLimited):
            assert req.tenant
            assert sched.resources.waiting.held_by[req.tenant] >= 4
        elif isinstance(error, ContextTooLong):
            n_out = self.longest_out(req)
            assert not self.fits_alone(len(req.prompt_ids), n_out), "one that fits was refused"
        elif isinstance(error, DeadlineInfeasible | DeadlineUnreachable):
            assert getattr(req, error.field) is not None
        else:
            assert isinstance(error, BadRequest)
            assert (error.field, req.lane) == ("max_tokens", Lane.BULK)

    @staticmethod
    def longest_out(req) -> int:
        return max(1, req.params.max_tokens)

    def fits_alone(self, n_prompt: int, n_out: int) -> bool:
        """Whether pages for so many tokens, or for a window and what is in flight, are in the pool."""
        lim, options = self.drive.limits, self.drive.config.scheduler
        Z, usable = lim.page_size, (lim.n_pages - 1) * lim.page_size
        if n_prompt + n_out - 1 <= usable:
            return True
        row = max(min(options.max_prefill_chunk or 99, 16), 1 + lim.max_drafts)
        held = lim.window + (options.overlap + 2) * row + 3 * Z + -(-lim.sinks // Z) * Z
        return bool(lim.window) and held <= usable

    @rule()
    def step(self):
        self.drive.step()

    @rule(k=st.integers(2, 12))
    def step_many(self, k):
        for _ in range(k):
            self.drive.step()

    @precondition(lambda self: len(self.drive.flight) <= self.drive.depth)
    @rule()
    def launch(self):
        self.drive.launch()

    @precondition(lambda self: self.drive.flight)
    @rule()
    def commit(self):
        self.drive.commit()

    @rule(data=st.data(), choice=st.sampled_from([None, None, 0, 1]), twice=st.booleans())
    def cancel(self, data, choice, twice):
        """Any id: waiting, running, in flight, finished or never seen; again is a no-op."""
        id = f"r{data.draw(st.integers(0, self.n))}"
        self.drive.cancel(id, choice)
        if twice:
            assert self.drive.scheduler.cancel(id, self.drive.now, choice) == []

    @rule(seconds=st.sampled_from([0.0, 3.0, 30.0]))
    def time_passes(self, seconds):
        self.drive.now += seconds

    @rule(n=st.integers(1, 12))
    def take_pages(self, n):
        self.drive.hold(n)
        self.drive.check()

    @rule()
    def give_pages_back(self):
        self.drive.let_go()
        self.drive.check()

    @rule(n=st.integers(1, 8))
    def evict(self, n):
        self.drive.scheduler.resources.cache.evict(n)
        self.drive.check()

    @precondition(lambda self: self.n)
    @rule(data=st.data())
    def nan_row(self, data):
        id = f"r{data.draw(st.integers(1, self.n))}"
        if (id, 0) in self.drive.told and self.drive.told[id, 0].end is None:
            self.drive.poison(id)

    @precondition(lambda self: self.drive.flight)
    @rule(really=st.sampled_from([False, False, False, True]))
    def step_fails(self, really):
        if really:
            self.drive.runner.fail_next = RuntimeError("the step raised")
        self.drive.commit()

    @rule(pick=st.integers(0, 3))
    def preempt(self, pick):
        self.drive.preempt(pick)

    @precondition(lambda self: len(self.drive.scheduler.resources.waiting))
    @rule(pick=st.integers(0, 7))
    def jam(self, pick):
        """One that waits can never run, by a bug: it ends in error, and the others as ever."""
        waiting = [seq.request.id for seq in self.drive.scheduler.resources.waiting]
        self.drive.jam(waiting[pick % len(waiting)])

    @rule(data=st.data(), tail=st.integers(0, VOCAB - 1))
    def next_turn(self, data, tail):
        """A request that contains an ended one and what it said."""
        done = [k[0] for k, told in self.drive.told.items() if told.end and told.tokens]
        if done:
            of = data.draw(st.sampled_from(sorted(set(done))))
            self.n += 1
            tail %= self.drive.limits.vocab_size
            turn = self.drive.next_turn(f"r{self.n}", of, [tail], max_tokens=2)
            if len(turn.prompt_ids) < 40:
                with contextlib.suppress(Overloaded, ContextTooLong):
                    self.drive.add(turn)

    def teardown(self):
        if hasattr(self, "drive"):
            self.drive.run()
