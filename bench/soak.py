"""A long mixed load with clients that leave, stall and lie, and a look for anything that grows.

Owns the mix, the samples and the gates. Must not know how a server is built. Each client takes the next
kind of traffic from a seeded draw; a control request with a known answer runs all along::

    chat and completions, streamed and whole, n, schemas, tools     answers must be whole
    leave at a random moment, stop reading                          must cost nobody else anything
    broken bodies, fields out of range, bombs                       must be 4xx, never 5xx
    control: greedy, the same all along                             must never change
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
from rich.console import Console

from bench.client import connections
from bench.connections import against_server
from bench.engines import Running

SAMPLE_S = 5.0
RSS_GATE_MINUTES = 15.0
RSS_GATE_MIB = 24.0
CHAT, COMP = "/v1/chat/completions", "/v1/completions"
TOPICS = ["a fox", "the weather in Oslo", "12 + 30", "three animals", "the moon", "a short story"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
HOSTILE: list[tuple[str, bytes]] = [
    (path, body)
    for path in (CHAT, COMP)
    for body in (
        b"",
        b"[]",
        b"{",
        b'{"prompt": NaN}',
        b"[" * 100_000,
        b'{"prompt": "x", "n": 1000000}',
        b'{"prompt": "x", "logit_bias": {"-1": 5}}',
        b'{"prompt": [-1, 99999999999]}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "stop": [""]}',
        b'{"messages": [{"role": 3}]}',
        b'{"prompt": "' + b"a" * 300_000 + b'"}',
        b'{"prompt": "x", "structured_outputs": {"regex": "(("}}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
    )
]
err = Console(stderr=True, highlight=False)


@dataclass
class Soak:
    """One run against ``url``."""

    url: str
    http: aiohttp.ClientSession
    rng: random.Random
    until: float
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def client(self) -> None:
        kinds = [self.whole, self.streamed, self.schema, self.leaver, self.stalled, self.hostile]
        while time.monotonic() < self.until:
            (kind,) = self.rng.choices(kinds, weights=[20, 35, 10, 15, 5, 15])
            try:
                await kind()
            except (aiohttp.ClientError, TimeoutError) as e:
                self.note("client_error", f"{kind.__name__}: {type(e).__name__}")

    def note(self, name: str, wrong: str | None = None) -> None:
        self.counts[name] += 1
        if wrong is not None and len(self.wrong) < 20:
            self.wrong.append(wrong)

    def ask(self) -> tuple[str, dict[str, Any]]:
        topic, rng = self.rng.choice(TOPICS), self.rng
        common = {"max_tokens": rng.randint(1, 60), "seed": rng.randrange(2**40)}
        common |= rng.choice([{}, {"temperature": 0}, {"n": 3}, {"logprobs": 2}, {"stop": "the"}])
        if rng.random() < 0.5:
            return COMP, {"prompt": f"Tell me about {topic}. " * rng.randint(1, 9), **common}
        if "logprobs" in common:
            common |= {"logprobs": True, "top_logprobs": 2}
        return CHAT, {"messages": [{"role": "user", "content": topic}], **common}

    async def whole(self) -> None:
        path, body = self.ask()
        async with self.http.post(self.url + path, json=body) as response:
            answer = await response.json()
            self.judge("whole", response.status, answer)
            if response.status == 200 and any(
                c["finish_reason"] is None for c in answer["choices"]
            ):
                self.note("no_finish", "an answer without finish_reason")

    async def streamed(self) -> None:
        path, body = self.ask()
        async with self.http.post(self.url + path, json=body | {"stream": True}) as response:
            raw = await response.read()
            self.judge("streamed", response.status, raw[:300])
            if response.status == 200 and not raw.endswith(b"data: [DONE]\n\n"):
                self.note("cut", f"a stream ended with {raw[-120:]!r}")

    async def schema(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        body = {
            "messages": [{"role": "user", "content": self.rng.choice(TOPICS)}],
            "response_format": form,
            "max_tokens": 80,
            "thinking_token_budget": 8,
        }
        async with self.http.post(self.url + CHAT, json=body) as response:
            answer = await response.json()
            self.judge("schema", response.status, answer)
            if response.status == 200 and answer["choices"][0]["finish_reason"] == "stop":
                json.loads(answer["choices"][0]["message"]["content"])

    async def leaver(self) -> None:
        path, body = self.ask()
        body |= {"stream": self.rng.random() < 0.5, "max_tokens": 200}
        self.note("left")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.rng.random()):
                async with self.http.post(self.url + path, json=body) as response:
                    await response.read()

    async def stalled(self) -> None:
        """Reads the head of a stream, then nothing for a while, and leaves."""
        body = {"prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True, "logprobs": 5}
        async with self.http.post(self.url + COMP, json=body) as response:
            self.judge("stalled", response.status, "")
            await response.content.read(1)
            await asyncio.sleep(self.rng.random() * 5)
            response.close()

    async def hostile(self) -> None:
        path, body = self.rng.choice(HOSTILE)
        headers = {"Content-Type": "application/json"}
        async with self.http.post(self.url + path, data=body, headers=headers) as response:
            text = await response.text()
            self.note(f"hostile_{response.status // 100}xx")
            if response.status >= 500 or response.status == 200:
                self.note("hostile_wrong", f"{response.status} for {body[:60]!r}: {text[:120]}")

    def judge(self, kind: str, status: int, said: Any) -> None:
        self.note(f"{kind}_{status}")
        if status not in (200, 429, 503):
            self.note("refused", f"{kind}: {status} {str(said)[:200]}")

    async def control(self) -> None:
        """The same greedy request all along; its text must not change."""
        body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 24}
        first = None
        while time.monotonic() < self.until:
            async with self.http.post(self.url + COMP, json=body) as response:
                answer = await response.json()
            if response.status == 200:
                text = answer["choices"][0]["text"]
                first = first or text
                self.note("control", None if text == first else f"control: {text!r}")
            await asyncio.sleep(0.5)


async def scrape(url: str, http: aiohttp.ClientSession) -> dict[str, float]:
    """The server's metrics that tell of leaks."""
    async with http.get(url + "/metrics") as response:
        text = await response.text()
    found = re.findall(r"^jserve:([a-z0-9_]+)(?:\{[^}]*\})? ([0-9.e+-]+)$", text, re.M)
    return {name: float(value) for name, value in found}


def usage(pid: int) -> dict[str, float]:
    """Memory in MiB, files and threads of the server's processes."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {
        "mib": sum(p.memory_info().rss for p in processes) / 2**20,
        "files": sum(p.num_fds() for p in processes),
        "threads": sum(p.num_threads() for p in processes),
    }


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """Theil-Sen: the median of the slopes of all pairs."""
    pairs = [
        (b - a) / (t - s) for i, (s, a) in enumerate(samples) for t, b in samples[i + 1 :] if t > s
    ]
    return median(pairs) if pairs else 0.0


async def run(server: Running, args: argparse.Namespace) -> dict[str, Any]:
    """The soak, then quiet, then what is left."""
    began, samples = time.monotonic(), []
    async with connections() as http:
        warm = Soak(server.url, http, random.Random(1), began + min(20.0, 6 * args.minutes))
        await asyncio.gather(*(warm.client() for _ in range(args.clients)))
        await quiet(server.url, http)
        before = usage(server.pid) | {"tasks": (await scrape(server.url, http))["server_tasks"]}
        until = time.monotonic() + 60 * args.minutes
        soak = Soak(server.url, http, random.Random(args.seed), until)

        async def watch() -> None:
            while time.monotonic() < until:
                samples.append((time.monotonic() - began, usage(server.pid)["mib"]))
                await asyncio.sleep(SAMPLE_S)

        await asyncio.gather(watch(), soak.control(), *(soak.client() for _ in range(args.clients)))
        await quiet(server.url, http)
        end = await scrape(server.url, http)
    after = usage(server.pid) | {"tasks": end["server_tasks"]}
    late = samples[len(samples) // 3 :]
    third = max(1, len(late) // 3)
    return {
        "minutes": args.minutes,
        "counts": dict(sorted(soak.counts.items())),
        "wrong": soak.wrong,
        "before": before,
        "after": after,
        "mib_per_hour": 3600 * slope(late),
        "mib_grown": median(m for _, m in late[-third:]) - median(m for _, m in late[:third]),
        "metrics": {
            name: end.get(name, -1.0)
            for name in (
                "num_requests_active",
                "num_requests_running",
                "kv_pages",
                "kv_pages_free",
                "kv_pages_cached",
                "compiles_after_ready_total",
                "engine_deaths_total",
                "step_faults_total",
            )
        },
    }


async def quiet(url: str, http: aiohttp.ClientSession) -> None:
    """Wait until the server has nothing to do, for a minute at most."""
    for _ in range(120):
        await asyncio.sleep(0.5)
        seen = await scrape(url, http)
        if seen["num_requests_active"] == seen["num_requests_running"] == 0:
            break
    await asyncio.sleep(1.0)


def gates(found: dict[str, Any]) -> list[tuple[str, bool]]:
    """What must hold, and whether it does."""
    m, before, after = found["metrics"], found["before"], found["after"]
    checked = [
        ("every answer is as it must be", not found["wrong"]),
        ("the control request was asked", found["counts"].get("control", 0) > 0),
        ("no request is left", m["num_requests_active"] == m["num_requests_running"] == 0),
        ("all pages are back", m["kv_pages_free"] + m["kv_pages_cached"] == m["kv_pages"] > 0),
        ("nothing compiled after ready", m["compiles_after_ready_total"] == 0),
        ("the engine never died", m["engine_deaths_total"] == m["step_faults_total"] == 0),
        ("no file left open", after["files"] <= before["files"] + 4),
        ("no thread left", after["threads"] <= before["threads"] + 2),
        ("no task left", after["tasks"] <= before["tasks"] + 2),
    ]
    if found["minutes"] >= RSS_GATE_MINUTES:
        checked.append((f"memory grew under {RSS_GATE_MIB} MiB", found["mib_grown"] < RSS_GATE_MIB))
    return checked


def main(argv: Sequence[str] | None = None) -> int:
    """0: every gate holds. 1: one does not. 2: no server."""
    parser = argparse.ArgumentParser(prog="bench.soak", description=__doc__)
    parser.add_argument("--model", type=Path, default=None, help="default: the shipped model")
    parser.add_argument("--compile-cache", type=Path, default=None)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--extra", default="--max-model-len 1024 --max-num-seqs 8")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(argv)
    return against_server(args, 900.0, run, gates)


if __name__ == "__main__":
    sys.exit(main())
