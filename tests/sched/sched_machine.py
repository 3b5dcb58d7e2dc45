"""The stateful property test's rules: random arrivals, steps, cancels and faults, in any order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.sched.sched_drive import VOCAB, Drive, MixedDrafts, drafting, limits, request

from jserve.errors import Overloaded

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
        "extras": st.sampled_from(
            [
                {},
                {},
                {"presence_penalty": 1.0},
                {"logit_bias": {3: 1.5}},
                {"allowed_token_ids": (1, 2, 3, 5)},
                {"logprobs": 2},
                {"prompt_logprobs": 3},
                {"stop_token_ids": (4,), "min_tokens": 1},
                {"seed": 7, "repetition_penalty": 1.3},
                {"ignore_eos": True},
            ]
        ),
    }
)


def make(id: str, spec: dict):
    spec = dict(spec)
    extras = spec.pop("extras")
    prompt = (*spec.pop("prefix"), *spec.pop("tail"))
    if extras.get("min_tokens", 0) > spec["max_tokens"]:
        extras = {}
    return request(id, prompt, **spec, **extras)


class SchedulerMachine(RuleBasedStateMachine):
    """Every rule ends in ``Drive.check``; the teardown runs everything to its end."""

    @initialize(
        depth=st.sampled_from([0, 1, 2]),
        n_pages=st.sampled_from([14, 18, 40]),
        page_size=st.sampled_from([1, 4, 4, 8]),
        chunk=st.sampled_from([0, 1, 5, 8]),
        budget=st.sampled_from([4, 7, 64]),
        reuse=st.booleans(),
        drafts=st.sampled_from([0, 0, 3]),
        eos_rate=st.sampled_from([0, 7]),
    )
    def start(self, depth, n_pages, page_size, chunk, budget, reuse, drafts, eos_rate):
        n_pages = 1 + -(-(n_pages - 1) * 4 // page_size)  # as many tokens at any page size
        lim = limits(n_pages=n_pages, page_size=page_size, max_drafts=drafts)
        options = {
            "depth": depth,
            "eos_rate": eos_rate,
            "max_prefill_chunk": chunk,
            "max_num_batched_tokens": budget,
            "prefix_caching": reuse,
            "max_waiting": 8,
        }
        proposing = drafting(MixedDrafts(), lim, **options) if drafts else None
        self.drive = proposing or Drive(lim, **options)
        self.n = 0

    @rule(spec=requests)
    def add(self, spec):
        self.n += 1
        if len(self.drive.scheduler.floor.waiting) < 8:
            self.drive.add(make(f"r{self.n}", spec))
            return
        with pytest.raises(Overloaded):
            self.drive.add(make(f"r{self.n}", spec))

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
        self.drive.scheduler.floor.cache.evict(n)
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

    @rule(data=st.data(), tail=st.integers(0, VOCAB - 1))
    def next_turn(self, data, tail):
        """A request that contains an ended one and what it said."""
        done = [k[0] for k, told in self.drive.told.items() if told.end and told.tokens]
        if done and len(self.drive.scheduler.floor.waiting) < 8:
            of = data.draw(st.sampled_from(sorted(set(done))))
            self.n += 1
            turn = self.drive.next_turn(f"r{self.n}", of, [tail], max_tokens=2)
            if len(turn.prompt_ids) < 40:
                self.drive.add(turn)

    def teardown(self):
        if hasattr(self, "drive"):
            self.drive.run()
