"""A whole server with a fake device: HTTP, the async face, the link, scheduler, pages, grammars.

``Link`` is the client of the real one with a thread instead of a process at the other end, so that
fault points on both sides of the boundary can be armed here. ``play`` runs the same requests in every
world and tells what each client got.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import socket
import threading
import uuid
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from jserve.api.http.front import Limits
from jserve.config import EngineConfig
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.client import ProcClient
from jserve.engine.engine import Engine
from jserve.engine.process import run
from jserve.engine.wire import HandleCommand, SocketLink, ToEngine
from jserve.errors import EngineDead, NotReady
from jserve.grammar.checker import GrammarChecker
from jserve.grammar.guides import TokenGuides
from jserve.grammar.vocab import vocabulary
from jserve.ports import RunnerLimits
from jserve.sched.record.journal import JournalFile
from jserve.sched.scheduler import Scheduler
from jserve.testing import FakeRunner
from tests.api.fake import CONTEXT, EOS, VOCAB, Live, byte_tokenizer, live, until

CHAT, COMP = "/v1/chat/completions", "/v1/completions"


def takes_one(asked: Any) -> None:
    """The check of the runner's one step feature, which says each drawn token again, or those of the prompt too."""
    if asked not in (1, "prompt"):
        raise ValueError(f"must be 1, not {asked!r}")


LIMITS = RunnerLimits(
    n_slots=6,
    max_rows=6,
    max_decode_rows=6,
    max_prefill_tokens=32,
    max_prefill_rows=3,
    max_drafts=0,
    n_pages=60,
    page_size=16,
    max_model_len=CONTEXT,
    vocab_size=VOCAB,
    features={"echo": takes_one},
    prompt_features={"echo": lambda asked: asked == "prompt"},
)
OPTIONS = {"max_num_seqs": 6, "max_num_batched_tokens": 38}


class Link(ProcClient):
    """``ProcClient`` whose engine is a thread behind the same socket."""

    def __init__(self, config: EngineConfig, build) -> None:
        super().__init__(config)
        self._build = build
        self._code = 1

    def _spawn(self, theirs: socket.socket) -> None:
        link = SocketLink(theirs.dup(), ToEngine)

        def engine() -> None:
            try:
                self._code = run(link, self._build, alone=False)
            finally:
                link.close()

        self._thread = threading.Thread(target=engine, name="engine", daemon=True)
        self._thread.start()

    def _reap(self) -> int:
        self._thread.join(5.0)
        return self._code

    def kill(self) -> None:
        """A thread cannot be killed; it ends with its socket."""


@dataclass
class World:
    """A server and its parts; ``engines`` and ``runners`` of all starts, the newest last."""

    srv: Live = None  # type: ignore[assignment]
    face: AsyncEngine = None  # type: ignore[assignment]
    engines: list[Engine] = field(default_factory=list)
    runners: list[FakeRunner] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        return self.engines[-1]

    async def idle(self) -> None:
        """Wait until nothing runs and the engine answers; then every page and slot is back (I17)."""
        await until(lambda: self.face.n_active == 0, 10.0)
        await asyncio.wait_for(self._answered(), 10.0)
        await until(lambda: not self.engine.busy, 5.0)
        resources = self.engine.scheduler.resources
        resources.check()
        cache = resources.cache
        assert cache.pool.n_free + cache.tree.n_nodes == cache.pool.n_usable, "pages are lost"
        assert cache.tree.n_evictable == cache.tree.n_nodes, "a lock is left"
        assert len(resources.running) == len(resources.waiting) == 0
        assert len(resources._slots) == LIMITS.n_slots, "a slot is lost"
        assert not self.engine.scheduler.groups

    async def _answered(self) -> None:
        """Wait for a word from the engine. ``face.ready`` is not enough: one that died a moment ago
        is ready until its end is heard of."""
        while True:
            try:
                await self.face.handles(HandleCommand(id=uuid.uuid4().hex, action="find"))
                return
            except (NotReady, EngineDead):
                assert not self.face.gave_up.is_set(), self.face.gave_up_reason
                await asyncio.sleep(0.01)


@functools.cache
def checker() -> GrammarChecker:
    """One for all worlds: its process takes a second to start."""
    return GrammarChecker(lambda: vocabulary(byte_tokenizer(), VOCAB, (EOS,)))


@asynccontextmanager
async def world(
    *,
    step_s: float = 0.0,
    eos_rate: int = 0,
    limits: Limits | None = None,
    make_runner=FakeRunner,
    serve: dict[str, Any] | None = None,
    face: dict[str, Any] | None = None,
    journal: Path | None = None,
    **options: Any,
):
    """A running ``World``. ``options`` are the engine's, ``serve`` the server's, ``face`` those of
    ``AsyncEngine``; ``journal`` gets the scheduler's inputs."""
    made = World()
    config = EngineConfig.of(**OPTIONS | options)
    guides = TokenGuides(lambda: vocabulary(byte_tokenizer(), VOCAB, (EOS,)), mask_threads=1)

    def build(config, progress):
        made.runners.append(make_runner(LIMITS, eos_rate=eos_rate, step_s=step_s))
        file = None if journal is None else JournalFile(journal.open("wb", buffering=0))
        scheduler = Scheduler(LIMITS, config, guides=guides, journal=file)
        made.engines.append(Engine(scheduler, made.runners[-1]))
        return made.engines[-1], {}

    given = {"backoff_s": 0.01, "max_restarts": 5} | (face or {})
    made.face = AsyncEngine(lambda: Link(config, build), **given)
    await made.face.start()
    try:
        async with live(made.face, limits=limits, **serve or {}) as srv:
            prepare = srv.server.front.prepare
            own, prepare._checker = prepare._checker, checker()
            made.srv = srv
            try:
                yield made
            finally:
                prepare._checker = own
    finally:
        await made.face.close()
        guides.close()


# -- the workload

PICK = {
    "type": "object",
    "properties": {
        "a": {"enum": ["x", "y"]},
        "n": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["a", "n"],
    "additionalProperties": False,
}
STEM = "the same long beginning of several prompts, "


def _chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "seed": 1} | fields


JOBS: list[tuple[str, dict[str, Any]]] = [
    (COMP, {"prompt": STEM + "one", "max_tokens": 10, "seed": 1}),
    (COMP, {"prompt": STEM + "two", "max_tokens": 14, "seed": 2, "n": 2, "stream": True}),
    (CHAT, _chat("hello", stream=True)),
    (
        CHAT,
        _chat(
            "pick",
            response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": PICK}},
            max_tokens=40,
        ),
    ),
    (CHAT, _chat("go", structured_outputs={"regex": "(ab|cd){2,5}"}, stream=True)),
    (COMP, {"prompt": ["x", STEM], "max_tokens": 6, "seed": 3}),
    (COMP, {"prompt": STEM * 4, "max_tokens": 5, "temperature": 0, "logprobs": 2}),
    (CHAT, _chat("stop soon", temperature=0, stop=["q", "zz"], max_tokens=30)),
]
GOOD, REFUSED, BROKEN, CUT = "good", "refused", "broken", "cut"


@dataclass(frozen=True)
class Got:
    """What one client was told. ``kind``: a whole answer, an error status, a stream that ended with
    an error event, or a connection that just ended."""

    kind: str
    texts: tuple[str, ...] = ()
    ends: tuple[str | None, ...] = ()
    code: str = ""


async def play(made: World) -> list[Got]:
    """All jobs side by side; what each client got."""
    return list(await asyncio.gather(*(_ask(made, path, body) for path, body in JOBS)))


async def probe(made: World) -> Got:
    """The first job, alone."""
    return await _ask(made, *JOBS[0])


async def _ask(made: World, path: str, body: dict[str, Any]) -> Got:
    async with (
        aiohttp.ClientSession() as http
    ):  # a connection of its own, as one that is cut is lost
        try:
            async with http.post(made.srv.url + path, json=body) as response:
                raw = await response.read()
                status = response.status
        except aiohttp.ClientError:
            return Got(CUT)
    if status != 200:
        return Got(REFUSED, code=json.loads(raw)["error"]["code"] or "")
    return _streamed(raw, path) if body.get("stream") else _whole(json.loads(raw))


def _whole(answer: dict[str, Any]) -> Got:
    choices = sorted(answer["choices"], key=lambda c: c["index"])
    texts = tuple(c["text"] if "text" in c else c["message"]["content"] for c in choices)
    return Got(GOOD, texts, tuple(c["finish_reason"] for c in choices))


def _streamed(raw: bytes, path: str) -> Got:
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    lines = [part for part in raw.decode().split("\n\n") if part.startswith("data: ")]
    done = [line for line in lines if line == "data: [DONE]"]
    errors = []
    for line in lines:
        if line in done:
            continue
        event = json.loads(line[6:])
        if "error" in event:
            errors.append(event["error"]["code"])
            continue
        for choice in event["choices"]:
            said = choice["text"] if path == COMP else choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + said
            if choice["finish_reason"]:
                assert choice["index"] not in ends, "two ends of one choice"
                ends[choice["index"]] = choice["finish_reason"]
    assert len(done) + len(errors) <= 1, "a stream ends once"
    order = sorted(texts)
    told = (tuple(texts[i] for i in order), tuple(ends.get(i) for i in order))
    if done:
        assert lines[-1] == "data: [DONE]"
        assert len(ends) == len(texts), "a choice has no end"
        return Got(GOOD, *told)
    return Got(BROKEN, *told, code=errors[0]) if errors else Got(CUT, *told)


def tasks() -> int:
    """Tasks of this loop that are not over."""
    gc.collect()
    return sum(not task.done() for task in asyncio.all_tasks())


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
