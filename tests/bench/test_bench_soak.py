"""The soak's clients against a whole server with a fake device: each kind runs, and lies are found."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import time
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench import soak
from bench.soak_traffic import COMP, KINDS, SHAPES, Soak, _fits
from jserve.api.http.app import make_admin_app
from jserve.api.http.server import HttpServer
from jserve.config import EngineConfig
from jserve.sched.record.journal import (
    Arrival,
    Cancelled,
    Committed,
    Guided,
    Recovered,
    read_events,
)
from jserve.sched.record.replay import replay
from tests.hardening.world import LIMITS, OPTIONS, world

NEEDS_A_MODEL = {"shaped", "called"}
"""Kinds that ask for thoughts and tool calls, which the fake's template has not."""


@asynccontextmanager
async def soaking(seconds: float = 20.0, **options):
    async with world(**options) as made:
        admin = HttpServer(make_admin_app(made.srv.app), "127.0.0.1", 0)
        try:
            admin_url = await admin.start()
            async with aiohttp.ClientSession() as http:
                until = time.monotonic() + seconds
                yield Soak(made.srv.url, admin_url, http, random.Random(3), until)
            await made.idle()
        finally:
            await admin.stop(0.2)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - NEEDS_A_MODEL))
async def test_every_kind_runs_and_finds_nothing_wrong(kind, monkeypatch):
    monkeypatch.setattr("bench.soak_traffic.HOSTILE", [b"{", b'{"prompt": "x", "n": 1000000}'])
    async with soaking() as run:
        for _ in range(1 if kind == "stalled" else 3):
            await getattr(run, kind)()
        assert not run.wrong
        assert run.counts


async def test_the_journal_of_all_kinds_at_once_replays(tmp_path, monkeypatch):
    """Every decision, of clients that stay and leave, of operators, and of shapes beside them."""
    monkeypatch.setattr("bench.soak_traffic.HOSTILE", [b"{", b'{"prompt": "x", "n": 1000000}'])
    path = tmp_path / "run.journal"
    kinds = sorted(KINDS.keys() - {*NEEDS_A_MODEL, "stalled"})
    async with soaking(journal=path) as run:
        for _ in range(3):
            shaped = run.post(COMP, {"prompt": "x", "max_tokens": 30} | SHAPES[2])
            await asyncio.gather(shaped, *(getattr(run, kind)() for kind in kinds))
        assert not run.wrong
    assert {type(e) for e in read_events(path)} >= {
        Arrival,
        Cancelled,
        Committed,
        Guided,
        Recovered,
    }
    again = replay(path, LIMITS, EngineConfig.of(**OPTIONS))
    assert again.n_steps > 30


@pytest.mark.parametrize(("code", "replayed", "ends"), [(0, 0, 0), (0, 1, 1), (1, 0, 1), (2, 1, 2)])
def test_a_soak_with_a_journal_ends_well_if_that_is_computed_again(
    tmp_path, monkeypatch, code, replayed, ends
):
    """2: there was no server, and there is no journal."""
    path, out, ran = tmp_path / "run.journal", tmp_path / "soak.json", []

    def server(args, *rest):
        assert f"--journal {path}" in args.extra
        return code

    def run(argv, **_):
        ran.append(argv)
        return subprocess.CompletedProcess(argv, replayed, stdout="9 tokens computed again")

    monkeypatch.setattr(soak, "against_server", server)
    monkeypatch.setattr(soak.subprocess, "run", run)
    assert soak.main(["--journal", str(path), "--json", str(out)]) == ends
    assert [argv[-3:] for argv in ran] == ([] if code == 2 else [["replay", str(path), "--device"]])
    if code < 2:
        (line,) = json.loads(out.read_text())["lines"]
        assert line["replay"]["differs"] == bool(replayed)
        assert line["replay"]["said"] == "9 tokens computed again"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_soak_of_the_shipped_model_is_computed_again(tmp_path, capfd):
    """A real server, every kind of client, sequences that give way, and then every token of it on the device."""
    path = tmp_path / "run.journal"
    assert soak.main(["--minutes", "0.5", "--journal", str(path)]) == 0
    said = capfd.readouterr().out
    assert int(said.split(" tokens computed again")[0].split()[-1]) > 100
    assert {type(e) for e in read_events(path)} >= {Arrival, Cancelled, Committed, Guided}


@pytest.mark.parametrize(
    ("status", "text", "wrong"),
    [
        (400, "", False),
        (503, "overloaded: 9 sequences are waiting", False),
        (503, "draining", True),
        (500, "overloaded", True),
        (200, "", True),
    ],
)
async def test_nothing_hostile_is_answered_but_by_a_refusal(status, text, wrong):
    """A full queue reads nobody's fields; any other 5xx is ours."""

    async def answer(request):
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        run = Soak(str(server.make_url("")).rstrip("/"), "", http, random.Random(3), 0.0)
        await run.hostile()
    assert bool(run.wrong) is wrong


async def test_a_control_that_changes_is_told(monkeypatch):
    monkeypatch.setattr("bench.soak_traffic.asyncio.sleep", _no_time)
    async with soaking(seconds=0.3) as run:
        await run.control()
        assert run.counts["control"] > 1
        assert not run.wrong
        texts = iter(range(1000))

        class Other:
            def __init__(self, http):
                self._http = http

            def post(self, url, json):
                return self._http.post(url, json=json | {"prompt": f"{next(texts)}"})

        run.until = time.monotonic() + 0.3
        run.http = Other(run.http)
        await run.control()
        assert run.wrong


async def _no_time(seconds: float) -> None:
    return None


def test_every_kind_is_there():
    assert all(callable(getattr(Soak, kind)) for kind in KINDS)


def test_what_is_of_its_shape_and_what_is_not():
    schema, plain, regex, choice, grammar = SHAPES
    good = ['{"name": "a", "n": 1}', "{}", "blue-12", "yes", "[1,22]"]
    bad = ['{"name": "a"}', "[]", "blue-1", "maybe", "[1,,2]"]
    for shape, right, wrong in zip((schema, plain, regex, choice, grammar), good, bad, strict=True):
        assert _fits(shape, right)
        assert not _fits(shape, wrong)


def test_gates_fail_where_something_grew():
    metrics = {
        "num_requests_active": 0.0,
        "num_requests_running": 0.0,
        "kv_pages": 9.0,
        "kv_pages_free": 4.0,
        "kv_pages_cached": 5.0,
        "compiles_after_ready_total": 0.0,
        "engine_deaths_total": 0.0,
        "step_faults_total": 0.0,
    }
    used = {"files": 20, "threads": 9, "tasks": 5.0}
    found = {
        "minutes": 20.0,
        "counts": dict.fromkeys((*KINDS, "control"), 1),
        "wrong": [],
        "logged": [],
        "before": used,
        "after": used,
        "mib_grown": 1.0,
        "mib_by_slope": 2.0,
        "metrics": metrics,
    }
    assert all(holds for _, holds in soak.gates(found))
    for name, value in (
        ("wrong", ["x"]),
        ("logged", ["x"]),
        ("counts", found["counts"] | {"left": 0}),
        ("after", used | {"files": 40}),
        ("after", used | {"tasks": 50.0}),
        ("after", used | {"threads": 20}),
        ("mib_grown", 90.0),
        ("mib_by_slope", 90.0),
        *(("metrics", metrics | {name: 1.0}) for name in metrics if name != "kv_pages"),
    ):
        assert sum(not holds for _, holds in soak.gates(found | {name: value})) == 1, name


def test_the_slope_is_that_of_most_pairs():
    samples = [(float(t), 3.0 * t) for t in range(20)]
    samples[7] = (7.0, 900.0)
    assert soak.slope(samples) == pytest.approx(3.0)
