"""What the clients of a soak do: every kind of request there is, well meant or not, and what each must get.

It owns the kinds and the judgement of their answers. Each client takes the next kind from a seeded draw::

    whole, streamed     chat, completions, messages, responses; n, logprobs, stops, many prompts
    shaped, called      schema, regex, grammar, choice; tools; thoughts with a budget
    small               tokens counted, texts scored, the server's own pages
    left                gone while the head, the body or the answer is on its way; FIN or RST
    stalled, sipped     an answer that is not read, or slowly: whoever reads gets all of it
    aborted, forgotten  an operator's: requests ended, cached prefixes dropped
    hostile             broken bodies, bombs, fields out of range: 4xx, never 5xx
    control             greedy, the same all along: its text must never change
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import re
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

CHAT, COMP = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
JSON = {"Content-Type": "application/json"}
TOPICS = ["a fox", "the weather in Oslo", "12 + 30", "three animals", "the moon", "a short story"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
REGEX = r"(red|blue|green)-[0-9]{2,4}"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SHAPES: list[dict[str, Any]] = [
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
        }
    },
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": REGEX}},
    {"structured_outputs": {"choice": ["yes", "no", "it depends on the weather in Oslo"]}},
    {"structured_outputs": {"grammar": 'start: "[" (N ("," N)*)? "]"\nN: /[0-9]{1,3}/'}},
]
SMALL: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/tokenize", {"prompt": "three animals in Oslo"}),
    ("POST", "/detokenize", {"tokens": [5, 6, 7]}),
    ("POST", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a fox"}]}),
    ("POST", "/v1/score", {"query": "a fox is", "items": [" red", " blue", " an animal"]}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/caches", None),
    ("GET", "/health", None),
    ("GET", "/v1/dashboard", None),
    ("GET", "/", None),
]
HOSTILE: list[bytes] = [
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
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "max_tokens": 5}',
    b'{"input": [{"type": "weird"}]}',
    b'{"prompt": "' + b"a" * 300_000 + b'"}',
    b'{"prompt": "x", "structured_outputs": {"regex": "(("}}',
    b'{"prompt": "x", "structured_outputs": {"json": {"$ref": "#"}}}',
    b'{"prompt": "x", "structured_outputs": {"grammar": "start: '
    + b"x? " * 30_000
    + b'\\nx: \\"y\\""}}',
]
RST = struct.pack("ii", 1, 0)


def _user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@dataclass
class Soak:
    """One run against ``url``; ``admin`` is the operator's address."""

    url: str
    admin: str
    http: aiohttp.ClientSession
    rng: random.Random
    until: float
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def client(self) -> None:
        """One client after the other, until the time is up."""
        while time.monotonic() < self.until:
            (name,) = self.rng.choices(list(KINDS), weights=list(KINDS.values()))
            self.counts[name] += 1
            try:
                await getattr(self, name)()
            except (aiohttp.ClientError, OSError, TimeoutError) as e:
                self.note("client_error", f"{name}: {type(e).__name__} {str(e)[:80]}")
            except (ValueError, KeyError, IndexError, TypeError) as e:
                self.note("not_understood", f"{name}: {type(e).__name__} {str(e)[:160]}")

    def note(self, name: str, wrong: str | None = None) -> None:
        self.counts[name] += 1
        if wrong is not None and len(self.wrong) < 20:
            self.wrong.append(wrong)

    def ask(self) -> tuple[str, dict[str, Any]]:
        """Some request of some dialect."""
        rng = self.rng
        path = rng.choice([CHAT, COMP, COMP, MESSAGES, RESPONSES])
        topic, n_tokens = rng.choice(TOPICS), rng.randint(1, 60)
        if path == MESSAGES:
            return path, {**_user(topic), "max_tokens": n_tokens, "temperature": 1}
        if path == RESPONSES:
            return path, {"input": topic, "max_output_tokens": n_tokens, "temperature": 1}
        common = {"max_tokens": n_tokens, "seed": rng.randrange(2**40)}
        common |= rng.choice([{}, {"temperature": 0}, {"n": 3}, {"logprobs": 2}, {"stop": "the"}])
        common |= rng.choice([{}, {}, {"lane": "bulk"}, {"lane": "interactive"}])
        if path == COMP:
            prompt: Any = f"Tell me about {topic}. " * rng.randint(1, 9)
            if rng.random() < 0.2:
                prompt = [prompt, topic, "x"] * rng.randint(1, 4)
            return path, {"prompt": prompt, **common}
        if "logprobs" in common:
            common |= {"logprobs": True, "top_logprobs": 2}
        return path, {**_user(topic), **common}

    async def whole(self) -> None:
        path, body = self.ask()
        answer = await self.post(path, body)
        if answer is not None and not _ended(path, answer):
            self.note("no_finish", f"an answer of {path} without its end")

    async def streamed(self) -> None:
        await self.stream(*self.ask())

    async def shaped(self) -> None:
        """What is finished must be what was asked for."""
        shape = self.rng.choice(SHAPES)
        body = {**_user(self.rng.choice(TOPICS)), **shape, "max_tokens": 80, "temperature": 1}
        if self.rng.random() < 0.5:
            body |= {"thinking_token_budget": 8}
        answer = await self.post(CHAT, body)
        if answer is None or answer["choices"][0]["finish_reason"] != "stop":
            return
        text = answer["choices"][0]["message"]["content"]
        if not _fits(shape, text):
            self.note("misshapen", f"{str(shape)[:80]}: {text[:80]!r}")

    async def called(self) -> None:
        body = {
            **_user("What is the weather in Oslo?"),
            "tools": [TOOL],
            "tool_choice": "required",
            "max_tokens": 80,
        }
        if self.rng.random() < 0.5:
            await self.stream(CHAT, body)
            return
        answer = await self.post(CHAT, body)
        if answer is None or answer["choices"][0]["finish_reason"] != "tool_calls":
            return
        for call in answer["choices"][0]["message"]["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] != "get_weather" or arguments.keys() != {"city"}:
                self.note("misshapen", f"a call of {str(call)[:120]}")

    async def small(self) -> None:
        method, path, body = self.rng.choice(SMALL)
        async with self.http.request(method, self.url + path, json=body) as response:
            self.judge("small", response.status, await response.read())

    async def left(self) -> None:
        """Says all or part of a request, reads some of the answer or none, and is gone."""
        path, body = self.ask()
        data = json.dumps(body | {"stream": self.rng.random() < 0.5}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += "Connection: close\r\n"
        full = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        stage = self.rng.choice(["head", "body", "queued", "first", "middle"])
        self.counts[f"left_{stage}"] += 1
        say = {"head": full[: len(head) // 2], "body": full[: -len(data) // 2]}.get(stage, full)
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setblocking(False)
            async with asyncio.timeout(60):
                await loop.sock_connect(sock, ("127.0.0.1", int(self.url.rsplit(":", 1)[1])))
                await loop.sock_sendall(sock, say)
                for _ in range({"first": 1, "middle": 4}.get(stage, 0)):
                    if not await loop.sock_recv(sock, 256):
                        break
            await asyncio.sleep(self.rng.random() * 0.2)
            if self.rng.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)

    async def stalled(self) -> None:
        """Reads the head of a stream, then nothing for a while, and leaves."""
        async with self.http.post(self.url + COMP, json=LONG) as response:
            self.judge("stalled", response.status, "")
            await response.content.read(1)
            await asyncio.sleep(self.rng.random() * 5)
            response.close()

    async def sipped(self) -> None:
        """Reads slowly, and must get all of it."""
        async with self.http.post(self.url + COMP, json=LONG) as response:
            tail = b""
            while part := await response.content.read(4096):
                tail = (tail + part)[-64:]
                await asyncio.sleep(0.02)
            self.judge("sipped", response.status, tail)
            if response.status == 200 and not tail.endswith(b"data: [DONE]\n\n"):
                self.note("cut", f"a slow reader's stream ended with {tail!r}")

    async def aborted(self) -> None:
        """Ended by an operator in the middle of its answer."""
        label = f"soak-{self.rng.randrange(2**40)}"
        headers = {"x-request-id": label}
        async with self.http.post(self.url + COMP, json=LONG, headers=headers) as response:
            self.judge("aborted", response.status, "")
            first = await response.content.readany()
            async with self.http.post(self.admin + "/abort", json={"request_id": label}) as said:
                n = (await said.json())["aborted"]
            rest = first + await response.read()
        if n and response.status == 200 and b"request_aborted" not in rest[-400:]:
            self.note("cut", f"an aborted stream ended with {rest[-120:]!r}")

    async def forgotten(self) -> None:
        async with self.http.post(self.admin + "/reset_prefix_cache") as response:
            self.judge("forgotten", response.status, await response.read())

    async def hostile(self) -> None:
        body, headers = self.rng.choice(HOSTILE), JSON
        if self.rng.random() < 0.1:
            body, headers = gzip.compress(b" " * 20_000_000), {**JSON, "Content-Encoding": "gzip"}
        path = self.rng.choice([CHAT, COMP, MESSAGES, RESPONSES, "/v1/score"])
        async with self.http.post(self.url + path, data=body, headers=headers) as response:
            text = await response.text()
        self.note(f"hostile_{response.status // 100}xx")
        shed = response.status == 503 and "overloaded" in text  # a full queue reads nobody's fields
        if response.status == 200 or (response.status >= 500 and not shed):
            self.note("hostile_wrong", f"{response.status} for {body[:60]!r}: {text[:120]}")

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

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The whole answer to ``body``, None where it was refused."""
        async with self.http.post(self.url + path, json=body) as response:
            answer = await response.json()
        self.judge(path, response.status, answer)
        return answer if response.status == 200 else None

    async def stream(self, path: str, body: dict[str, Any]) -> None:
        async with self.http.post(self.url + path, json=body | {"stream": True}) as response:
            raw = await response.read()
        self.judge(f"{path} streamed", response.status, raw[:300])
        if response.status == 200 and not re.search(LAST[path], raw[-20_000:]):
            self.note("cut", f"a stream of {path} ended with {raw[-120:]!r}")

    def judge(self, kind: str, status: int, said: Any) -> None:
        self.counts[f"{kind} {status}"] += 1
        if status not in (200, 429, 503):
            self.note("refused", f"{kind}: {status} {str(said)[:200]}")


KINDS: dict[str, int] = {
    "whole": 14,
    "streamed": 22,
    "shaped": 12,
    "called": 6,
    "small": 6,
    "left": 16,
    "stalled": 3,
    "sipped": 3,
    "aborted": 3,
    "forgotten": 1,
    "hostile": 14,
}
"""Methods of ``Soak`` and how often each is drawn."""
LONG = {"prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True, "logprobs": 5}
LAST = {
    CHAT: rb"data: \[DONE\]\n\n$",
    COMP: rb"data: \[DONE\]\n\n$",
    MESSAGES: rb"event: message_stop\n[^\n]+\n\n$",
    RESPONSES: rb"event: response\.(completed|incomplete)\n[^\n]+\n\n$",
}
"""How a good stream ends."""


def _ended(path: str, answer: dict[str, Any]) -> bool:
    if path == MESSAGES:
        return answer["stop_reason"] is not None
    if path == RESPONSES:
        return answer["status"] in ("completed", "incomplete")
    return all(choice["finish_reason"] is not None for choice in answer["choices"])


def _fits(shape: dict[str, Any], text: str) -> bool:
    """Whether a finished text is of its shape."""
    if "response_format" in shape:
        found = json.loads(text)
        plain = shape["response_format"]["type"] == "json_object"
        return isinstance(found, dict) and (plain or found.keys() == {"name", "n"})
    structure = shape["structured_outputs"]
    if "choice" in structure:
        return text in structure["choice"]
    pattern = structure.get("regex", r"\[([0-9]{1,3}(,[0-9]{1,3})*)?\]")
    return re.fullmatch(pattern, text) is not None
