"""A tokenizer of bytes, an engine that plays a script, and a live server around them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jserve.api.http.app import make_app
from jserve.api.http.front import Limits
from jserve.api.http.server import HttpServer
from jserve.api.request.parsed import ModelCard
from jserve.config import EngineConfig
from jserve.engine.face import ReplicaState
from jserve.engine.wire import StepRecord
from jserve.errors import NotReady
from jserve.text.chat.template import ChatTemplate
from jserve.text.tokenizer import TextTokenizer
from jserve.types import Finish, HandleInfo, Output, Request, TokenLogprob

SPECIAL = ("<|bos|>", "<|im_start|>", "<|im_end|>")
BOS, IM_START, EOS = 256, 257, 258
VOCAB = 259
CONTEXT = 512

CHATML = """{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""


def byte_tokenizer() -> TextTokenizer:
    """Byte-level, no merges: id = byte value; three control tokens behind."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in printable]
    vocab = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(moved)}
    assert sorted(vocab) == alphabet
    hf = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return TextTokenizer(hf, {"eos_token": "<|im_end|>", "bos_token": "<|bos|>"})


@dataclass(eq=False)
class Record:
    """What happened to one request; times are monotonic seconds."""

    request: Request
    at: float
    cancelled_at: float | None = None
    finished: bool = False
    failed: bool = False
    aborted: list[int | None] = field(default_factory=list)
    n_sent: int = 0


class FakeEngine:
    """Plays ``texts`` (in turn per choice), ``chunk`` tokens per output, then the end token.

    Attributes:
        first_delay: seconds before the first output: queue and prefill.
        delay: seconds between outputs.
        fail_at: the output number at which ``failure`` is yielded instead.
        refuse: raised by ``generate`` before anything else.
        slow_after: from this output number on, wait ``slow_s``.
        update_at: from this output number on, the weights are "new".
    """

    def __init__(self, texts: tuple[str, ...] = ("Hello, wörld! 🙂",)) -> None:
        self.texts = texts
        self.chunk = 1
        self.first_delay = self.delay = 0.0
        self.stall_after: int | None = None
        self.fail_at: int | None = None
        self.update_at: int | None = None
        self.failure: dict = {"error": "a step failed", "error_code": "engine_step_failed"}
        self.refuse: Exception | None = None
        self.raise_at: tuple[int, Exception] | None = None
        self.records: list[Record] = []
        self.is_healthy = self.is_ready = True
        self.reasons: list[str] = []
        self.draining = False
        self.gave_up = asyncio.Event()
        self.gave_up_reason = ""
        self.steps: deque[tuple[int, StepRecord]] = deque(maxlen=600)
        self.counters = {"restarts": 0, "engine_deaths": 0}
        self.info: dict[str, object] = {"kernels": "xla", "no_kernels": "a fake engine"}
        self.n_cached = self.n_buffered_bytes = 0
        self.states: list[ReplicaState] = []
        self.commands: list[str] = []
        self.asked: list = []
        self.disobeys: Exception | None = None
        self.values: dict[str, float] = {
            "pages_total": 100,
            "pages_free": 30,
            "pages_cached": 20,
            "preemptions": 2,
            "cache_query_tokens": 40,
            "cache_hit_tokens": 10,
            "compiles_after_ready_total": 0,
        }
        self._tokenizer = byte_tokenizer()

    @property
    def ready(self) -> bool:
        return self.is_ready and not self.draining

    @property
    def n_active(self) -> int:
        return sum(not r.finished and r.cancelled_at is None for r in self.records)

    def healthy(self) -> bool:
        return self.is_healthy

    def degraded_reasons(self) -> list[str]:
        return self.reasons

    def replicas(self) -> list[ReplicaState]:
        return self.states

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(
            step=7, waiting=1, running=self.n_active, in_flight=1, values=self.values
        )

    async def drain(self, timeout_s: float) -> int:
        self.draining = True
        end = time.monotonic() + timeout_s
        while self.n_active and time.monotonic() < end:
            await asyncio.sleep(0.01)
        active = [r for r in self.records if not r.finished and r.cancelled_at is None]
        for record in active:
            record.aborted.append(None)
        return len(active)

    async def create(self, request, ttl_s):
        return [Output(request_id=request.id, index=0, finish=Finish.LENGTH)]

    async def handles(self, message):
        name = message.name or "c"
        return [HandleInfo(name=name, n_tokens=1, n_pages=1, pinned=True, expires_in_s=9.0)]

    async def control(self, message) -> dict:
        self.commands.append(message.action)
        self.asked.append(message)
        if self.disobeys is not None:
            raise self.disobeys
        return {"version": message.version or "0", "paused": False, "asleep": [], "held": 0}

    def abort(self, request_id: str, index: int | None = None) -> None:
        for record in self.records:
            if record.request.id == request_id:
                record.aborted.append(index)

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        if self.refuse is not None:
            raise self.refuse
        if self.draining:
            raise NotReady("the server is shutting down", code="draining")
        record = Record(request, time.monotonic())
        self.records.append(record)
        try:
            async with aclosing(self._play(request, record)) as outputs:
                async for output in outputs:
                    record.n_sent += 1
                    yield output
            record.finished = True
        finally:
            if not record.finished:
                record.cancelled_at = time.monotonic()

    async def _play(self, request: Request, record: Record) -> AsyncIterator[Output]:
        await asyncio.sleep(self.first_delay)
        scripts = [self.script(request, i) for i in range(request.params.n)]
        number = 0
        while any(scripts):
            for index, script in enumerate(scripts):
                if not script:
                    continue
                if self.stall_after is not None and number >= self.stall_after:
                    await asyncio.sleep(60)
                if number:
                    await asyncio.sleep(self.delay)
                if self.raise_at is not None and number == self.raise_at[0]:
                    raise self.raise_at[1]
                if number == self.fail_at:
                    record.failed = True
                    yield Output(
                        request_id=request.id, index=index, finish=Finish.ERROR, **self.failure
                    )
                    return
                if None in record.aborted or index in record.aborted:
                    script.clear()
                    yield Output(request_id=request.id, index=index, finish=Finish.ABORT)
                    continue
                new = self.update_at is not None and number >= self.update_at
                output = script.pop(0)
                yield msgspec.structs.replace(output, weights="new") if new else output
                number += 1

    def script(self, request: Request, index: int) -> list[Output]:
        """The outputs of one choice, as a real engine would give them for these parameters."""
        params = request.params
        text = self.texts[index % len(self.texts)]
        ids = [*self._tokenizer.encode(text, add_special_tokens=False)]
        n_text = len(ids)
        if params.ignore_eos:
            ids += [ord("z")] * CONTEXT
        else:
            ids.append(EOS)
        limit = CONTEXT - len(request.prompt_ids)
        if params.max_tokens is not None:
            limit = min(limit, params.max_tokens)
        stops = [i for i, t in enumerate(ids) if t in params.stop_token_ids and i < n_text]
        end = min([*(i + 1 for i in stops), limit, len(ids)])
        ids = ids[:end]
        stopped = ids[-1] in params.stop_token_ids or ids[-1] == EOS
        batches = [ids[i : i + self.chunk] for i in range(0, len(ids), self.chunk)]
        return [
            Output(
                request_id=request.id,
                index=index,
                token_ids=tuple(batch),
                logprobs=self._logprobs(batch, params),
                prompt_logprobs=self._prompt(request) if number == 0 else None,
                finish=self._finish(stopped) if number == len(batches) - 1 else None,
                stop_reason=ids[-1]
                if number == len(batches) - 1 and ids[-1] in params.stop_token_ids
                else None,
                n_cached=self.n_cached if number == 0 else 0,
                seed=(params.seed or 1000) + index if number == 0 else None,
            )
            for number, batch in enumerate(batches)
        ]

    @staticmethod
    def _finish(stopped: bool) -> Finish:
        return Finish.STOP if stopped else Finish.LENGTH

    @staticmethod
    def _logprobs(ids, params):
        if not params.shows_logprobs:
            return None
        if params.logprob_token_ids is None:
            return tuple(_scored(t, params.logprobs) for t in ids)
        return tuple(_named(t, params.logprob_token_ids) for t in ids)

    @staticmethod
    def _prompt(request: Request):
        n_top = request.params.prompt_logprobs
        if n_top is None:
            return None
        return (None, *(_scored(t, n_top) for t in request.prompt_ids[1:]))


def _scored(token: int, n_top: int) -> TokenLogprob:
    """The token is always the second most likely; the likeliest is the next id."""
    top = ((token + 1) % VOCAB, token, *range(n_top))[:n_top]
    lps = (-0.25, -1.5, *([float("-inf")] * n_top))[:n_top]
    return TokenLogprob(token=token, logprob=-1.5, rank=2, top_ids=top, top_logprobs=lps)


def _named(token: int, ids: tuple[int, ...]) -> TokenLogprob:
    lps = tuple(-float(i) for i in ids)
    return TokenLogprob(
        token=token, logprob=-1.5, rank=2, top_ids=ids, top_logprobs=lps, named=True
    )


@dataclass(eq=False)
class Live:
    """A server on a free loopback port, its engine, and an HTTP client."""

    url: str
    engine: FakeEngine
    http: aiohttp.ClientSession
    app: web.Application
    server: HttpServer

    async def post(self, path: str, body, **kwargs) -> tuple[int, dict, Any]:
        """(status, JSON, headers)"""
        async with self.http.post(self.url + path, json=body, **kwargs) as r:
            return r.status, await r.json(), r.headers

    async def get(self, path: str, **kwargs) -> tuple[int, dict, Any]:
        async with self.http.get(self.url + path, **kwargs) as r:
            return r.status, await r.json(), r.headers

    def app_metrics(self) -> str:
        return self.server.front.metrics.scrape("text/plain")[0].decode()

    async def events(self, path: str, body, **kwargs) -> list:
        """Everything a stream sent: parsed events, "[DONE]", and comments as they are."""
        async with self.http.post(self.url + path, json=body | {"stream": True}, **kwargs) as r:
            assert r.status == 200, await r.text()
            return parse_events(await r.read())


def parse_events(raw: bytes) -> list:
    text = raw.decode("utf-8")
    assert not text or text.endswith("\n\n")
    found = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            found.append(block)
        elif block.startswith("event: "):
            name, _, data = block.partition("\n")
            assert data.startswith("data: "), block
            found.append(json.loads(data[6:]))
            assert name == "event: " + found[-1]["type"], block
        elif block == "data: [DONE]":
            found.append("[DONE]")
        else:
            assert block.startswith("data: "), block
            assert "\n" not in block, block
            found.append(json.loads(block[6:]))
    return found


def card(**changes) -> ModelCard:
    values = {
        "name": "tiny",
        "aliases": ("tiny-alias",),
        "max_model_len": CONTEXT,
        "vocab_size": VOCAB,
        "eos_ids": (EOS,),
        "version": "0.0.test",
        "fingerprint": "fp",
    }
    return ModelCard(**values | changes)


@asynccontextmanager
async def live(
    engine: FakeEngine | None = None,
    *,
    template: str | None = CHATML,
    limits: Limits | None = None,
    model: ModelCard | None = None,
    **options,
):
    """A running server. ``options`` are flat option names of the config. Without ``limits`` a refusal
    does not stand: the next request is asked for its own sake."""
    limits = limits or Limits(refusal_hold_s=0.0)
    engine = engine or FakeEngine()
    config = EngineConfig.of(**{"port": 0, "keep_alive_s": 15.0} | options)
    chat = ChatTemplate({"default": template}, control=SPECIAL) if template else None
    app = make_app(config, engine, byte_tokenizer(), chat, model or card(), limits=limits)
    server = HttpServer(app, config.server.host, config.server.port)
    url = await server.start()
    async with aiohttp.ClientSession() as http:
        try:
            yield Live(url, engine, http, app, server)
        finally:
            await server.stop(0.2)


def chat_body(text: str = "hi", **fields) -> dict:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}]} | fields


async def until(condition, seconds: float = 2.0) -> None:
    """Waits for ``condition()``; fails after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        await asyncio.sleep(0.005)
