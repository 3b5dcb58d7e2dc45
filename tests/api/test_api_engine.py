"""The front over the real async engine, scheduler and page cache, with a fake device."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp

from jserve.config import EngineConfig
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.client import InprocClient
from jserve.engine.engine import Engine
from jserve.ports import RunnerLimits, StepTime
from jserve.sampling import SamplingParams
from jserve.sched.scheduler import Scheduler
from jserve.testing import FakeRunner
from jserve.types import Request
from tests.api.fake import CONTEXT, EOS, VOCAB, byte_tokenizer, chat_body, live, until

CHAT, COMP = "/v1/chat/completions", "/v1/completions"
LIMITS = RunnerLimits(
    n_slots=4,
    max_rows=4,
    max_decode_rows=4,
    max_prefill_tokens=32,
    max_prefill_rows=2,
    max_drafts=0,
    n_pages=80,
    page_size=16,
    max_model_len=CONTEXT,
    vocab_size=VOCAB,
)


class Host:
    """A live server over a real engine; ``engine`` is the core, ``runner`` the fake device."""

    srv = engine = runner = face = None


@asynccontextmanager
async def host(*, limits=LIMITS, step_s: float = 0.0, eos_rate: int = 20, serve=None, **options):
    found = Host()
    config = EngineConfig.of(max_num_seqs=4, max_num_batched_tokens=36, **options)

    def build(config, progress):
        found.runner = FakeRunner(limits, eos_rate=eos_rate, step_s=step_s)
        found.engine = Engine(Scheduler(limits, config), found.runner)
        return found.engine, {}

    found.face = AsyncEngine(lambda: InprocClient(config, build))
    await found.face.start()
    try:
        async with live(found.face, **(serve or {})) as srv:
            found.srv = srv
            yield found
    finally:
        await found.face.close()


def expected_text(runner: FakeRunner, prompt: str, seed: int, max_tokens: int) -> tuple[str, str]:
    """(text, finish reason) by the fake device's definition, without an engine."""
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens)
    request = Request(id="x", prompt_ids=tuple(prompt.encode()), params=params, eos_ids=(EOS,))
    ids = runner.expected(request)
    stopped = ids[-1] == EOS
    shown = ids[:-1] if stopped else ids
    return byte_tokenizer().decode(shown), "stop" if stopped else "length"


async def idle(found: Host) -> None:
    await until(lambda: not found.engine.busy and found.face.n_active == 0, 5.0)
    stats = found.engine.scheduler.stats()
    assert (stats.waiting, stats.running) == (0, 0)
    assert stats.pages_free + stats.pages_cached == stats.pages_total


async def test_texts_are_those_of_the_device():
    rng = random.Random(5)
    async with host() as found:

        async def one(i: int) -> None:
            prompt = "shared stem " * rng.randrange(4) + f"q{i}"
            n = rng.randrange(1, 40)
            body = {"prompt": prompt, "seed": i, "max_tokens": n}
            text, reason = expected_text(found.runner, prompt, i, n)
            _, whole, _ = await found.srv.post(COMP, body)
            events = await found.srv.events(COMP, body)
            choice = whole["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (text, reason)
            streamed = "".join(e["choices"][0]["text"] for e in events[:-1])
            assert streamed == text
            assert choice["seed"] == i

        await asyncio.gather(*(one(i) for i in range(12)))
        await idle(found)


async def test_echoed_scores_come_through():
    async with host() as found:
        body = {"prompt": ["some words", "other"], "echo": True, "logprobs": 2, "max_tokens": 1}
        status, answer, _ = await found.srv.post(COMP, body | {"temperature": 0})
        assert status == 200, answer
        for choice, prompt in zip(answer["choices"], body["prompt"], strict=True):
            scores = choice["logprobs"]
            assert "".join(scores["tokens"][: len(prompt)]) == prompt
            assert scores["token_logprobs"][0] is None
            assert all(lp <= 0 for lp in scores["token_logprobs"][1:])
            assert len(scores["token_logprobs"]) == len(scores["text_offset"]) == len(prompt) + 1
        await idle(found)


async def test_stop_strings_free_the_row():
    async with host(eos_rate=0) as found:
        body = {"prompt": "x", "seed": 3, "max_tokens": 300, "n": 2}
        _, free, _ = await found.srv.post(COMP, body)
        stop = free["choices"][0]["text"][10:12]
        cut = free["choices"][0]["text"].index(stop)
        n_before = found.engine.n_steps
        _, answer, _ = await found.srv.post(COMP, body | {"stop": stop, "n": 1})
        assert answer["choices"][0]["text"] == free["choices"][0]["text"][:cut]
        assert answer["choices"][0]["stop_reason"] == stop
        assert answer["usage"]["completion_tokens"] < 20
        await idle(found)
        assert found.engine.n_steps - n_before < 100, "the row must stop soon after the string"


async def test_engine_refusals_reach_the_client():
    async with host() as found:
        status, body, _ = await found.srv.post(COMP, {"prompt": "x" * 600, "max_tokens": 1})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    async with host(step_s=0.02, max_waiting=1) as found:
        ask = chat_body(max_tokens=30, ignore_eos=True)
        answers = await asyncio.gather(*(found.srv.post(CHAT, ask) for _ in range(12)))
        codes = [status for status, _, _ in answers]
        assert set(codes) == {200, 503}
        assert next(b for s, b, _ in answers if s == 503)["error"]["code"] == "overloaded"
        await idle(found)


async def test_a_burst_at_an_idle_server_is_served():
    """512 at once, one connection each, with the default bounds, at a device whose steps are known to be so
    slow that all this is hours of work."""
    times = tuple(
        StepTime(n_decode=d, n_prefill=p, n_context=64, seconds=10.0, width=1)
        for d in (0, 4)
        for p in (0, 32)
    )
    async with host(limits=replace(LIMITS, step_times=times)) as found:

        async def one(i: int) -> int:
            path, body = (CHAT, chat_body()) if i % 2 else (COMP, {"prompt": f"q{i}"})
            async with aiohttp.ClientSession() as http:
                body |= {"max_tokens": 1}
                async with http.post(found.srv.url + path, json=body) as r:
                    await r.read()
                    return r.status

        assert Counter(await asyncio.gather(*(one(i) for i in range(512)))) == {200: 512}
        await idle(found)


async def test_leaving_at_random_leaves_nothing_behind():
    rng = random.Random(9)
    async with host(step_s=0.002, eos_rate=0) as found:

        async def one(i: int) -> None:
            body = {"prompt": ["a" * rng.randrange(1, 90)] * rng.randrange(1, 3), "n": 2}
            body |= {"max_tokens": 60, "stream": i % 2 == 0, "ignore_eos": True}
            async with aiohttp.ClientSession() as http:
                try:
                    async with asyncio.timeout(rng.random() * 0.3):
                        async with http.post(found.srv.url + COMP, json=body) as r:
                            await r.read()
                except TimeoutError:
                    pass

        await asyncio.gather(*(one(i) for i in range(25)))
        await idle(found)
        body = {"prompt": "after", "seed": 1, "max_tokens": 20}
        _, answer, _ = await found.srv.post(COMP, body)
        text, _ = expected_text(found.runner, "after", 1, 20)
        assert answer["choices"][0]["text"] == text
        assert found.face.healthy()


async def test_a_step_that_raises_once_is_noticed_by_nobody():
    async with host() as found:
        found.runner.fail_next = RuntimeError("device words")
        body = {"prompt": "x", "seed": 1, "max_tokens": 20}
        status, answer, _ = await found.srv.post(COMP, body)
        text, _ = expected_text(found.runner, "x", 1, 20)
        assert (status, answer["choices"][0]["text"]) == (200, text)


async def test_a_request_whose_steps_raise_fails_alone_and_is_not_to_be_sent_again():
    async with host() as found:
        collect = found.runner.collect

        def faulty(flight):
            if any(99 in row.choice.request.prompt_ids for row in flight.plan.rows):
                raise RuntimeError("device words")
            return collect(flight)

        found.runner.collect = faulty
        bodies = [{"prompt": p, "seed": 1, "max_tokens": 20} for p in ("c", "x", "y", "z")]
        answers = await asyncio.gather(*(found.srv.post(COMP, body) for body in bodies))
        status, body, headers = answers[0]
        assert (status, body["error"]["code"]) == (500, "engine_step_failed")
        assert headers["x-should-retry"] == "false"
        assert "device words" not in str(body)
        for (status, answer, _), asked in zip(answers[1:], bodies[1:], strict=True):
            text, _ = expected_text(found.runner, asked["prompt"], 1, 20)
            assert (status, answer["choices"][0]["text"]) == (200, text)
        await idle(found)


async def test_metrics_and_health_of_the_real_engine():
    async with host() as found:
        await found.srv.post(COMP, {"prompt": "x" * 40, "max_tokens": 5})
        await asyncio.sleep(0.05)
        assert (await found.srv.get("/health"))[0] == 200
        assert (await found.srv.get("/ready"))[0] == 200
        async with found.srv.http.get(found.srv.url + "/metrics") as r:
            text = await r.text()
        assert 'jserve:kv_pages{model_name="tiny"} 79.0' in text
        assert 'jserve:engine_deaths_total{model_name="tiny"} 0.0' in text


async def test_draining_the_real_engine():
    async with host(step_s=0.01, eos_rate=0) as found:
        ask = chat_body(max_tokens=300, ignore_eos=True)
        task = asyncio.create_task(found.srv.events(CHAT, ask))
        await until(lambda: found.face.n_active == 1)
        assert await found.face.drain(0.1) == 1
        events = await task
        assert events[-1]["error"]["code"] == "draining"
        status, body, _ = await found.srv.post(CHAT, ask)
        assert (status, body["error"]["code"]) == (503, "draining")
