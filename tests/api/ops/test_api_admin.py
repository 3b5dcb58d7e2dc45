"""The operator's port: a door of its own; abort, reset, profiles."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from jserve.api.http.app import ACCESS, make_admin_app
from jserve.api.http.errors import Aborted
from jserve.api.http.server import HttpServer, serve
from jserve.api.reply.generate import Generation
from jserve.config import EngineConfig
from jserve.engine.face import ReplicaState
from jserve.errors import BadRequest, WeightsError
from jserve.sampling import SamplingParams
from jserve.types import Request
from tests.api.fake import FakeEngine, byte_tokenizer, card, live, until
from tests.api.http.test_api_quota import bearer, hashed, written
from tests.api.test_api_engine import host, idle

COMP = "/v1/completions"
COMMANDS = {"/reset_prefix_cache", "/start_profile", "/stop_profile"}
"""Those that need no body and answer nothing but that it is done."""
HOLDS = {"/pause", "/resume", "/sleep", "/wake_up", "/update_weights", "/rollback_weights"}
ASKED = {"/is_paused", "/is_sleeping", "/weight_info", "/replicas"}
PATHS = {"/abort", *COMMANDS, *HOLDS}
METRICS = "/metrics"


@asynccontextmanager
async def operated(srv):
    """POST to the operator's port of ``srv``: (status, JSON)."""
    app = make_admin_app(srv.app)
    server = HttpServer(app, "127.0.0.1", 0)
    url = await server.start()

    async def post(path: str, body=None, **kwargs) -> tuple[int, dict]:
        async with srv.http.post(url + path, json=body, **kwargs) as r:
            return r.status, await r.json()

    post.app = app
    try:
        yield post
    finally:
        await server.stop(0.2)


async def test_the_public_port_has_none_of_it(srv):
    async with operated(srv) as post:
        assert set(post.app[ACCESS]) == {*PATHS, *ASKED, METRICS}
        assert set(post.app[ACCESS].values()) == {"admin"}
    assert not PATHS & set(srv.app[ACCESS])
    for path in PATHS:
        assert (await srv.post(path, {}))[0] == 404


@pytest.mark.parametrize("public", [True, False])
async def test_metrics_may_be_left_to_the_operators_port(public):
    async with live(public_metrics=public, api_key=("sk-a",)) as srv:
        key = {"Authorization": "Bearer sk-a"}
        assert (await srv.get(METRICS))[0] == 401
        async with srv.http.get(srv.url + METRICS, headers=key) as response:
            assert response.status == (200 if public else 404)
        _, document, _ = await srv.get("/openapi.json", headers=key)
        assert (METRICS in document["paths"]) is public
        server = HttpServer(make_admin_app(srv.app), "127.0.0.1", 0)
        url = await server.start()
        async with srv.http.get(url + METRICS) as response:
            assert response.status == 200
            assert "jserve:num_requests_running" in await response.text()
        await server.stop(0.2)


async def test_abort_ends_the_requests_of_a_label_and_no_other():
    engine = FakeEngine(("x" * 300,))
    engine.delay = 0.02
    async with live(engine) as srv, operated(srv) as post:
        body = {"prompt": "x", "max_tokens": 300}
        tasks = [
            asyncio.create_task(srv.post(COMP, body, headers={"x-request-id": label}))
            for label in ("one", "one", "two")
        ]
        stream = asyncio.create_task(srv.events(COMP, body | {"request_id": "one"}))
        await until(lambda: len(engine.records) == 4)
        await asyncio.sleep(0.1)
        assert await post("/abort", {"request_id": "one"}) == (200, {"aborted": 3})
        for task in tasks[:2]:
            status, answer, headers = await asyncio.wait_for(task, 2)
            assert (status, answer["error"]["code"]) == (409, "request_aborted")
            assert headers["x-should-retry"] == "false"
        events = await asyncio.wait_for(stream, 2)
        assert events[-1]["error"]["code"] == "request_aborted"
        assert not tasks[2].done()
        assert await post("/abort", {"request_id": "none"}) == (200, {"aborted": 0})
        assert await post("/abort", {"all": True}) == (200, {"aborted": 1})
        assert (await tasks[2])[0] == 409
        assert srv.server.front.running.abort(None) == 0


@pytest.mark.parametrize("n_prompts", [1, 3])
async def test_an_abort_that_comes_before_the_engine_is_asked_holds(n_prompts: int):
    params = SamplingParams(max_tokens=5)
    requests = [Request(id=str(i), prompt_ids=(1,), params=params) for i in range(n_prompts)]
    engine = FakeEngine()
    run = Generation(engine, byte_tokenizer(), requests)
    run.abort()
    with pytest.raises(Aborted):
        [piece async for piece in run.pieces()]
    assert engine.n_active == 0


@pytest.mark.parametrize("body", [{}, {"all": False}, {"request_id": "a", "all": True}, {"x": 1}])
async def test_abort_wants_one_of_two(srv, body):
    async with operated(srv) as post:
        assert (await post("/abort", body))[0] == 400


async def test_commands_reach_the_engine_and_its_refusals_come_back(srv):
    async with operated(srv) as post:
        for path in sorted(COMMANDS):
            assert await post(path) == (200, {"status": "done"})
        assert srv.engine.commands == ["reset_prefix_cache", "start_profile", "stop_profile"]
        srv.engine.disobeys = BadRequest("no", field="profile_dir")
        status, body = await post("/start_profile")
        assert (status, body["error"]["param"]) == (400, "profile_dir")
        srv.engine.disobeys = BadRequest("busy", code="profiler_active")
        status, body = await post("/start_profile", {})
        assert (status, body["error"]["code"]) == (409, "profiler_active")
        assert body["error"]["type"] == "conflict_error"


async def test_replicas_are_listed_with_their_addresses(srv, monkeypatch):
    at = "tcp://10.0.0.7:5558"
    figures = "suspicion requests running waiting pages pages_used looked_up found"
    counts: dict[str, Any] = dict.fromkeys(figures.split(), 1)
    state = ReplicaState(name="r0", state="ready", role="decode", kv_events=at, pid=4711, **counts)
    monkeypatch.setattr(srv.engine, "replicas", lambda: [state])
    app = make_admin_app(srv.app)
    server = HttpServer(app, "127.0.0.1", 0)
    url = await server.start()
    try:
        async with srv.http.get(url + "/replicas") as r:
            body = await r.json()
    finally:
        await server.stop(0.2)
    found = [(one["name"], one["kv_events"], one["pid"]) for one in body["replicas"]]
    assert found == [("r0", at, 4711)]
    _, seen, _ = await srv.get("/v1/dashboard")
    assert not {"kv_events", "pid"} & set(seen["replicas"][0])  # users have no use for them
    assert seen["replicas"][0]["name"] == "r0"


async def test_pause_sleep_and_weights_have_vllms_names_and_modes(srv):
    async with operated(srv) as post:
        asked = srv.engine.asked
        for path, body in (
            ("/pause", {"mode": "wait"}),
            ("/pause?mode=keep", None),
            ("/pause", None),
        ):
            assert (await post(path, body))[0] == 200
        assert [message.running for message in asked] == ["finish", "keep", "abort"]
        asked.clear()
        for path, body in (("/sleep?level=1", None), ("/wake_up?tags=kv_cache", None)):
            await post(path, body)
        await post("/wake_up", {"tags": ["weights"]})
        assert [(m.action, m.parts) for m in asked] == [
            ("sleep", []),
            ("wake", ["kv"]),
            ("wake", ["weights"]),
        ]
        body = {"weight_dir": "/w", "version": "step-3", "running": "mix", "canary": 0.05}
        status, answer = await post("/update_weights", body)
        assert (status, answer["version"]) == (200, "step-3")
        assert (asked[-1].source, asked[-1].running, asked[-1].canary) == ("/w", "mix", 0.05)
        assert asked[-1].analysis is None
        for bounds in ({}, {"min_requests": 50, "max_ttft_ratio": 2.0}):
            assert (await post("/update_weights", {**body, "analysis": bounds}))[0] == 200
            assert asked[-1].analysis == bounds
        for bounds in ({"max_ttft_ratio": "2"}, {"min_request": 50}):
            status, answer = await post("/update_weights", {**body, "analysis": bounds})
            assert (status, answer["error"]["param"]) == (400, f"analysis.{next(iter(bounds))}")
        assert (await post("/rollback_weights"))[0] == 200
        assert asked[-1].action == "rollback_weights"
        srv.engine.disobeys = WeightsError("no", field="params.embed")
        status, answer = await post("/update_weights", {"weight_dir": "/w"})
        assert (status, answer["error"]["param"]) == (400, "params.embed")
        for path, wrong in (("/pause", {"mode": "slow"}), ("/sleep", {"tags": ["x"]})):
            assert (await post(path, wrong))[0] == 400


async def test_fields_of_the_query_are_honoured_or_refused_by_name(srv):
    async with operated(srv) as post:
        asked = srv.engine.asked
        for path in ("/sleep?mode=abort&tags=weights", "/sleep?level=1&mode=wait", "/sleep"):
            assert (await post(path))[0] == 200
        assert [(m.parts, m.running) for m in asked] == [
            (["weights"], "abort"),
            ([], "finish"),
            ([], "keep"),
        ]
        asked.clear()
        for path in ("/pause?clear_cache=True&mode=wait", "/pause?clear_cache=false"):
            assert (await post(path))[0] == 200
        assert [(m.action, m.running) for m in asked] == [
            ("pause", "finish"),
            ("reset_prefix_cache", ""),
            ("pause", "abort"),
        ]
        asked.clear()
        assert (await post("/wake_up?tags=weights&tags=kv_cache"))[0] == 200
        assert asked.pop().parts == ["weights", "kv"]
        for path, field in (
            ("/sleep?level=2", "level"),
            ("/sleep?level=0", "level"),
            ("/sleep?level=high", "level"),
            ("/sleep?level=1&tags=weights", "level"),
            ("/sleep?level=1&level=1", "level"),
            ("/sleep?mode=slow", "mode"),
            ("/sleep?tag=weights", "tag"),
            ("/wake_up?mode=keep", "mode"),
            ("/wake_up?level=1", "level"),
            ("/pause?clear_cache=perhaps", "clear_cache"),
            ("/pause?wait_for_inflight_requests=true", "wait_for_inflight_requests"),
            ("/resume?x=1", "x"),
            ("/reset_prefix_cache?reset_external=true", "reset_external"),
            ("/abort?all=1&x=1", "x"),
            ("/update_weights?weight_dir=a&x=1", "x"),
        ):
            status, answer = await post(path)
            assert (status, answer["error"]["param"]) == (400, field), path
        assert not asked


async def test_with_an_operators_key_no_other_opens_it(tmp_path):
    entries = [
        {"tenant": "a", "keys": [hashed("ka")]},
        {"tenant": "ops", "keys": [hashed("ko")], "admin": True},
    ]
    async with live(api_keys_file=written(tmp_path, entries)) as srv, operated(srv) as post:
        assert (await post("/reset_prefix_cache"))[0] == 401
        status, body = await post("/reset_prefix_cache", headers=bearer("ka"))
        assert (status, body["error"]["code"]) == (403, "admin_only")
        assert (await post("/reset_prefix_cache", headers=bearer("ko")))[0] == 200
        assert (await srv.post(COMP, {"prompt": "x"}, headers=bearer("ko")))[0] == 200


async def test_reset_forgets_prefixes_and_changes_no_answer():
    async with host(step_s=0.002) as found, operated(found.srv) as post:
        prompt = "a prompt of several pages, read twice. " * 3
        body = {"prompt": prompt, "seed": 4, "max_tokens": 60, "ignore_eos": True}

        async def cached(body) -> tuple[str, int]:
            status, answer, _ = await found.srv.post(COMP, body)
            assert status == 200, answer
            usage = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return answer["choices"][0]["text"], usage

        first = await cached(body)
        assert first[1] == 0
        text, n_cached = await cached(body)
        assert text == first[0]
        assert n_cached > 0
        running = asyncio.create_task(cached(body))
        await until(lambda: found.engine.scheduler.stats().running)
        assert (await post("/reset_prefix_cache"))[0] == 200
        assert (await running)[0] == first[0]
        await idle(found)
        assert (await post("/reset_prefix_cache"))[0] == 200
        assert (await cached(body)) == (first[0], 0)
        status, answer = await post("/start_profile")
        assert (status, answer["error"]["param"]) == (400, "profile_dir")


@pytest.mark.parametrize("enabled", [True, False])
async def test_serve_opens_the_port_when_asked(caplog, enabled):
    config = EngineConfig.of(port=0, enable_admin=enabled, admin_port=0)
    engine, listening = FakeEngine(), asyncio.Event()

    def opened(url: str) -> None:
        listening.set()

    with caplog.at_level("INFO", logger="jserve.api"):
        running = serve(config, engine, byte_tokenizer(), None, card(), on_listening=opened)
        task = asyncio.create_task(running)
        await asyncio.wait_for(listening.wait(), 5)
        found = re.search(r"operator's port is (http://\S+)", caplog.text)
    assert bool(found) is enabled
    if found:
        url = found[1] + "/abort"
        async with aiohttp.ClientSession() as http, http.post(url, json={}) as r:
            assert r.status == 400
    engine.gave_up.set()
    assert await asyncio.wait_for(task, 5) == 1
