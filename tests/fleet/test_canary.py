"""A canary that is promoted or rolled back by what is measured: the verdict as a function, and a fleet that obeys."""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from jserve.errors import BadRequest, error_of
from jserve.fleet.canary import (
    GROWTH,
    LEAST_S,
    Analysis,
    CanaryWatch,
    Figures,
    Histogram,
    verdict,
)
from jserve.types import Finish, Output
from tests.fleet.test_face import until
from tests.fleet.test_rollout import World, asked, models, quiet, told

__all__ = ["models", "quiet"]  # fixtures
SECONDS = st.floats(1e-4, 100.0)


def figures(
    ttft: Any = (), tpot: Any = (), ended: int = 0, failed: int = 0, faults: Any = ()
) -> Figures:
    made = Figures(ended=ended, failed=failed, faults=list(faults))
    for histogram, values in ((made.ttft, ttft), (made.tpot, tpot)):
        for seconds in values:
            histogram.observe(seconds)
    return made


@st.composite
def sides(draw: Any) -> Figures:
    ttft = draw(st.lists(SECONDS, max_size=60))
    tpot = draw(st.lists(SECONDS, max_size=60))
    ended = draw(st.integers(0, 300))
    return figures(ttft, tpot, ended, draw(st.integers(0, ended)))


BOUNDS = st.builds(
    Analysis,
    min_requests=st.integers(1, 150),
    max_error_share=st.floats(0.0, 0.5),
    max_ttft_ratio=st.floats(1.0, 3.0),
    max_tpot_ratio=st.floats(1.0, 3.0),
    quantile=st.floats(0.05, 0.99),
    progress_deadline_s=st.just(100.0),
)


@given(st.lists(SECONDS, min_size=1, max_size=80), st.floats(0.01, 0.999))
def test_a_quantile_is_that_of_the_values_up_to_a_bucket(values: list[float], q: float):
    made = Histogram()
    for seconds in values:
        made.observe(seconds)
    exact = sorted(values)[max(1, -int(-len(values) * q // 1)) - 1]
    found = made.quantile(q)
    assert found is not None
    assert exact * (1 - 1e-9) <= found <= max(LEAST_S, exact * GROWTH) * (1 + 1e-9)
    low, high = made.quantile(q, -3.0), made.quantile(q, 3.0)
    assert low is None or low <= found
    assert high is None or high >= found


@given(sides(), sides(), BOUNDS, st.floats(0.0, 99.0))
def test_a_verdict_keeps_its_promises(canary: Figures, rest: Figures, bounds: Analysis, s: float):
    found = verdict(canary, rest, bounds, s)
    assert found == verdict(canary, rest, bounds, s)
    late = verdict(canary, rest, bounds, 100.0)
    if found.action == "wait":  # the deadline ends it, and changes nothing else
        assert late.action == "roll_back"
        assert found.why in late.why
    else:
        assert late == found
    if found.action == "promote":
        assert min(canary.ended, rest.ended) >= bounds.min_requests
        share = canary.failed / canary.ended
        assert share <= rest.error_share + bounds.max_error_share + 1e-9
        for own, others, ratio in (
            (canary.ttft, rest.ttft, bounds.max_ttft_ratio),
            (canary.tpot, rest.tpot, bounds.max_tpot_ratio),
        ):
            mine, theirs = own.quantile(bounds.quantile), others.quantile(bounds.quantile)
            if mine is not None and theirs is not None:
                assert mine <= ratio * GROWTH * theirs * (1 + 1e-9)
    broken = figures(ended=canary.ended, faults=["it died"])
    assert verdict(broken, rest, bounds, s) == ("roll_back", "it died")


@given(sides(), BOUNDS)
def test_one_that_is_like_the_others_is_promoted_once_enough_ended(side: Figures, bounds: Analysis):
    found = verdict(side, side, bounds, 0.0)
    assert found.action == ("promote" if side.ended >= bounds.min_requests else "wait")


@given(sides(), sides(), BOUNDS, st.integers(1, 100), st.floats(1.0, 50.0))
def test_what_is_worse_is_never_judged_better(
    canary: Figures, rest: Figures, bounds: Analysis, more: int, slower: float
):
    order = ["roll_back", "wait", "promote"]
    before = order.index(verdict(canary, rest, bounds, 0.0).action)
    failing = figures(ended=canary.ended, failed=min(canary.ended, canary.failed + more))
    failing.ttft, failing.tpot = canary.ttft, canary.tpot
    assert order.index(verdict(failing, rest, bounds, 0.0).action) <= before
    slow = figures(ended=canary.ended, failed=canary.failed)
    for mine, theirs in ((slow.ttft, canary.ttft), (slow.tpot, canary.tpot)):
        for bucket, n in theirs._counts.items():
            for _ in range(n):
                mine.observe(LEAST_S * GROWTH**bucket * slower)
    assert order.index(verdict(slow, rest, bounds, 0.0).action) <= before


def lognormal(rng: random.Random, n: int, factor: float = 1.0) -> list[float]:
    return [factor * 0.2 * rng.lognormvariate(0.0, 0.5) for _ in range(n)]


@pytest.mark.parametrize("n", [100, 400])
def test_how_often_it_is_right(n: int):
    """Of 80 canaries: those that are as fast are almost never rolled back, those of twice the time to first token
    never promoted at the first look, and nearly all rolled back with more requests."""
    rng = random.Random(n)
    good, bad = [], []
    for _ in range(80):
        rest = figures(lognormal(rng, 3 * n), ended=3 * n)
        good.append(verdict(figures(lognormal(rng, n), ended=n), rest, Analysis(), 0.0).action)
        bad.append(verdict(figures(lognormal(rng, n, 2.0), ended=n), rest, Analysis(), 0.0).action)
    assert good.count("roll_back") <= 1
    assert good.count("promote") >= 68
    assert bad.count("promote") == 0
    if n == 400:
        assert bad.count("roll_back") >= 76


@pytest.mark.parametrize(
    ("failed", "ended", "action"),
    [(1, 40, "wait"), (2, 2, "roll_back"), (2, 40, "roll_back"), (1, 100, "promote")],
)
def test_failures_are_seen_before_enough_requests_are(failed: int, ended: int, action: str):
    rest = figures(ended=500)
    assert verdict(figures(ended=ended, failed=failed), rest, Analysis(), 0.0).action == action
    unwell = figures(ended=500, failed=250)
    assert verdict(figures(ended=100, failed=50), unwell, Analysis(), 0.0).action == "promote"
    alike = figures(ended=39, failed=31)  # 31 / 39 * 39 is below 31
    bounds = Analysis(min_requests=1, max_error_share=0.0)
    assert verdict(alike, alike, bounds, 0.0).action == "promote"


@pytest.mark.parametrize(
    ("given_", "field"),
    [
        ({"min_requests": 0}, "min_requests"),
        ({"min_requests": 1.5}, "min_requests"),
        ({"max_error_share": -0.1}, "max_error_share"),
        ({"max_ttft_ratio": 0.9}, "max_ttft_ratio"),
        ({"max_tpot_ratio": True}, "max_tpot_ratio"),
        ({"quantile": 1.0}, "quantile"),
        ({"progress_deadline_s": float("nan")}, "progress_deadline_s"),
        ({"p99": 1}, "p99"),
    ],
)
def test_bounds_are_refused_by_name(given_: dict[str, Any], field: str):
    with pytest.raises(BadRequest, match=field) as caught:
        Analysis.of(given_)
    assert caught.value.field == f"analysis.{field}"


def output(
    id: str, n: int = 0, finish: Finish | None = None, code: str = "", index: int = 0
) -> Output:
    error = code if finish is Finish.ERROR else None
    return Output(
        request_id=id, index=index, token_ids=(1,) * n, finish=finish, error=error, error_code=error
    )


def test_what_is_counted():
    watch = CanaryWatch(Analysis(), "", began=10.0)
    first, other = SimpleNamespace(), SimpleNamespace()
    watch.told(output("early", 3, Finish.STOP), first, 9.0, 11.0, tried=True)
    assert (watch.canary.ended, watch.canary.ttft.n) == (0, 0)
    for at, n, finish in ((11.5, 1, None), (12.0, 4, None), (12.5, 5, Finish.LENGTH)):
        watch.told(output("a", n, finish), first, 11.0, at, tried=True)
    ttft, tpot = watch.canary.ttft.quantile(0.5), watch.canary.tpot.quantile(0.5)
    assert ttft is not None
    assert tpot is not None
    assert (watch.canary.ended, watch.canary.failed) == (1, 0)
    assert 0.5 <= ttft <= 0.5 * GROWTH
    assert 1.0 / 9 <= tpot <= 1.0 / 9 * GROWTH
    # one that went on elsewhere ends there, and has no time of its own
    watch.told(output("b", 1), first, 11.0, 11.5, tried=True)
    watch.told(output("b", 5, Finish.STOP), other, 12.0, 13.0, tried=False)
    assert (watch.rest.ended, watch.rest.ttft.n, watch.rest.tpot.n) == (1, 0, 0)
    for code, ended, failed in (
        ("overloaded", 0, 0),
        ("invalid_value", 0, 0),
        ("weights_changed", 0, 0),
        ("engine_step_failed", 1, 1),
        ("deadline_exceeded", 1, 1),
    ):
        assert error_of(code, "").status >= 400
        made = CanaryWatch(Analysis(), "", began=0.0)
        made.told(output("c", 0, Finish.ERROR, code), first, 1.0, 2.0, tried=True)
        assert (made.canary.ended, made.canary.failed) == (ended, failed), code
    made = CanaryWatch(Analysis(), "", began=0.0)
    made.told(output("d", 0, Finish.ERROR, "weights_error"), first, 1.0, 2.0, tried=True)
    assert made.verdict(3.0).action == "roll_back"
    made.told(output("e", 1, index=1), first, 1.0, 2.0, tried=True)
    made.forget("e", 2)
    assert not made._open


BOUNDS_OF_TEST = {"min_requests": 12, "max_ttft_ratio": 2.0, "max_tpot_ratio": 2.0, "quantile": 0.5}


async def traffic(world: World, stop: asyncio.Event, errors: list[str]) -> None:
    """Requests until ``stop``, six at a time."""
    n = 0

    async def client() -> None:
        nonlocal n
        while not stop.is_set():
            n += 1
            errors.extend((await told(world, asked(n)))[2])

    await asyncio.gather(*(client() for _ in range(6)))


async def judged(world: World, directory: str, **bounds: float) -> tuple[dict[str, Any], list[str]]:
    """The facts once a canary of ``directory`` is over, and the errors that clients had."""
    stop, errors = asyncio.Event(), list[str]()
    running = asyncio.ensure_future(traffic(world, stop, errors))
    try:
        analysis = BOUNDS_OF_TEST | bounds
        facts = await world.order(source=directory, version="try", canary=0.5, analysis=analysis)
        assert facts["canary"]["analysis"]["verdict"] == "wait"
        await until(lambda: not world.fleet._rollout.has_canary, 40.0)
        await until(lambda: not world.fleet._rollout.busy, 10.0)
    finally:
        stop.set()
        await asyncio.wait_for(running, 20.0)
    return await world.order("weight_info"), errors


async def test_a_good_canary_is_promoted(models, caplog):
    caplog.set_level(logging.WARNING)
    async with World(2, models(1)) as world:
        facts, errors = await judged(world, models(2))
        assert not errors
        assert (facts["canary"], set(facts["replicas"].values())) == (None, {"try"})
        last = facts["last_canary"]
        assert (last["version"], last["outcome"]) == ("try", "promoted")
        assert "no latency is above its bound" in last["why"]
        assert any("canary try is promoted" in record.message for record in caplog.records)
        assert {one.weights for one in world.fleet.members} == {"w2"}
        facts = await world.order("rollback_weights")
        assert set(facts["replicas"].values()) == {"0"}


async def test_a_slow_canary_is_rolled_back(models):
    directory = models(2)
    (Path(directory) / "slow").write_text("8")
    async with World(2, models(1)) as world:
        # what the fleet itself knows of slow replicas is another matter
        world.fleet.suspicion.look = lambda now: []  # type: ignore[method-assign]
        facts, errors = await judged(world, directory, max_tpot_ratio=1.5, min_requests=30)
        assert not errors
        assert (facts["canary"], set(facts["replicas"].values())) == (None, {"0"})
        last = facts["last_canary"]
        assert (last["version"], last["outcome"]) == ("try", "rolled_back")
        assert "ms, of the others" in last["why"]
        assert {one.weights for one in world.fleet.members} == {"w1"}


async def test_a_canary_whose_weights_are_broken_is_rolled_back(models):
    directory = models(2)
    (Path(directory) / "broken").write_text("")
    async with World(2, models(1)) as world:
        facts, errors = await judged(world, directory)
        assert set(errors) == {"weights_error"}
        assert set(facts["replicas"].values()) == {"0"}
        assert facts["last_canary"]["outcome"] == "rolled_back"
        assert "weights_error" in facts["last_canary"]["why"]


@pytest.mark.parametrize("how", ["dies", "hangs", "is slow"])
async def test_a_canary_that_dies_or_hangs_is_rolled_back(models, how):
    async with World(3, models(1)) as world:
        fleet = world.fleet
        bounds = {"min_requests": 1000}
        await world.order(source=models(2), version="try", canary=0.3, analysis=bounds)
        [canary] = [one for one in fleet.members if one.weights == "w2"]
        [other] = [one for one in fleet.members if one.weights == "w1"][:1]
        fleet._out(other, silent=False)  # which says nothing of the canary
        assert fleet._rollout.judge() is None
        if how == "dies":
            world.source.kill(canary.name)
            await until(lambda: len(fleet.members) == 2)
        else:
            fleet._out(canary, silent=how == "hangs")
        await until(lambda: not fleet._rollout.has_canary)
        last = (await world.order("weight_info"))["last_canary"]
        assert last["outcome"] == "rolled_back"
        said = {"dies": "it is lost", "hangs": "it says nothing", "is slow": "it is slow"}
        assert last["why"].startswith(f"{canary.name}: {said[how]}")
        await until(lambda: {one.weights for one in fleet.members} == {"w1"})


async def test_a_canary_that_cannot_be_promoted_is_rolled_back(models, monkeypatch):
    monkeypatch.setattr("jserve.fleet.rollout.RETRY_S", 0.05)
    directory = models(2)
    async with World(2, models(1)) as world:
        await world.order(source=directory, version="try", canary=0.5, analysis={})
        (Path(directory) / "weights").unlink()
        watch = world.fleet._rollout._watch
        assert watch is not None
        watch.canary.ended = watch.rest.ended = 100
        await until(lambda: not world.fleet._rollout.has_canary)
        facts = await world.order("weight_info")
        assert set(facts["replicas"].values()) == {"0"}
        assert "the promotion failed" in facts["last_canary"]["why"]


async def test_one_of_which_too_little_is_seen_is_rolled_back_in_time(models):
    async with World(2, models(1)) as world:
        bounds = {"progress_deadline_s": 0.3}
        facts = await world.order(source=models(2), canary=0.5, analysis=bounds)
        analysis = facts["canary"]["analysis"]
        assert (analysis["verdict"], analysis["why"]) == ("wait", "the canary ended 0 of 100")
        await until(lambda: not world.fleet._rollout.has_canary)
        assert set(await world.versions()) == {"0"}
        why = (await world.order("weight_info"))["last_canary"]["why"]
        assert why == "the deadline of 0.3 s: the canary ended 0 of 100"


async def test_an_operator_may_decide_before(models):
    async with World(2, models(1)) as world:
        await world.order(source=models(2), version="try", canary=0.5, analysis={})
        facts = await world.order("rollback_weights")
        assert facts["last_canary"] == {
            "version": "try",
            "outcome": "rolled_back",
            "why": "asked for",
        }
        assert world.fleet._rollout._watch is None
        await world.order(source=models(2), version="two", canary=0.5, analysis={})
        # the same one, to be judged by hand from now on
        facts = await world.order(source=models(2), version="two", canary=0.5)
        assert "analysis" not in facts["canary"]
        facts = await world.order(source=models(2), version="two")
        assert facts["last_canary"]["outcome"] == "promoted"
