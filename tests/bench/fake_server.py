"""A tiny OpenAI-style server with planted faults, chosen by the model name of the request."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys

from aiohttp import web


class Fake:
    """Counts what it sees; every request's ``model`` chooses how it misbehaves."""

    def __init__(self, step_s: float = 0.0, leak_kib: int = 0) -> None:
        self.step_s, self.leak_kib = step_s, leak_kib
        self.leaked: list[bytes] = []
        self.bodies: list[dict] = []
        self.peers: set[tuple] = set()
        self.running = self.most_running = 0
        self.sent = 0
        self.sent_when_long_came: int | None = None

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self.health),
                web.post("/v1/completions", self.completions),
            ]
        )
        return app

    async def health(self, _: web.Request) -> web.Response:
        self.leaked.append(b"x" * (1024 * self.leak_kib))
        return web.json_response({})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = {"model": "good"} | await request.json()
        self.bodies.append(body)
        self.peers.add(request.transport.get_extra_info("peername") if request.transport else ())
        if len(body["prompt"]) > 1000:
            self.sent_when_long_came = self.sent
        if body["model"] == "refuses":
            return web.json_response({"error": {"message": "no such thing"}}, status=400)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self.stream(request, body)
        finally:
            self.running -= 1

    async def stream(self, request: web.Request, body: dict) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        fault, n = body["model"], body["max_tokens"]
        await reply.write(b": a comment\n\n")
        per_chunk = 2 if fault == "pairs" else 1
        for i in range(0, n, per_chunk):
            if i and fault == "error":
                await reply.write(b'data: {"error": {"message": "engine died"}}\n\n')
                return reply
            if i and fault == "truncated":
                return reply
            if i and fault == "hangs":
                await asyncio.sleep(30)
            await asyncio.sleep(self.step_s)
            choice = {"index": 0, "text": " ab" * per_chunk, "finish_reason": None}
            await send(reply, {"choices": [choice], "usage": None}, torn=fault == "torn")
            self.sent += 1
        finish = None if fault == "endless" else "length"
        await send(reply, {"choices": [{"index": 0, "text": "", "finish_reason": finish}]})
        claimed = {"boasts": n + 5, "short": n - 1}.get(fault, n)
        if fault != "silent":
            await send(reply, {"choices": [], "usage": {"completion_tokens": claimed}})
        await reply.write(b"data: [DONE]\n\n")
        return reply


async def send(reply: web.StreamResponse, event: dict, torn: bool = False) -> None:
    """One event; ``torn`` splits it over two network writes."""
    raw = b"data: " + json.dumps(event).encode() + b"\n\n"
    if torn:
        await reply.write(raw[:9])
        await asyncio.sleep(0.01)
        raw = raw[9:]
    await reply.write(raw)


def main() -> None:
    """Run as a server process: ``fake_server.py PORT [--child] [--step-s S] [--leak-kib K]``."""
    p = argparse.ArgumentParser()
    p.add_argument("port", type=int)
    p.add_argument("--child", action="store_true", help="also start a child deaf to SIGTERM")
    p.add_argument("--step-s", type=float, default=0.0, help="seconds between two chunks")
    p.add_argument("--leak-kib", type=int, default=0, help="kept for ever of each GET /health")
    args = p.parse_args()
    if args.child:
        deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", deaf])
        print(f"child {child.pid}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    app = Fake(args.step_s, args.leak_kib).app()
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, handle_signals=False)


if __name__ == "__main__":
    main()
