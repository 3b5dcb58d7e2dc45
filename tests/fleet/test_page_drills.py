"""Drills of KV pages on Ray Serve, with a fake device: they break on their way, whoever computes them dies, and they
are evicted everywhere at once. Every client gets the answer of an undisturbed engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray Serve is not installed: pip install 'jserve[ray]'", allow_module_level=True)

from jserve.config import EngineConfig
from jserve.engine.streams import Stream
from jserve.engine.wire import Control
from jserve.fleet.candidates import PREFILL
from jserve.fleet.face import FleetEngine
from jserve.fleet.on_ray import RayReplicas
from jserve.fleet.roles import DECODE, parse_roles
from jserve.types import Request
from tests.fleet.fakes import OPTIONS
from tests.fleet.test_face import answers, begun, requests, undisturbed, until
from tests.fleet.test_roles import apart

__all__ = ["apart"]
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
ROLES = "prefill=1,decode=2"
N = 3
POPULAR = tuple(range(240)) + tuple(range(100, 180))
"""A prefix of 20 pages."""


class RolesOnRay:
    """Three replicas with roles, which share ``pages``; ``orders`` as of ``fakes.build``."""

    def __init__(self, orders: Path, pages: Path) -> None:
        self.orders, self.pages = orders, pages
        shared = {"disk_dir": str(pages), "host_memory_gb": 1.0}
        config = EngineConfig.of(**OPTIONS, **shared, replicas=N, model=str(orders))
        source = RayReplicas(config, "tests.fleet.fakes:build", app="roles")
        self.fleet = FleetEngine(source, roles=parse_roles(ROLES, N))

    def of(self, role: str) -> list[Any]:
        return [one for one in self.fleet.members if one.role == role]

    async def whole(self) -> None:
        """Wait until replicas of both roles take part, as many as there should be."""
        await until(lambda: (len(self.of(PREFILL)), len(self.of(DECODE))) == (1, 2), 60.0)

    def total(self, name: str) -> float:
        """Of all replicas, as they say it now."""
        return sum(one.stats.values.get(name, 0.0) for one in self.fleet.members)

    def files(self) -> list[Path]:
        return list(self.pages.glob("*/*/*.kv"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def roles(ray_cluster, tmp_path_factory):
    made = RolesOnRay(tmp_path_factory.mktemp("orders"), tmp_path_factory.mktemp("pages"))
    try:
        await made.fleet.start()
        yield made
    finally:
        await made.fleet.close()


def flip(page: Path) -> None:
    """One bit of the file."""
    data = bytearray(page.read_bytes())
    data[len(data) // 2] ^= 1
    page.write_bytes(bytes(data))


def before_reading(fleet: FleetEngine, monkeypatch: Any, do: Callable[[], None]) -> None:
    """From now on ``do`` is called where a prompt was computed and its pages are written, and before whoever answers
    knows of them."""
    answer = fleet._placement._answer

    def spoiled(stream: Stream, source: str, *, ready: bool) -> None:
        do()
        answer(stream, source, ready=ready)

    monkeypatch.setattr(fleet._placement, "_answer", spoiled)


def other_prompts(asked: list[Request], first: int) -> list[Request]:
    """``asked`` behind ``first`` tokens more each, pages that nobody has."""
    begins = [
        tuple((first + 31 * i + 7 * j) % 250 for j in range(first)) for i in range(len(asked))
    ]
    return [
        dataclasses.replace(one, prompt_ids=begin + one.prompt_ids)
        for one, begin in zip(asked, begins, strict=True)
    ]


@pytest.mark.parametrize("n_broken", [1, 99])
async def test_d5_pages_with_a_flipped_bit(roles, apart, monkeypatch, n_broken):
    """Files in the directory that the replicas share: whoever reads a broken one computes the page again."""
    asked = other_prompts(requests(8), 48 + 16 * (n_broken > 1))
    whole = await undisturbed(asked)
    await roles.whole()
    seen = set(roles.files())
    broken: list[Path] = []

    def spoil() -> None:
        for page in set(roles.files()) - seen:
            seen.add(page)
            if len(broken) < n_broken:
                flip(page)
                broken.append(page)

    before_reading(roles.fleet, monkeypatch, spoil)
    done, missed = roles.fleet.counters["remote_prefills"], roles.total("disk_pages_missed_total")
    read = roles.total("disk_pages_read_total")
    assert await asyncio.wait_for(answers(roles.fleet, asked), 60.0) == whole
    assert roles.fleet.counters["remote_prefills"] == done + len(asked)
    assert len(broken) >= min(n_broken, len(asked))
    await until(lambda: roles.total("disk_pages_missed_total") > missed)
    if n_broken == 1:
        await until(lambda: roles.total("disk_pages_read_total") > read)


async def test_d6_who_computes_prompts_is_killed_while_it_hands_over(roles, apart):
    """Some pages of the prompts are written, others are not, and nobody has told which."""
    asked = other_prompts(requests(6), 320)
    whole = await undisturbed(asked)
    await roles.whole()
    [helper] = roles.of(PREFILL)
    pid, n_files = helper.info["pid"], len(roles.files())
    (roles.orders / f"slow.{pid}").write_text("10")
    failed = roles.fleet.counters["remote_prefills_failed"]
    running = asyncio.ensure_future(answers(roles.fleet, asked))
    await until(lambda: len(roles.files()) >= n_files + 4, 30.0)
    assert len(roles.fleet._placement.prefills) > 0
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.wait_for(running, 60.0) == whole
    assert roles.fleet.counters["remote_prefills_failed"] > failed
    assert not roles.fleet._placement.sent
    await roles.whole()  # the next one has its role
    assert roles.of(PREFILL)[0].info["pid"] != pid
    done = roles.fleet.counters["remote_prefills"]
    assert await asyncio.wait_for(answers(roles.fleet, asked), 60.0) == whole
    assert roles.fleet.counters["remote_prefills"] == done + len(asked)


async def test_d7_a_popular_prefix_is_evicted_everywhere_at_once(ray_cluster):
    """The front takes it to be where it was. Those who ask for it meanwhile and those who run get the same answers, and
    each replica computes it once."""
    config = EngineConfig.of(**OPTIONS, replicas=N)
    fleet = FleetEngine(RayReplicas(config, "tests.fleet.fakes:build", app="popular"))
    asked = [dataclasses.replace(one, prompt_ids=POPULAR + one.prompt_ids) for one in requests(24)]
    whole = await undisturbed(asked)

    def misses() -> float:
        states = fleet.replicas()
        return sum(one.looked_up - one.found for one in states)

    async def played(running: int) -> float:
        """Tokens that had to be computed for ``asked``, where all caches are emptied at once while ``running`` of
        them are being answered and the others come."""
        before = misses()
        first = asyncio.ensure_future(answers(fleet, asked[:running]))
        if running:
            await begun(fleet, running)
        reset = fleet.control(Control(id=f"reset-{running}", action="reset_prefix_cache"))
        rest = answers(fleet, asked[running:])
        _, found, others = await asyncio.wait_for(asyncio.gather(reset, first, rest), 60.0)
        assert [*found, *others] == whole
        await until(lambda: misses() > before)
        await asyncio.sleep(0.2)  # the last views come
        return misses() - before

    try:
        await fleet.start()
        assert await answers(fleet, asked) == whole
        own = sum(
            len(one.prompt_ids) - len(POPULAR) + 16 for one in asked for _ in range(one.params.n)
        )
        idle, busy = await played(0), await played(6)
        print(f"D7: {idle:.0f} and {busy:.0f} tokens of {sum(len(a.prompt_ids) for a in asked)}")
        assert len(POPULAR) <= idle <= N * len(POPULAR) + own
        assert busy >= len(POPULAR), "those who run compute theirs again, too"
        before, n_asked = misses(), sum(len(one.prompt_ids) for one in asked)
        assert await answers(fleet, asked) == whole
        await asyncio.sleep(0.2)
        assert misses() - before < 0.5 * n_asked, "it is found again"
    finally:
        await fleet.close()
