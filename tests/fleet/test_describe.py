"""The wait that a replica claims is the work of those who stand before a newcomer."""

from __future__ import annotations

import pytest

from jserve.config import EngineConfig
from jserve.engine.engine import Engine
from jserve.fleet.describe import view_of
from jserve.sampling import SamplingParams
from jserve.sched.scheduler import Scheduler
from jserve.sim.costs import Device
from jserve.sim.device import SimClock, SimRunner
from jserve.sim.simulate import Setup, limits_of
from jserve.types import Request

PREFIX, OWN, OUT = 160, 16, 4


class Costs:
    """A hundredth of a second for decoding, a thousandth per prompt token on top."""

    def seconds(self, n_decode: int, n_prefill: int, n_context: int) -> float:
        return 0.01 + 0.001 * n_prefill


class Replica:
    """An engine on a simulated device, of two slots."""

    def __init__(self, slots: int = 2) -> None:
        options = {"max_num_seqs": slots, "max_num_batched_tokens": 64, "page_size": 8}
        config = EngineConfig.of(**options, max_queue_s=0, max_waiting=1000)
        device = Device(name="x", costs=Costs(), n_pages=400, max_model_len=512, host_s=0.0)
        limits = limits_of(Setup(config=config, device=device))
        self.clock = SimClock()
        runner = SimRunner(limits, Costs(), self.clock, lambda choice: [7] * OUT)
        self.engine = Engine(Scheduler(limits, config), runner, clock=self.clock)
        self.n = 0

    def send(self, n: int, prefix: int) -> None:
        """``n`` requests with 160 tokens that start with ``prefix`` and 16 of their own."""
        for _ in range(n):
            self.n += 1
            ids = (prefix,) * PREFIX + tuple(1000 + self.n * OWN + i for i in range(OWN))
            params = SamplingParams(max_tokens=OUT)
            self.engine.submit(Request(id=str(self.n), prompt_ids=ids, params=params))

    def run(self) -> None:
        while self.engine.busy:
            self.engine.step()

    def wait_s(self) -> float:
        return view_of(self.engine.scheduler, 0).wait_s["standard"]

    def waits(self, n: int, prefix: int) -> tuple[float, float]:
        """(claimed, observed) seconds until a request behind ``n`` others of that prefix is admitted."""
        self.send(n, prefix)
        for _ in range(3):
            self.engine.step()
        claimed, began, last = self.wait_s(), self.clock.now, str(self.n)
        groups = self.engine.scheduler.groups
        while groups[last][0].lease is None:
            self.engine.step()
        return claimed, self.clock.now - began


def test_an_idle_replica_makes_nobody_wait():
    assert Replica().wait_s() == 0.0


def test_a_newcomer_waits_for_as_many_ends_as_it_says():
    replica = Replica(slots=2)
    before = [0, 0, 1, 2, 3]
    for n in before:
        assert view_of(replica.engine.scheduler, 0).n_before == n
        replica.send(1, 500)
        replica.engine.step()


def test_a_token_of_an_answer_costs_its_share_of_a_full_step():
    """Of rows as long as the longest of late 400 pages of 8 tokens hold more than two slots take, and fewer than 64."""
    for slots in (2, 64):
        replica = Replica(slots)
        replica.send(1, 500)
        replica.run()
        scheduler = replica.engine.scheduler
        rows = min(slots, scheduler.demand._kv_tokens // scheduler.gate.n_context)
        assert rows in (2, 17)
        assert view_of(scheduler, 0).token_s == pytest.approx(0.01 / rows, rel=0.03)


def test_prompts_of_which_the_cache_has_most_are_no_long_wait():
    """Twenty cold prompts, and then as many that share a prefix with what is there."""
    replica = Replica()
    for prefix in range(20):
        replica.send(1, prefix + 100)
    replica.run()
    cold, _ = replica.waits(20, 500)
    replica.run()
    for _ in range(2):
        replica.send(20, 500)
        replica.run()
    found, observed = replica.waits(20, 500)
    assert found < 0.4 * cold
    assert found == pytest.approx(observed, rel=0.35)


def test_without_a_free_slot_steps_count_that_decode():
    """Two slots are busy for as long as an answer has tokens, however short the prompts are."""
    few, many = Replica(2), Replica(64)
    for replica in (few, many):
        replica.send(1, 500)
        replica.run()
    waits = [replica.waits(20, 500)[0] for replica in (few, many)]
    assert waits[0] > 2 * waits[1]
