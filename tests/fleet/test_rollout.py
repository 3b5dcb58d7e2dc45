"""Other weights for replicas that serve: one after the other, a share first, back again, and whoever joins."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import uuid
from pathlib import Path
from typing import Any

import pytest

from jserve.engine.wire import Control
from jserve.errors import BadRequest, WeightsError
from jserve.fleet.face import FleetEngine
from jserve.operations import EngineState
from jserve.sampling import SamplingParams
from jserve.types import Request
from tests.fleet.fakes import OPTIONS, ThreadSource
from tests.fleet.test_face import until


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


@pytest.fixture
def models(tmp_path) -> Any:
    """Makes a directory of the weights of this number; 0: of none."""

    def made(number: int, seconds: float = 0.0) -> str:
        directory = tmp_path / f"m{number}"
        directory.mkdir(exist_ok=True)
        if number:
            (directory / "weights").write_text(str(number))
        (directory / "seconds").write_text(str(seconds))
        return str(directory)

    return made


class World:
    def __init__(self, n: int, model: str) -> None:
        self.source = ThreadSource(n, build="tests.fleet.fakes:weighed", model=model, **OPTIONS)
        self.fleet = FleetEngine(self.source, model=model)

    async def __aenter__(self) -> World:
        await self.fleet.start()
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.fleet.close()

    async def order(self, action: str = "update_weights", **fields: Any) -> dict[str, Any]:
        return await self.fleet.control(Control(id=uuid.uuid4().hex, action=action, **fields))  # type: ignore[arg-type]

    async def versions(self) -> list[str]:
        return list((await self.order("weight_info"))["replicas"].values())


def asked(i: int = 0, max_tokens: int = 12) -> Request:
    return Request(
        id=uuid.uuid4().hex,
        prompt_ids=tuple((7 * i + j) % 250 for j in range(40)),
        params=SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=i),
    )


async def told(world: World, request: Request) -> tuple[list[int], list[str], list[str]]:
    """(ids, the versions of the weights that drew them, errors)"""
    outputs = [out async for out in world.fleet.generate(request)]
    ids = [token for out in outputs for token in out.token_ids]
    versions = [out.weights for out in outputs for _ in out.token_ids]
    return ids, versions, [out.error_code or "" for out in outputs if out.error]


async def alone(model: str, requests: list[Request]) -> list[list[int]]:
    """Answers of an engine that never had other weights."""
    async with World(1, model) as world:
        again = [dataclasses.replace(one, id=uuid.uuid4().hex) for one in requests]
        return [(await told(world, one))[0] for one in again]


async def test_all_get_the_new_weights_and_answers_go_on_meanwhile(models):
    requests = [asked(i) for i in range(6)]
    old, new = await alone(models(1), requests), await alone(models(2), requests)
    assert old != new
    async with World(3, models(1)) as world:
        rolling = asyncio.ensure_future(world.order(source=models(2, 0.3), version="two"))
        n_old = n_new = 0
        while not rolling.done():
            again = [dataclasses.replace(one, id=uuid.uuid4().hex) for one in requests]
            answers = await asyncio.gather(*(told(world, one) for one in again))
            for i, (ids, versions, errors) in enumerate(answers):
                assert not errors
                if set(versions) == {"0"}:
                    assert ids == old[i]
                    n_old += 1
                elif set(versions) == {"two"}:
                    assert ids == new[i]
                    n_new += 1
                else:  # it ran while its replica's weights changed, and went on with the new ones
                    assert (versions, ids[0]) == (sorted(versions), old[i][0])
        assert n_old
        facts = await rolling
        assert (facts["version"], facts["canary"]) == ("two", None)
        assert EngineState.of(facts).version == "two"  # what AsyncLLM.update_weights gives
        assert set(facts["replicas"].values()) == {"two"}
        assert facts["seconds"] >= 0.9
        for i, one in enumerate(requests):
            assert await told(world, dataclasses.replace(one, id=uuid.uuid4().hex)) == (
                new[i],
                ["two"] * len(new[i]),
                [],
            )


async def test_one_replica_at_a_time_gets_nothing(models):
    async with World(3, models(1)) as world:
        rolling = asyncio.ensure_future(world.order(source=models(2, 0.1)))
        seen: list[tuple[str, ...]] = []
        while not rolling.done():
            out = tuple(one.name for one in world.fleet.members if one.updating)
            state = tuple(s.name for s in world.fleet.replicas() if s.state == "updating")
            assert out == state
            candidates = world.fleet._router.candidates
            assert all(candidates[m.number].out for m in world.fleet.members if m.updating)
            if not seen or seen[-1] != out:
                seen.append(out)
            await asyncio.sleep(0.005)
        assert [one for one in seen if one] == [("r0",), ("r1",), ("r2",)]
        assert not any(c.out for c in world.fleet._router.candidates)


def id_for(world: World, weights: str) -> str:
    """An id of a request that replicas with ``weights`` answer."""
    fleet, ids = world.fleet, (f"id-{i}" for i in range(1000))
    return next(id for id in ids if fleet._rollout.member_for(id, fleet.members).weights == weights)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["w1", "w2"])
async def test_a_resumed_answer_has_the_weights_of_its_first_tokens(models, weights):
    """Two replicas have the current weights, one is the canary; the one that answers dies."""
    ((current,), (tried,)) = [await alone(models(i), [asked(1, 200)]) for i in (1, 2)]
    async with World(3, models(1)) as world:
        fleet = world.fleet
        await world.order(source=models(2), canary=0.3)
        request = dataclasses.replace(asked(1, 200), id=id_for(world, weights))
        running = asyncio.ensure_future(told(world, request))
        await until(lambda: any(any(s.said) for s in fleet._streams.values()))
        busy = next(one for one in fleet.members if one.n_open)
        assert busy.weights == weights
        world.source.kill(busy.name)
        ids, _, errors = await asyncio.wait_for(running, 20.0)
        if weights == "w1":
            assert (ids, errors) == (current, [])
        else:
            assert (errors, ids) == (["weights_changed"], tried[: len(ids)])


async def test_a_canary_whose_connection_broke_is_rolled_back_too(models):
    """Nothing that it says of its start tells that it has other weights."""
    async with World(2, models(1)) as world:
        await world.order(source=models(2), canary=0.5)
        canary = next(one for one in world.fleet.members if one.weights == "w2")
        world.source.clients[canary.name].cut()
        await until(lambda: len(world.fleet.members) == 1)
        await world.order("rollback_weights")
        await until(lambda: len(world.fleet.members) == 2)
        for i in range(8):
            assert set((await told(world, asked(i)))[1]) == {"0"}
        await until(lambda: [one.weights for one in world.fleet.members] == ["w1"] * 2)
        assert await world.versions() == ["0", "0"]


async def test_weights_that_do_not_fit_leave_all_as_it_was(models):
    async with World(3, models(1)) as world:
        with pytest.raises(WeightsError, match="no weights"):
            await world.order(source=models(0))
        assert await world.versions() == ["0"] * 3
        before = await alone(models(1), [asked()])
        assert (await told(world, asked()))[0] == before[0]


async def test_one_that_cannot_take_them_gives_the_others_the_old_ones_back(models):
    """The directory is gone when the second replica reads it."""
    (old,) = await alone(models(1), [asked()])
    async with World(3, models(1)) as world:
        target = Path(models(2, 0.2))
        rolling = asyncio.ensure_future(world.order(source=str(target)))
        await until(lambda: world.fleet.members[1].updating)
        (target / "weights").unlink()
        with pytest.raises(WeightsError, match="no weights"):
            await rolling
        assert await world.versions() == ["0"] * 3
        assert {one.weights for one in world.fleet.members} == {"w1"}
        for _ in range(6):
            assert (await told(world, asked()))[0] == old


async def test_a_canary_gets_its_share_by_id(models):
    async with World(4, models(1)) as world:
        facts = await world.order(source=models(2), version="try", canary=0.25)
        assert facts["canary"] == {"version": "try", "share": 0.25}
        assert list(facts["replicas"].values()) == ["0", "0", "0", "try"]
        requests = [dataclasses.replace(asked(i), id=f"id-{i}") for i in range(80)]
        found = await asyncio.gather(*(told(world, one) for one in requests))
        tried = {one.id for one, (_, v, _) in zip(requests, found, strict=True) if v[0] == "try"}
        assert 10 <= len(tried) <= 32
        again = await asyncio.gather(*(told(world, one) for one in requests))
        assert tried == {
            r.id for r, (_, v, _) in zip(requests, again, strict=True) if v[0] == "try"
        }
        with pytest.raises(BadRequest, match="there is another one"):
            await world.order(source=models(3), canary=0.5)
        # promotion: the same weights for all
        await world.order(source=models(2))
        assert await world.versions() == ["try"] * 4
        facts = await world.order("rollback_weights")
        assert (facts["canary"], set(facts["replicas"].values())) == (None, {"0"})
        with pytest.raises(BadRequest, match="no previous"):
            await world.order("rollback_weights")


async def test_a_canary_is_rolled_back(models):
    (old,) = await alone(models(1), [asked()])
    async with World(2, models(1)) as world:
        await world.order(source=models(2), canary=0.9)
        assert sorted(await world.versions()) == ["0", "1"]
        await world.order("rollback_weights")
        assert await world.versions() == ["0", "0"]
        assert {one.weights for one in world.fleet.members} == {"w1"}
        assert [(await told(world, asked()))[0] for _ in range(4)] == [old] * 4


async def test_whose_canary_is_gone_is_answered_by_the_others(models):
    async with World(2, models(1)) as world:
        await world.order(source=models(2), canary=0.9)
        canary = next(one for one in world.fleet.members if one.weights == "w2")
        world.source.kill(canary.name)
        await until(lambda: len(world.fleet.members) == 1)
        for i in range(8):
            _, versions, errors = await told(world, asked(i))
            assert (set(versions), errors) == ({"0"}, [])
        await world.source.add()  # and whoever comes in its place is one
        await until(lambda: {one.weights for one in world.fleet.members} == {"w1", "w2"})


async def test_who_joins_has_the_weights_of_the_others_before_its_first_request(models):
    requests = [asked(i) for i in range(8)]
    new = await alone(models(2), requests)
    async with World(1, models(1)) as world:
        await world.order(source=models(2, 0.2), version="two")
        await world.source.add()
        await until(lambda: len(world.fleet.members) == 2)
        found = await asyncio.gather(*(told(world, one) for one in requests))
        assert [one[0] for one in found] == new
        assert {v for one in found for v in one[1]} == {"two"}
        await until(lambda: not any(one.updating for one in world.fleet.members))
        found = await asyncio.gather(*(told(world, asked(i)) for i in range(8)))
        assert [one[0] for one in found] == new
        assert all(one.n_requests for one in world.fleet.members)


async def test_who_joins_and_cannot_read_them_gets_nothing(models, monkeypatch):
    monkeypatch.setattr("jserve.fleet.rollout.RETRY_S", 0.05)
    async with World(1, models(1)) as world:
        target = Path(models(2))
        await world.order(source=str(target))
        (target / "weights").unlink()
        await world.source.add()
        await until(lambda: len(world.fleet.members) == 2)
        await asyncio.sleep(0.2)
        for i in range(8):
            assert set((await told(world, asked(i)))[1]) == {"1"}
        assert world.fleet.members[1].n_requests == 0
        (target / "weights").write_text("2")
        await until(lambda: not world.fleet.members[1].updating)
        assert world.fleet.members[1].weights == "w2"


async def test_it_goes_on_when_whoever_asked_hangs_up(models):
    async with World(2, models(1)) as world:
        rolling = asyncio.ensure_future(world.order(source=models(2, 0.1)))
        await until(lambda: any(one.updating for one in world.fleet.members))
        rolling.cancel()
        with pytest.raises(BadRequest, match="not now"):
            await world.order(source=models(3))
        await until(lambda: {one.weights for one in world.fleet.members} == {"w2"})
        await until(lambda: not world.fleet._rollout.busy)
        await world.order(source=models(3))


async def test_a_replica_that_dies_amid_is_left_out(models):
    async with World(3, models(1)) as world:
        rolling = asyncio.ensure_future(world.order(source=models(2, 0.3)))
        await until(lambda: world.fleet.members[1].updating)
        world.source.kill("r1")
        await rolling
        assert [one.weights for one in world.fleet.members] == ["w2", "w2"]
        await world.source.add()
        await until(lambda: [one.weights for one in world.fleet.members] == ["w2"] * 3)


async def test_prefixes_are_found_under_new_weights_and_old_ones_again(models):
    """The names of pages tell weights apart, and a choice knows both."""
    async with World(2, models(1)) as world:

        async def cached(i: int) -> int:
            outputs = [out async for out in world.fleet.generate(asked(i))]
            return max(out.n_cached for out in outputs)

        assert [await cached(1), await cached(1)] == [0, 32]
        await world.order(source=models(2))
        assert [await cached(1), await cached(1), await cached(1)] == [0, 32, 32]
        where = [one.n_requests for one in world.fleet.members]
        request = asked(1)
        choice = world.fleet._router.choose(world.fleet._placement.asked_of(request))
        assert choice.n_cached == 32, where
        for order in ("rollback_weights", "reset_prefix_cache"):
            await world.order(order)
            assert [await cached(1), await cached(1)] == [0, 32]
            choice = world.fleet._router.choose(world.fleet._placement.asked_of(request))
            assert choice.n_cached == 32, order


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"source": {"a": 1}}, "source"),
        ({"source": "x", "partial": True}, "partial"),
        ({"source": "x", "donate": True}, "donate"),
        ({"source": "x", "alias": True}, "alias"),
        ({"source": "x", "running": "beside"}, "running"),
        ({"source": "x", "canary": 1.0}, "canary"),
        ({"source": "x", "canary": -0.5}, "canary"),
        ({"source": "x", "canary": 0.5}, "canary"),
        ({"source": "x", "analysis": {}}, "analysis"),
        ({"source": "x", "canary": 0.5, "analysis": {"min_requests": 0}}, "analysis.min_requests"),
    ],
)
async def test_what_replicas_cannot_do_is_refused_by_name(models, fields, field):
    async with World(1, models(1)) as world:
        with pytest.raises(BadRequest) as caught:
            await world.order(**fields)
        assert caught.value.field == field


async def test_what_went_on_with_new_weights_goes_on_with_them_elsewhere(models):
    """Its replica changes the weights below it, and dies later."""
    request = asked(1, 200)
    async with World(2, models(1)) as world:
        fleet = world.fleet
        running = asyncio.ensure_future(told(world, request))
        await until(lambda: any(any(s.said) for s in fleet._streams.values()))
        await world.order(source=models(2))
        busy = next(one for one in fleet.members if one.n_open)
        world.source.kill(busy.name)
        ids, versions, errors = await asyncio.wait_for(running, 20.0)
        assert (len(ids), errors) == (200, [])
        n_old = versions.count("0")
        assert 0 < n_old < 200
        assert versions == ["0"] * n_old + ["1"] * (200 - n_old)
        (after,) = await alone(
            models(2), [dataclasses.replace(request, said=(tuple(ids[:n_old]),))]
        )
        assert ids[n_old:] == after


async def test_who_joins_amid_gets_no_request_before_the_weights_of_all(models):
    """It starts with the first weights, which nobody has any more."""
    async with World(2, models(1)) as world:
        await world.order(source=models(2))
        rolling = asyncio.ensure_future(world.order(source=models(3, 0.5)))
        await until(lambda: any(one.updating for one in world.fleet.members))
        await world.source.add()
        await until(lambda: len(world.fleet.members) == 3)
        while not rolling.done():
            _, versions, errors = await told(world, asked())
            assert "0" not in versions
            assert not errors
        await rolling
        await until(lambda: not any(one.updating for one in world.fleet.members))
        assert {one.weights for one in world.fleet.members} == {"w3"}


async def test_a_canary_that_is_out_is_answered_for_by_the_others(models):
    async with World(2, models(1)) as world:
        await world.order(source=models(2), canary=0.9)
        canary = next(one for one in world.fleet.members if one.weights == "w2")
        record = world.fleet.suspicion.records[canary.name]
        record.out, record.rests_until = True, 1e18
        world.fleet.look()
        for i in range(6):
            _, versions, errors = await told(world, asked(i))
            assert (set(versions), errors) == ({"0"}, [])


class MemoryWorld(World):
    """A front that takes weights from memory: a number; -1 cannot be written. ``directories`` are those it wrote."""

    def __init__(self, n: int, model: str, root: Path) -> None:
        super().__init__(n, model)
        self.fleet = FleetEngine(self.source, model=model, write=self.write)
        self.root, self.directories = root, list[Path]()

    def write(self, number: Any) -> str:
        if number < 0:
            raise WeightsError("params.embed: of another shape", field="params.embed")
        directory = self.root / f"written-{len(self.directories)}"
        directory.mkdir()
        (directory / "weights").write_text(str(number))
        self.directories.append(directory)
        return str(directory)

    def kept(self) -> list[int]:
        """Numbers of the directories that are still there."""
        gc.collect()
        return [i for i, directory in enumerate(self.directories) if directory.exists()]


async def test_weights_from_memory_stay_while_they_may_be_needed(models, tmp_path):
    async with MemoryWorld(2, models(1), tmp_path) as world:
        await world.order(source=2, version="two")
        assert await world.versions() == ["two"] * 2
        assert [one.weights for one in world.fleet.members] == ["w2"] * 2
        assert world.kept() == [0]
        with pytest.raises(WeightsError, match="of another shape"):
            await world.order(source=-1)
        with pytest.raises(BadRequest, match="partial is of one engine"):
            await world.order(source=3, partial=True)
        assert (await world.versions(), world.kept()) == (["two"] * 2, [0])
        await world.order(source=3)
        assert world.kept() == [0, 1], "the old ones are what a rollback loads"
        await world.order("rollback_weights")
        assert [one.weights for one in world.fleet.members] == ["w2"] * 2
        assert world.kept() == [0]
        world.source.kill("r0")
        await until(lambda: len(world.fleet.members) == 1)
        await world.source.add()
        await until(lambda: [one.weights for one in world.fleet.members] == ["w2"] * 2)
        await world.order(source=4)
        await world.order(source=Path(models(5)))
        assert [one.weights for one in world.fleet.members] == ["w5"] * 2
        assert world.kept() == [2]
    assert world.kept() == []


async def test_a_canary_from_memory_is_promoted_or_not(models, tmp_path):
    async with MemoryWorld(2, models(1), tmp_path) as world:
        await world.order(source=2, canary=0.5)
        assert sorted(one.weights or "" for one in world.fleet.members) == ["w1", "w2"]
        await world.order("rollback_weights")
        assert [one.weights for one in world.fleet.members] == ["w1"] * 2
        assert world.kept() == []
        await world.order(source=3, canary=0.5, version="three")
        await world.order(source=3, version="three")
        assert [one.weights for one in world.fleet.members] == ["w3"] * 2
        facts = await world.order("weight_info")
        assert (facts["version"], facts["canary"]) == ("three", None)
