"""The rules of the stateful property test of weights: arrivals, steps, cancels, preemptions, updates under every
policy, pauses and sleep, in any order.

The runner's weights are a number on which KV and draws depend. It writes down under which of them each row drew, and
lets nobody read KV of others but sequences that lived through a ``mix``, and those only what they had read before.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict, deque
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jserve.engine.engine import Engine
from jserve.engine.operate import POLICIES
from jserve.engine.wire import Control
from jserve.sampling import SamplingParams
from jserve.sched import policy
from jserve.sched.scheduler import Scheduler
from jserve.speculation.host.lookup import Lookup
from jserve.speculation.host.ngram import NgramIndex
from jserve.types import Finish, Output, Request
from tests.engine.test_operate import WeighedRunner, next_token
from tests.engine.test_with_scheduler import CONFIG, LIMITS
from tests.whole.equal import FREE

VOCAB = 3
"""So few tokens that drafts are right now and then."""
STEM = [0, 1, 2, 2, 1, 0, 0, 1, 1, 2, 0, 2]
Key = tuple[str, int]
SELDOM = st.sampled_from([False, False, False, True])
REFUSED = {"operation_pending", "paused", "asleep"}
"""What commands may be answered with."""


class NotedRunner(WeighedRunner):
    """A ``WeighedRunner`` that notes the weights of each row that draws."""

    def __init__(self, limits: Any) -> None:
        self.drew: dict[Key, deque[tuple[int, list[int]]]] = defaultdict(deque)
        self.mixed: set[Key] = set()
        """Sequences that may read KV of other weights, if they did before."""
        super().__init__(limits)

    def launch(self, plan: Any) -> Any:
        weights: Any = self.old if plan.old_weights else self.weights
        flight = super().launch(plan)
        _, result, _ = flight.handle
        for r, row in enumerate(plan.rows):
            if row.emits:
                tokens = result.tokens_RJ[r, : result.n_ok_R[r]].tolist()
                self.drew[row.choice.request.id, row.choice.index].append((weights, tokens))
        return flight

    def _move(self, plan: Any) -> Any:
        WeightsMachine.came["pages that came back"] += sum(not move.out for move in plan.moves)
        return super()._move(plan)

    def _write(self, row: Any, *rest: Any) -> None:
        self.strict = (row.choice.request.id, row.choice.index) not in self.mixed
        super()._write(row, *rest)


@dataclasses.dataclass
class Told:
    """All that was said of one choice."""

    request: Request
    tokens: list[int] = dataclasses.field(default_factory=list)
    weights: list[int] = dataclasses.field(default_factory=list)
    ends: list[Finish] = dataclasses.field(default_factory=list)
    only: int | None = None
    """The weights that it has to end under."""
    may_abort: bool = False


class WeightsMachine(RuleBasedStateMachine):
    """Checks after every rule; the teardown runs everything to its end."""

    came: ClassVar[Counter[str]] = Counter()
    """How often, in all runs together, what a test relies on came about."""

    @initialize(
        overlap=st.sampled_from([0, 1, 2]),
        drafts=st.sampled_from([0, 0, 3]),
        n_pages=st.sampled_from([18, 26, 49]),
        chunk=st.sampled_from([0, 5]),
        n_host=st.sampled_from([0, 6, 30]),
    )
    def start(self, overlap: int, drafts: int, n_pages: int, chunk: int, n_host: int) -> None:
        limits = dataclasses.replace(
            LIMITS,
            max_drafts=drafts,
            n_pages=n_pages,
            vocab_size=VOCAB,
            max_model_len=40,
            n_host_pages=n_host,
        )
        scheduler = CONFIG.scheduler
        config = dataclasses.replace(
            CONFIG, scheduler=dataclasses.replace(scheduler, max_prefill_chunk=chunk)
        )
        proposer = Lookup("ngram", lambda: (NgramIndex(1, 3, 24),)) if drafts else None
        made = Scheduler(limits, config, proposer=proposer)
        made.speculation.costs, made.speculation._min_speed = FREE, 0.0
        self.runner = NotedRunner(limits)
        self.engine = Engine(made, self.runner, overlap=overlap)
        self.told: dict[Key, Told] = {}
        self.n = self.version = self.n_asked = 0
        self.answers: dict[str, Any] = {}

    # rules

    @rule(
        prefix=st.sampled_from([0, 4, 8, 12]),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
        max_tokens=st.integers(1, 14),
        n=st.sampled_from([1, 1, 2]),
    )
    def add(self, prefix: int, tail: list[int], max_tokens: int, n: int) -> None:
        self.n += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, n=n, ignore_eos=True)
        request = Request(id=f"r{self.n}", prompt_ids=(*STEM[:prefix], *tail), params=params)
        for i in range(n):
            self.told[request.id, i] = Told(request)
        self.engine.submit(request)

    @rule(k=st.integers(1, 8))
    def steps(self, k: int) -> None:
        for _ in range(k):
            self.step()

    @precondition(lambda self: self.n)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        id = f"r{data.draw(st.integers(1, self.n))}"
        self.may_abort({id})
        self.engine.cancel(id)

    @rule(pick=st.integers(0, 3))
    def preempt(self, pick: int) -> None:
        resources = self.engine.scheduler.resources
        able = [seq for seq in resources.running if not policy.protected(seq)]
        if able:
            resources.preempt(able[pick % len(able)])

    @precondition(lambda self: self.n)
    @rule(again=st.booleans())
    def evict(self, again: bool) -> None:
        """What nobody reads goes to host memory, where there is some; a request may ask for it ``again``."""
        self.steps(12)
        self.engine.scheduler.resources.cache.evict(9)
        self.add(12, [1], 3, 1)
        if again:
            self.steps(6)
            self.add(12, [2], 3, 1)

    @rule(running=st.sampled_from(POLICIES))
    def update(self, running: str) -> None:
        self.step()  # all that was handed in before is with the scheduler, or waits
        before, old, n_host = self.live(), self.runner.weights, len(self.runner.host)
        self.version += 1
        fields = {"source": self.version, "version": f"v{self.version}", "running": running}
        if running == "mix":  # whoever has KV may go on with it
            mixed, self.runner.mixed = self.runner.mixed, self.runner.mixed | before
        if running == "abort":
            self.may_abort({id for id, _ in before})
        answer = self.ask("update_weights", **fields)
        if answer is not None and answer.error is not None:
            assert answer.error_code in REFUSED
            if running == "mix":
                self.runner.mixed = mixed
            return
        assert answer is not None or running == "finish", "an update that waits"
        self.came["updates over pages in host memory"] += n_host > 0
        if running == "abort":
            assert not {key for key in before if not self.told[key].ends}, "some are not aborted"
        if running in ("finish", "beside"):
            for key in before:
                if self.told[key].only is None:
                    self.told[key].only = old

    @precondition(lambda self: self.is_open)
    @rule(mode=st.sampled_from(["abort", "keep", "finish"]), really=SELDOM)
    def pause(self, mode: str, really: bool) -> None:
        self.step()
        if not really:
            return
        if mode == "abort":
            self.may_abort({id for id, _ in self.live()})
        self.command("pause", running=mode)

    @precondition(lambda self: not self.is_open)
    @rule()
    def resume(self) -> None:
        self.command("resume")

    @precondition(lambda self: not self.is_open)
    @rule()
    def go_on(self) -> None:
        self.command("wake")
        self.command("resume")

    @precondition(lambda self: self.is_open)
    @rule(parts=st.sampled_from([(), ("kv",), ("weights",)]), really=SELDOM)
    def sleep(self, parts: tuple[str, ...], really: bool) -> None:
        self.step()
        if really:
            self.command("sleep", parts=list(parts))

    @precondition(lambda self: not self.is_open)
    @rule(parts=st.sampled_from([(), ("kv",), ("weights",)]))
    def wake(self, parts: tuple[str, ...]) -> None:
        self.command("wake", parts=list(parts))

    # what they are made of

    @property
    def is_open(self) -> bool:
        """Nothing is paused or asleep."""
        return not (self.engine.hold.paused or self.engine.hold.asleep)

    def live(self) -> set[Key]:
        """Those that the scheduler has."""
        groups = self.engine.scheduler.groups
        return {(s.request.id, s.index) for group in groups.values() for s in group if not s.finish}

    def may_abort(self, ids: set[str]) -> None:
        for (id, _), told in self.told.items():
            told.may_abort |= id in ids

    def command(self, action: Any, **fields: Any) -> None:
        answer = self.ask(action, **fields)
        assert answer is None or answer.error is None or answer.error_code in REFUSED, answer

    def ask(self, action: Any, **fields: Any) -> Any:
        """The answer, None while it waits."""
        self.n_asked += 1
        id = f"c{self.n_asked}"
        self.engine.ask(Control(id=id, action=action, **fields))
        self.step()
        return self.answers.get(id)

    def step(self) -> None:
        hold, launched = self.engine.hold, self.runner.n_launched
        quiet = (hold.still or hold.asleep) and not self.engine.n_unread
        for output in self.engine.step():
            self.take(output)
        assert not quiet or self.runner.n_launched == launched, "a step while none may be planned"
        for answer in self.engine.take_answers():
            assert answer.id not in self.answers, "a command is answered twice"
            self.answers[answer.id] = answer
        self.engine.scheduler.resources.check()

    def take(self, output: Output) -> None:
        key = output.request_id, output.index
        told = self.told[key]
        assert not told.ends, f"{key} says something behind its end"
        if output.finish is not None:
            told.ends.append(output.finish)
        if not output.token_ids:
            return
        weights, drawn = self.runner.drew[key].popleft()
        tokens = list(output.token_ids)
        assert tokens == drawn[: len(tokens)], "tokens of another row"
        assert output.weights == (f"v{weights}" if weights else "0"), "a span of another version"
        assert told.only in (None, weights), f"{key} has to end under {told.only}, not {weights}"
        assert weights >= max(told.weights, default=0), "older weights than before"
        if key not in self.runner.mixed:
            text = [*told.request.prompt_ids, *told.tokens]
            for token in tokens:
                assert token == self.next_token(told.request, text, weights), (key, weights)
                text.append(token)
        told.tokens += tokens
        told.weights += [weights] * len(tokens)

    @staticmethod
    def next_token(request: Request, text: list[int], weights: int) -> int:
        return next_token(request, text, weights, vocab_size=VOCAB)

    @invariant()
    def no_assertion_of_the_runner_failed(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.scheduler.counters()["step_faults_total"] == 0

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.command("wake")
        for _ in range(3):  # what waits for requests to end lets nobody resume
            self.command("resume")
            for _ in range(1000):
                if self.engine.busy:
                    self.step()
        assert not self.engine.busy, "the workload did not end"
        for key, told in self.told.items():
            assert len(told.ends) == 1, f"{key} has the ends {told.ends}"
            whole = len(told.tokens) == told.request.params.max_tokens
            assert told.ends[0] is Finish.LENGTH if whole else told.may_abort, (key, told)
        assert self.runner.old is None, "weights of before that nobody needs"
