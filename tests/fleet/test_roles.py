"""Prompts computed apart: who computes them, when that pays, and that no client can tell."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from jserve.build import serving_engine
from jserve.config import EngineConfig
from jserve.engine.view import View
from jserve.errors import BadRequest, ConfigError, NotReady
from jserve.fleet import router as routing
from jserve.fleet.candidates import PREFILL, Candidate, CandidateTable
from jserve.fleet.face import FleetEngine
from jserve.fleet.roles import DECODE, lacking, parse_roles, prefill_at
from jserve.fleet.route import ReplicaChoice, route
from jserve.fleet.shared_pages import with_shared_pages
from jserve.llm import LLM
from jserve.runner import kv_transfer
from jserve.runner.disk import DiskStore
from jserve.runner.kv_transfer import KVTransferClients
from jserve.types import Request
from tests.engine.test_resume import any_request
from tests.fleet import fakes
from tests.fleet.fakes import ThreadSource
from tests.fleet.test_face import all_told, answer, answers, begun, requests, undisturbed, until
from tests.fleet.test_route import PAGE, PAGES, asked, candidates, held, index, view

# -- the choice


def fleet_of(*roles: str, rows: int = 8, **changes) -> CandidateTable:
    """Replicas of these roles; those that decode have ``rows`` to do."""
    return CandidateTable(
        Candidate(view=view(n_rows=0 if role == PREFILL else rows, **changes), role=role)
        for role in roles
    )


def test_where_others_would_pay_for_it_a_prompt_is_computed_apart():
    choice = prefill_at(asked(), fleet_of(DECODE, PREFILL, DECODE), index([0, 0, 0]))
    assert choice is not None
    assert choice.replica == 1


def test_nobody_is_asked_for_what_costs_no_less_apart():
    assert prefill_at(asked(), fleet_of(DECODE, PREFILL, rows=0), index([0, 0])) is None
    dear = fleet_of(DECODE, PREFILL, page_s=0.1)
    assert prefill_at(asked(), dear, index([0, 0])) is None
    busy = fleet_of(DECODE, PREFILL)
    busy.change(1, sent_s=60.0)
    assert prefill_at(asked(), busy, index([0, 0])) is None
    assert prefill_at(asked(), fleet_of(DECODE, PREFILL), index([8, 0])) is None, "it has them"
    short = asked(pages=(), n_prompt=9)
    assert prefill_at(short, fleet_of(DECODE, PREFILL), index([0, 0])) is None


def test_the_one_that_has_the_prefix_computes_the_rest():
    choice = prefill_at(asked(), fleet_of(DECODE, PREFILL, PREFILL), index([0, 0, 6]))
    assert (choice.replica, choice.n_cached) == (2, 6 * PAGE)


def test_who_computes_prompts_answers_where_no_other_is_left():
    both = fleet_of(PREFILL, DECODE)
    assert route(asked(), both, index([8, 0])).replica == 1
    both.change(1, out=True)
    assert route(asked(), both, index([0, 0])).replica == 0
    assert prefill_at(asked(), both, index([0, 0])) is None


def test_pages_that_were_exported_are_not_computed_but_moved():
    there = fleet_of(DECODE, rows=0, page_s=0.01)
    n = len(PAGES) * PAGE
    before = route(asked(), there, index([0]))
    moved = route(asked(n_ready=n), there, index([0]))
    assert moved.n_cached == n
    saved = n * there[0].view.prefill_token_s - 2 * 0.01 * len(PAGES)
    assert before.first_s - moved.first_s == pytest.approx(saved)
    some = route(asked(n_ready=n), there, index([3]))
    assert some.first_s == pytest.approx(moved.first_s - 2 * 0.01 * 3)


@given(candidates, held, st.lists(st.booleans(), min_size=9, max_size=9))
def test_it_is_never_one_that_may_not_or_that_costs_more(found, pages, helps):
    roles = [PREFILL if helper else DECODE for helper in helps]
    found = CandidateTable(replace(one, role=role) for one, role in zip(found, roles, strict=False))
    try:
        here = route(asked(), found, index(pages))
    except NotReady:
        return
    choice = prefill_at(asked(), found, index(pages))
    if choice is None:
        return
    chosen = found[choice.replica]
    assert chosen.role == PREFILL
    assert chosen.view.ready
    assert choice.cost_s < here.cost_s
    assert found[here.replica].role != PREFILL


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("prefill", "like prefill=1"),
        ("prefill=0,decode=2", "like"),
        ("prefill=1,prefill=1", "like"),
        ("cook=1,decode=1", "like"),
        ("decode=2", "both"),
        ("prefill=1,decode=2", "are of 3 replicas, and replicas is 2"),
    ],
)
def test_roles_that_are_none_are_refused_by_name(text, why):
    with pytest.raises(ConfigError, match=why) as found:
        parse_roles(text, 2)
    assert found.value.field == "roles"


def test_roles_are_given_as_replicas_come_and_go():
    wanted = parse_roles("prefill=1, decode=3", 4)
    given_out: list[str] = []
    for _ in range(4):
        given_out.append(lacking(wanted, given_out))
    assert given_out[0] == DECODE
    assert given_out.count(PREFILL) == 1
    given_out.remove(PREFILL)
    assert lacking(wanted, given_out) == PREFILL
    assert lacking(wanted, [PREFILL]) == DECODE
    assert lacking({}, []) == DECODE


def test_options_of_replicas_with_roles(tmp_path, monkeypatch):
    config = EngineConfig.of(replicas=2, roles="prefill=1,decode=1", ray_address="auto")
    made = with_shared_pages(config).cache
    assert made.host_memory_gb > 0
    assert made.disk_dir
    assert made.kv_transfer_address
    assert len(made.kv_transfer_key) == 32
    own = EngineConfig.of(replicas=2, disk_dir=str(tmp_path), host_memory_gb=2.0, disk_gb=3.0)
    assert with_shared_pages(own) == own, "what is given stays, and one machine needs no TCP"
    with pytest.raises(ConfigError) as found:
        with_shared_pages(EngineConfig.of(replicas=2, prefix_caching=False))
    assert found.value.field == "prefix_caching"
    with pytest.raises(ConfigError) as found:
        LLM(roles="prefill=1,decode=1", load_format="dummy")
    assert found.value.field == "roles"
    with pytest.raises(ConfigError) as found:
        serving_engine(EngineConfig.of(roles="prefill=1,decode=1"))
    assert found.value.field == "roles"


# -- the requests

MOVE_S = 1e-5
"""``page_move_s`` of ``fakes.build``."""


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


@pytest.fixture
def apart(monkeypatch):
    """Every prompt is computed apart, whatever that costs."""

    def always(asked, candidates, pages):
        helpers = [i for i, one in enumerate(candidates) if one.role == PREFILL and one.view.ready]
        route(asked, candidates, pages)
        return (
            ReplicaChoice(replica=helpers[0], n_cached=0, first_s=0.0, cost_s=0.0)
            if helpers and asked.pages
            else None
        )

    monkeypatch.setattr(routing, "prefill_at", always)


class World:
    """Replicas with roles that share ``directory``; with ``key`` each has its part of it, and pages travel over TCP."""

    def __init__(self, directory: Path, roles: str = "prefill=1,decode=2", key: str = "") -> None:
        wanted = parse_roles(roles, 3)
        options = {"disk_dir": str(directory), "host_memory_gb": 1.0, "kv_transfer_key": key}
        self.source = ThreadSource(3, **options)
        self.fleet = FleetEngine(self.source, roles=wanted)

    async def __aenter__(self):
        await self.fleet.start()
        return self

    async def __aexit__(self, *_):
        await self.fleet.close()

    def of(self, role: str) -> list:
        return [one for one in self.fleet.members if one.role == role]

    @property
    def n_moved(self) -> float:
        return sum(one.stats.values.get("disk_pages_read_total", 0) for one in self.fleet.members)


async def test_answers_are_those_of_one_engine(tmp_path, apart):
    asked = requests(8)
    async with World(tmp_path) as world:
        assert await answers(world.fleet, asked) == await undisturbed(asked)
        assert world.fleet.counters["remote_prefills"] == 8
        (helper,) = world.of(PREFILL)
        assert helper.n_requests == 8
        assert all(one.n_requests for one in world.of(DECODE))
        await until(lambda: world.n_moved >= 16)  # two full pages of 40 tokens each
        await until(
            lambda: all(one.view.page_s > MOVE_S for one in world.fleet.members)
        )  # measured
        assert not world.fleet._placement.sent
        assert not len(world.fleet._placement.prefills)


async def test_the_prompt_of_a_long_text_is_computed_as_one(tmp_path, apart, monkeypatch):
    """What computes it draws one token, which alone would fit the short context."""
    limits = dataclasses.replace(fakes.LIMITS, short_context=64)
    monkeypatch.setattr(fakes, "LIMITS", limits)
    async with World(tmp_path) as world:
        await answers(world.fleet, requests(4))
        await until(lambda: world.n_moved >= 8)


async def test_whatever_is_asked_for_is_told_the_same(tmp_path, apart):
    rng = random.Random(11)
    begin = tuple(range(40))  # two pages that can be found, and more
    asked = [any_request(rng, f"any-{i}") for i in range(24)]
    asked = [dataclasses.replace(one, prompt_ids=begin + one.prompt_ids) for one in asked]
    async with World(tmp_path) as world:
        found = await all_told(world.fleet, asked)
        assert world.fleet.counters["remote_prefills"] > 4
    async with World(tmp_path / "other") as world:
        world.fleet._roles = {}
        assert found == await all_told(world.fleet, asked)


async def test_the_price_decides_where_nobody_forces_it(tmp_path):
    """Replicas that decode much do not compute a long prompt themselves."""
    asked = [
        dataclasses.replace(one, prompt_ids=tuple(range(250)) + tuple(range(i, i + 60)))
        for i, one in enumerate(requests(4, 20))
    ]
    async with World(tmp_path) as world:
        for member in world.of(DECODE):
            number = member.number
            crowded = View(n_rows=50, prefill_token_s=1e-3, row_s=1e-4)
            world.fleet._router.candidates.change(number, view=crowded)
        idle = View(n_rows=0, prefill_token_s=1e-3, row_s=1e-4)
        world.fleet._router.candidates.change(world.of(PREFILL)[0].number, view=idle)
        running = asyncio.ensure_future(answer(world.fleet, asked[0]))
        await asyncio.sleep(0)
        await until(lambda: world.of(PREFILL)[0].n_requests == 1)
        assert await running == (await undisturbed(asked[:1]))[0]


@pytest.mark.parametrize("n_broken", [1, 9])
async def test_d5_a_page_with_a_flipped_bit(tmp_path, apart, n_broken, monkeypatch):
    """Pages break on their way; whoever reads them computes them again."""
    asked = requests(6)
    whole = await undisturbed(asked)
    async with World(tmp_path) as world:
        broken, put = 0, DiskStore._write

        def spoiled(self, path, partial, page):
            nonlocal broken
            put(self, path, partial, page)
            if broken < n_broken:
                broken += 1
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(bytes(data))

        monkeypatch.setattr(DiskStore, "_write", spoiled)
        assert await answers(world.fleet, asked) == whole
        assert broken == n_broken
        assert world.fleet.counters["remote_prefills"] == 6


class FlippingProxy:
    """In front of a server: every ``every``-th piece that it sends (or with ``asks`` is sent) has one bit flipped."""

    def __init__(self, server: str, every: int, *, asks: bool) -> None:
        self._server, self._every, self._asks = server, every, asks
        self._rng, self.n_flipped, self._n = random.Random(every), 0, 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                host, _, port = self._server.rpartition(":")
                server = socket.create_connection((host, int(port)))
                for ends in ((client, server, self._asks), (server, client, not self._asks)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, flips: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                self._n += flips
                if flips and self._n % self._every == 0:
                    data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
                    self.n_flipped += 1
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("flips", [None, "pages", "asks"])
async def test_pages_over_tcp_are_the_pages_or_computed_again(tmp_path, apart, monkeypatch, flips):
    """Nobody reads a page of another name, whichever bit is flipped between the two."""
    proxies: list[FlippingProxy] = []
    sent: dict[bytes, set[bytes]] = {}
    got: list[tuple[bytes, bytes | None]] = []
    put, get = DiskStore.put, KVTransferClients.get

    def proxied(address: str) -> str:
        proxies.append(FlippingProxy(address, 3, asks=flips == "asks"))
        return proxies[-1].address

    def noted_put(self, digest: bytes, page: bytes) -> None:
        sent.setdefault(digest, set()).add(page)
        put(self, digest, page)

    def noted_get(self, address: str, digest: bytes) -> bytes | None:
        got.append((digest, get(self, address, digest)))
        return got[-1][1]

    monkeypatch.setattr(DiskStore, "put", noted_put)
    monkeypatch.setattr(KVTransferClients, "get", noted_get)
    monkeypatch.setattr(kv_transfer, "RETRY_S", 0.0)
    monkeypatch.setattr(kv_transfer, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(fakes.SharedPagesRunner, "made", [])
    if flips is not None:
        monkeypatch.setattr(fakes.SharedPagesRunner, "reached_at", staticmethod(proxied))
    asked = requests(12)
    whole = await undisturbed(asked)
    async with World(tmp_path, key="key") as world:
        assert await asyncio.wait_for(answers(world.fleet, asked), 30.0) == whole
        assert world.fleet.counters["remote_prefills"] == len(asked)
        spills = [runner.spill for runner in fakes.SharedPagesRunner.made]
        pages = [page for _, page in got]
        assert sum(spill.n_received for spill in spills) == len(pages) - pages.count(None) > 0
        assert all(page is None or page in sent[digest] for digest, page in got)
    for proxy in proxies:
        proxy.close()
    assert (pages.count(None) > 0) == (flips is not None) == any(p.n_flipped for p in proxies)


@pytest.mark.parametrize("when", ["before it begins", "while it computes"])
async def test_d6_who_computes_prompts_dies(tmp_path, apart, when):
    """Requests go on where they are answered, without what it had."""
    asked = requests(6)
    whole = await undisturbed(asked)
    async with World(tmp_path) as world:
        (helper,) = world.of(PREFILL)
        if when == "before it begins":
            world.source.hold(helper.name, stopped=True)
        running = asyncio.ensure_future(answers(world.fleet, asked))
        await until(lambda: len(world.fleet._placement.prefills) > 0)
        world.source.kill(helper.name)
        assert await asyncio.wait_for(running, 30.0) == whole
        world.source.hold(helper.name, stopped=False)
        assert world.fleet.counters["remote_prefills_failed"] > 0
        assert not world.fleet._placement.sent
        await world.source.add()  # another one gets the role
        await until(lambda: len(world.of(PREFILL)) == 1)


async def test_who_computes_prompts_hangs(tmp_path, apart):
    asked = requests(4)
    whole = await undisturbed(asked)
    async with World(tmp_path) as world:
        (helper,) = world.of(PREFILL)
        world.source.hold(helper.name, stopped=True)
        found = await asyncio.wait_for(answers(world.fleet, asked), 30.0)
        assert found == whole
        assert world.fleet.counters["remote_prefills_failed"] == 4
        world.source.hold(helper.name, stopped=False)
        assert await answers(world.fleet, asked) == whole


async def test_who_answers_dies_behind_a_remote_prefill(tmp_path, apart):
    asked = requests(6, 80)
    whole = await undisturbed(asked)
    async with World(tmp_path) as world:
        running = asyncio.ensure_future(answers(world.fleet, asked))
        await begun(world.fleet, 3)
        world.source.kill(max(world.of(DECODE), key=lambda one: one.n_open).name)
        assert await asyncio.wait_for(running, 30.0) == whole
        assert world.fleet.counters["remote_prefills"] == 6
        assert world.fleet.counters["resumed"] > 0


async def test_a_client_that_leaves_takes_its_prompt_along(tmp_path, apart):
    async with World(tmp_path) as world:
        (helper,) = world.of(PREFILL)
        world.source.hold(helper.name, stopped=True)
        stream = world.fleet.generate(requests(1)[0])
        waiting = asyncio.ensure_future(anext(stream))
        await until(lambda: len(world.fleet._placement.prefills) == 1)
        assert len(helper.streams) == 1
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: not world.fleet._streams)
        assert not world.fleet._placement.sent
        assert not helper.streams
        world.source.hold(helper.name, stopped=False)


async def test_a_prefill_that_cannot_be_sent_leaves_nothing(tmp_path, apart):
    (asked,) = requests(1)
    async with World(tmp_path) as world:

        def refuse(request) -> None:
            raise BadRequest("too large to be sent", field="prompt")

        (helper,) = world.of(PREFILL)
        helper.client.submit = refuse  # type: ignore[union-attr]
        (found,) = await asyncio.gather(answer(world.fleet, asked), return_exceptions=True)
        assert isinstance(found, BadRequest)
        assert not world.fleet._placement.sent
        assert not len(world.fleet._placement.prefills)
        assert not world.fleet._placement.prefills._ids


async def test_choices_that_end_meanwhile_are_not_begun(tmp_path, apart):
    (asked,) = [one for one in requests(2) if one.params.n == 2]
    async with World(tmp_path) as world:
        (helper,) = world.of(PREFILL)
        world.source.hold(helper.name, stopped=True)
        found: list = []

        async def read() -> None:
            found.extend([out async for out in world.fleet.generate(asked)])

        reading = asyncio.ensure_future(read())
        await until(lambda: len(world.fleet._placement.prefills) == 1)
        world.fleet.abort(asked.id, 0)
        world.source.hold(helper.name, stopped=False)
        await asyncio.wait_for(reading, 10.0)
        assert [out.index for out in found if out.token_ids] == [1] * sum(
            bool(out.token_ids) for out in found
        )
        assert sum(len(out.token_ids) for out in found) == 40


async def test_what_cannot_be_found_by_others_is_not_sent_apart(tmp_path, apart):
    (one, *_) = requests(1)
    params = dataclasses.replace(one.params, prompt_logprobs=0)
    several: list[Request] = [
        dataclasses.replace(one, skip_prefix_cache=True),
        dataclasses.replace(one, params=params),
        dataclasses.replace(one, prompt_ids=(1, 2, 3)),
    ]
    async with World(tmp_path) as world:
        await answers(world.fleet, several)
        assert world.fleet.counters["remote_prefills"] == 0
        assert world.of(PREFILL)[0].n_requests == 0


async def test_all_ends_when_the_fleet_is_closed(tmp_path, apart):
    async with World(tmp_path) as world:
        world.source.hold(world.of(PREFILL)[0].name, stopped=True)
        running = asyncio.ensure_future(answers(world.fleet, requests(3)))
        await until(lambda: len(world.fleet._placement.prefills) == 3)
        began = time.monotonic()
        closing = asyncio.ensure_future(world.fleet.close())
        found = await asyncio.wait_for(running, 10.0)
        assert all(one[3] for one in found)
        world.source.hold("r1", stopped=False)
        world.source.hold("r0", stopped=False)
        await closing
        assert time.monotonic() - began < 20.0
