"""Records of steps: they add up to the work done, are taken once, and reach the front numbered through."""

from __future__ import annotations

import asyncio
import random

import pytest

from jserve.engine.async_engine import AsyncEngine
from jserve.engine.engine import Engine
from jserve.engine.steplog import StepLog
from jserve.engine.wire import Stats, StepRecord
from jserve.sched.scheduler import Scheduler
from jserve.testing import FakeRunner
from tests.engine.fakes import ResettableRunner
from tests.engine.test_async_engine import client_of, outputs_of, request
from tests.engine.test_engine import engine_of
from tests.engine.test_with_scheduler import CONFIG, LIMITS, workload


def record(n: int) -> StepRecord:
    return StepRecord(
        at=float(n), device_us=1.0, n_rows=1, n_prefill_rows=0, n_prefill_tokens=0, n_drawn=n
    )


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_records_add_up_to_the_work(overlap: int) -> None:
    engine = Engine(Scheduler(LIMITS, CONFIG), FakeRunner(LIMITS), overlap=overlap)
    for asked in workload(random.Random(5)):
        engine.submit(asked)
    outputs, records, taken = [], [], []
    while engine.busy:
        outputs += engine.step()
        taken = engine.stats().steps
        records += taken
    assert len(records) == engine.n_steps > 20
    assert engine.stats().steps == [], "each is told once"
    values = engine.stats().values
    assert sum(r.n_prefill_tokens for r in records) == values["prefill_tokens_total"] > 0
    n_tokens = sum(len(out.token_ids) for out in outputs)
    drawn = sum(r.n_drawn for r in records)
    assert drawn == n_tokens if overlap == 0 else drawn >= n_tokens  # rows that ran over their end
    assert [r.at for r in records] == sorted(r.at for r in records)
    for r in records:
        assert 0 <= r.n_prefill_rows <= r.n_rows <= LIMITS.max_rows
        assert (r.n_prefill_rows == 0) is (r.n_prefill_tokens == 0)
        assert r.n_prefill_tokens <= LIMITS.max_prefill_tokens
    assert any(0 < r.n_prefill_rows < r.n_rows for r in records), "mixed steps were to be seen"


def test_steps_that_land_before_a_swap_are_recorded_too() -> None:
    engine = engine_of(ResettableRunner(), overlap=1)
    engine.submit(request("a"))
    engine.step()
    assert engine.n_in_flight == 1
    engine.swap(lambda: None)
    assert (len(engine.stats().steps), engine.n_steps) == (1, 1)


def test_what_nobody_takes_is_forgotten() -> None:
    log = StepLog(kept=3)
    log._records.extend(map(record, range(5)))
    assert [r.n_drawn for r in log.take()] == [2, 3, 4]
    assert log.take() == []


@pytest.mark.parametrize("kind", ["thread", "process"])
async def test_records_reach_the_front(kind: str) -> None:
    engine = AsyncEngine(lambda: client_of(kind))
    await engine.start()
    await outputs_of(engine, request("a", max_tokens=9))
    for _ in range(200):
        if engine.stats().running == 0 and engine.steps:
            break
        await asyncio.sleep(0.01)
    numbers = [number for number, _ in engine.steps]
    assert numbers == list(range(len(numbers)))
    assert sum(r.n_drawn for _, r in engine.steps) >= 9
    await engine.close()


async def test_numbers_go_on_when_the_engine_starts_anew() -> None:
    engine = AsyncEngine(lambda: client_of("thread"))
    await engine.start()
    assert engine.client is not None
    for batch in ([record(1), record(2)], [], [record(3)]):
        engine._replica._on_message(Stats(step=1, steps=batch))
    engine._replica.stats = Stats()  # what a restart does
    engine._replica._on_message(Stats(step=0, steps=[record(4)]))
    assert [(n, r.n_drawn) for n, r in engine.steps] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    await engine.close()
