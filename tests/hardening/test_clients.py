"""Clients at their worst, against a whole server with a fake device: leaving, stalling, leaking."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import struct

import aiohttp
import pytest

from jserve.api.http.front import Limits
from tests.api.fake import until
from tests.hardening.world import CHAT, COMP, GOOD, JOBS, play, probe, tasks, world

RST = struct.pack("ii", 1, 0)


def raw(path: str, body: dict) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def connect(url: str, data: bytes, *, receive_buffer: int = 0) -> socket.socket:
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", int(url.rsplit(":", 1)[1])))
    await loop.sock_sendall(sock, data)
    return sock


def leave(sock: socket.socket, how: str) -> None:
    if how == "rst":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
    if how == "half":
        sock.shutdown(socket.SHUT_WR)
    else:
        sock.close()


LONG = {"prompt": "a" * 200, "max_tokens": 250, "seed": 5, "ignore_eos": True}
STAGES = {
    "queued": lambda made: len(made.engine.scheduler.resources.waiting) > 0,
    "prefill": lambda made: made.engine.scheduler.n_prefilled > 40,
    "first token": lambda made: made.face.n_active and made.engine.n_steps > 12,
    "decode": lambda made: made.face.n_active and made.engine.n_steps > 60,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stage", STAGES)
async def test_leaving_at_every_stage_gives_everything_back(stage):
    """FIN, RST and half-close; streamed and whole; one choice and four; cache on and off."""
    options = {"max_num_seqs": 1} if stage == "queued" else {}
    async with world(step_s=0.001, **options) as made:
        before = tasks()
        want = await probe(made)
        for how in ("fin", "rst", "half"):
            for stream in (True, False):
                for n, skip in ((1, False), (4, True)):
                    made.engine.n_steps = made.engine.scheduler.n_prefilled = 0
                    body = LONG | {"stream": stream, "n": n, "skip_prefix_cache": skip}
                    body["prompt"] = f"{how}{stream}{n}".ljust(200, "b")  # not cached yet
                    others = []
                    if stage == "queued":
                        others.append(await connect(made.srv.url, raw(COMP, LONG)))
                        await until(lambda: len(made.engine.scheduler.resources.running) > 0)
                    sock = await connect(made.srv.url, raw(COMP, body))
                    await until(lambda: STAGES[stage](made))
                    leave(sock, how)
                    for other in others:
                        other.close()
                    await made.idle()
                    sock.close()
        assert await probe(made) == want
        assert made.face.counters["aborted"] >= 12
        await until(lambda: tasks() <= before + 2)


async def test_leaving_as_the_last_token_comes_is_one_end():
    async with world(step_s=0.001) as made:
        want = await probe(made)
        rng = random.Random(2)
        for _ in range(60):
            sock = await connect(made.srv.url, raw(COMP, {"prompt": "x", "max_tokens": 4}))
            await asyncio.sleep(0.004 + 0.006 * rng.random())
            leave(sock, rng.choice(["fin", "rst"]))
        await made.idle()
        assert await probe(made) == want


async def test_a_slow_reader_gets_all_of_it_and_nobody_waits():
    """It takes 2 KiB at a time. The engine is through with it long before it is."""
    limits = Limits(send_buffer=4096, write_timeout_s=5.0)
    async with world(limits=limits, face={"slow_reader_s": 5.0}) as made:
        body = {"prompt": "x", "max_tokens": 480, "seed": 1, "logprobs": 20, "stream": True}
        body |= {"ignore_eos": True}
        async with (
            aiohttp.ClientSession() as http,
            http.post(made.srv.url + COMP, json=body) as response,
        ):
            want = _text(await response.read())
        slow = [await connect(made.srv.url, raw(COMP, body), receive_buffer=2048) for _ in range(5)]
        await until(lambda: made.face.n_active == 5)
        told = await asyncio.wait_for(play(made), 10.0)
        assert all(got.kind == GOOD for got in told), "others never wait"
        await until(lambda: not made.engine.busy, 10.0)
        waiting = made.face.n_buffered_bytes
        assert waiting < 5 * 480 * 500, "what waits is bounded by what was asked for"
        loop = asyncio.get_running_loop()
        for sock in slow:
            data = b""
            while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                part = await asyncio.wait_for(loop.sock_recv(sock, 2048), 5.0)
                assert part, "it was cut off although it reads"
                data += part
            sock.close()
            assert _text(_unchunked(data)) == want
        assert made.face.counters["slow_readers"] == 0
        await made.idle()


async def test_a_reader_that_takes_nothing_is_ended_and_nobody_waits():
    limits = Limits(send_buffer=4096, write_timeout_s=0.3)
    async with world(limits=limits, step_s=0.001) as made:
        body = {"prompt": "x", "max_tokens": 480, "seed": 1, "logprobs": 20, "stream": True}
        body |= {"ignore_eos": True}
        socks = [
            await connect(made.srv.url, raw(COMP, body), receive_buffer=2048) for _ in range(4)
        ]
        await until(lambda: made.face.n_active == 4)
        told = await asyncio.wait_for(play(made), 10.0)
        assert all(got.kind == GOOD for got in told)
        await made.idle()
        assert made.face.n_buffered_bytes == 0
        for sock in socks:
            sock.close()


def _unchunked(data: bytes) -> bytes:
    body, found = data.split(b"\r\n\r\n", 1)[1], b""
    while body:
        size, body = body.split(b"\r\n", 1)
        n = int(size, 16)
        found, body = found + body[:n], body[n + 2 :]
    return found


def _text(data: bytes) -> str:
    events = [part[6:] for part in data.decode().split("\n\n") if part.startswith("data: {")]
    return "".join(json.loads(e)["choices"][0]["text"] for e in events)


CANARY, KEY = "zyxcanarywvu", "sk-secret-zyxkeywvu"


async def test_no_log_metric_or_error_holds_a_prompt_an_answer_or_a_key(caplog, capfd):
    """Everything a run says at level debug, with faults, refusals, bad keys and a client that leaves."""
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    async with world(serve={"api_key": (KEY,)}) as made:
        key = {"Authorization": f"Bearer {KEY}"}
        schema = {"type": "object", "properties": {CANARY: {"type": "nonsense"}}}
        bodies = [
            (COMP, {"prompt": CANARY, "max_tokens": 5}),
            (COMP, {"prompt": CANARY, "max_tokens": 5, "stream": True}),
            (COMP, {"prompt": CANARY * 900}),
            (COMP, {"prompt": CANARY, "max_tokens": 10**6}),
            (COMP, {"prompt": [CANARY, "\ud800"]}),
            (COMP, {"prompt": CANARY, "stop": CANARY, "session": CANARY, "cache_salt": CANARY}),
            (COMP, {"prompt": "x", "cache": CANARY}),
            (CHAT, {"messages": [{"role": CANARY, "content": CANARY}]}),
            (CHAT, {"messages": [{"role": "user", "content": CANARY}], "tools": [CANARY]}),
            (COMP, {"prompt": CANARY, "structured_outputs": {"regex": CANARY + "("}}),
            (COMP, {"prompt": CANARY, "structured_outputs": {"grammar": CANARY}}),
            (
                CHAT,
                {
                    "messages": [{"role": "user", "content": CANARY}],
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": CANARY, "schema": schema},
                    },
                },
            ),
        ]
        for path, body in bodies:
            for headers in (key, {"Authorization": f"Bearer {KEY}x"}):
                headers = headers | {"x-request-id": CANARY * 9}
                data = json.dumps(body).encode()
                headers["Content-Type"] = "application/json"
                async with made.srv.http.post(
                    made.srv.url + path, data=data, headers=headers
                ) as response:
                    text = await response.text()
                    said.append(str(dict(response.headers)))
                    if response.status == 401 or "engine" in text:
                        said.append(text)
        collect = made.runners[-1].collect

        def faulty(flight):
            raise RuntimeError(CANARY)

        made.runners[-1].collect = faulty
        await made.srv.post(COMP, bodies[0][1], headers=key)
        made.runners[-1].collect = collect
        commit = made.engine.scheduler.commit
        made.engine.scheduler.commit = lambda *a: {}[CANARY]  # ends the engine
        await made.srv.post(COMP, bodies[0][1], headers=key)
        del commit
        await until(lambda: made.face.ready)
        sock = await connect(made.srv.url, raw(COMP, bodies[0][1] | {"max_tokens": 400}))
        sock.close()
        await made.srv.get(f"/{CANARY}?{CANARY}={KEY}")
        await made.idle()
        async with made.srv.http.get(made.srv.url + "/metrics", headers=key) as response:
            said.append(await response.text())
    said += [record.getMessage() + str(record.exc_text) for record in caplog.records]
    said += list(capfd.readouterr())
    assert any("step failed" in text for text in said), "the faults must have been logged"
    assert any("the engine ends" in text for text in said)
    for text in said:
        assert CANARY not in text, text[:2000]
        assert KEY not in text, text[:2000]


async def test_wall_clock_jumps_change_nothing(monkeypatch):
    import time

    async with world(step_s=0.001) as made:
        want = await play(made)
        wall, shift = time.time, iter([0, 86400, -86400, 10**9, -(10**9)] * 10**6)
        monkeypatch.setattr(time, "time", lambda: wall() + next(shift))
        assert await play(made) == want
        assert made.face.healthy()
        await made.idle()


async def test_many_idle_connections_leave_the_rest_alone():
    """The slow tier and bench/connections.py go to thousands."""
    async with world() as made:
        want = await play(made)
        idle = [await connect(made.srv.url, b"GET /heal") for _ in range(300)]
        assert await asyncio.wait_for(play(made), 10.0) == want
        status, _, _ = await made.srv.get("/health")
        assert status == 200
        for sock in idle:
            sock.close()
        await made.idle()
        n_open = len(made.srv.server._runner.server.connections)  # type: ignore[union-attr]
        await until(lambda: len(made.srv.server._runner.server.connections) <= 3), n_open


def test_the_workload_covers_what_it_should():
    assert {path for path, _ in JOBS} == {CHAT, COMP}
    assert any(body.get("stream") for _, body in JOBS)
