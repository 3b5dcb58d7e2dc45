"""The loop over the real scheduler and page cache: exact tokens, faults, replay, wire."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from jserve.config import EngineConfig
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.client import ProcClient
from jserve.engine.engine import Engine
from jserve.ports import RunnerLimits
from jserve.sampling import SamplingParams
from jserve.sched.record.journal import JournalFile
from jserve.sched.record.replay import replay
from jserve.sched.scheduler import Scheduler
from jserve.testing import FakeRunner
from jserve.types import Finish, Request
from tests.engine import child
from tests.engine.fakes import HOST_CORE_LIMITS

LIMITS = RunnerLimits(
    n_slots=6,
    max_rows=6,
    max_decode_rows=6,
    max_prefill_tokens=12,
    max_prefill_rows=2,
    max_drafts=0,
    n_pages=49,
    page_size=4,
    max_model_len=64,
    vocab_size=50,
)
CONFIG = EngineConfig.of(max_num_seqs=6, max_num_batched_tokens=18)


class FaultyRunner(FakeRunner):
    """Raises at the calls (launches and collects, counted) in ``faults``; can start anew."""

    def __init__(self, faults=()):
        self.faults, self.n_calls, self.n_resets = set(faults), 0, -1
        super().__init__(LIMITS)

    def reset(self):
        self.n_resets += 1
        super().reset()

    def launch(self, plan):
        self._maybe_raise()
        return super().launch(plan)

    def collect(self, flight):
        self._maybe_raise()
        return super().collect(flight)

    def _maybe_raise(self):
        self.n_calls += 1
        if self.n_calls in self.faults:
            raise RuntimeError("device fault")


def workload(rng, n=12):
    """Requests whose prompts share prefixes, so that the cache is in play."""
    stem = [rng.randrange(50) for _ in range(24)]
    return [
        Request(
            id=f"r{i}",
            prompt_ids=(*stem[: rng.randrange(25)], *(rng.randrange(50) for _ in range(1 + i % 3))),
            params=SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 20), n=1 + i % 2),
        )
        for i in range(n)
    ]


def run(engine, requests, rng):
    """Outputs of requests that arrive while others run."""
    outputs, left = [], list(requests)
    while left or engine.busy:
        while left and rng.random() < 0.5:
            engine.submit(left.pop())
        outputs += engine.step()
    return outputs


def by_choice(outputs):
    found = {}
    for out in outputs:
        tokens, ends = found.setdefault((out.request_id, out.index), ([], []))
        tokens += out.token_ids
        ends += [out.finish] if out.finish else []
    return found


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_those_of_the_definition(overlap, seed):
    rng = random.Random(seed)
    runner = FaultyRunner()
    engine = Engine(Scheduler(LIMITS, CONFIG), runner, overlap=overlap)
    requests = workload(rng)
    found = by_choice(run(engine, requests, rng))
    for r in requests:
        for i in range(r.params.n):
            assert found[r.id, i] == (runner.expected(r, i), [Finish.LENGTH])
    assert not engine.scheduler.has_work


@pytest.mark.one_in(4)
@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("n_faults", [1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_faults_that_do_not_come_back_change_no_token(overlap, n_faults, seed, tmp_path):
    rng = random.Random(seed)
    runner = FaultyRunner(faults=rng.sample(range(3, 60), n_faults))
    now = [0.0]

    def clock():
        now[0] += 0.01
        return now[0]

    path = tmp_path / "journal"
    with path.open("wb") as file:
        scheduler = Scheduler(LIMITS, CONFIG, journal=JournalFile(file))
        engine = Engine(scheduler, runner, overlap=overlap, clock=clock)
        requests = workload(rng, n=16)
        outputs = run(engine, requests, rng)
    found = by_choice(outputs)
    scheduler.resources.check()
    for r in requests:
        for i in range(r.params.n):
            tokens, ends = found[r.id, i]
            expected = runner.expected(r, i)
            assert (tokens, ends) == (expected, [Finish.LENGTH])
    assert runner.n_resets == n_faults
    assert replay(path, LIMITS, CONFIG).outputs == outputs


def test_a_request_that_fits_nothing_is_refused_with_its_code():
    engine = Engine(Scheduler(LIMITS, CONFIG), FaultyRunner())
    engine.submit(
        Request(id="a", prompt_ids=tuple(range(40)) * 2, params=SamplingParams(max_tokens=1))
    )
    (out,) = engine.drain()
    assert (out.finish, out.error_code) == (Finish.ERROR, "context_length_exceeded")


async def test_the_host_core_in_its_own_process():
    engine = AsyncEngine(
        lambda: ProcClient(EngineConfig.of(model="host core"), command=child.command)
    )
    await engine.start()
    rng = np.random.default_rng(0)
    requests = [
        Request(
            id=f"r{i}",
            prompt_ids=tuple(map(int, rng.integers(0, 1000, 1 + i))),
            params=SamplingParams(temperature=0.0, max_tokens=10, logprobs=2),
        )
        for i in range(60)
    ]

    async def tokens_of(r):
        outputs = [out async for out in engine.generate(r)]
        assert [len(out.logprobs) for out in outputs] == [len(out.token_ids) for out in outputs]
        return [t for out in outputs for t in out.token_ids]

    results = await asyncio.gather(*map(tokens_of, requests))
    oracle = FakeRunner(HOST_CORE_LIMITS)
    assert results == [oracle.expected(r) for r in requests]
    assert engine.stats().values["pages_total"] == HOST_CORE_LIMITS.n_pages - 1
    await engine.close()
