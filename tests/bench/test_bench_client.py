"""The load generator against a fake server: what it sends, what it times, what it believes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp.test_utils import TestServer
from fake_server import Fake

from bench.client import Target, drive
from bench.stats import Trace, intrusion, summarise
from bench.workloads import Item, Workload


@asynccontextmanager
async def served(fake: Fake, model: str = "good", timeout_s: float = 10.0) -> AsyncIterator[Target]:
    async with TestServer(fake.app(), host="127.0.0.1") as server:
        url = f"http://127.0.0.1:{server.port}"
        yield Target(url=url, model=model, timeout_s=timeout_s)


def load(n: int, concurrency: int, tokens: int = 4) -> Workload:
    items = tuple(Item(prompt=(300 + i, 301), max_tokens=tokens) for i in range(n))
    return Workload(name="load", items=items, concurrency=concurrency)


async def one(model: str, timeout_s: float = 10.0, tokens: int = 4) -> Trace:
    async with served(Fake(), model, timeout_s) as target:
        [trace] = await drive(target, load(1, 1, tokens))
        return trace


async def test_a_good_stream_is_timed_and_counted() -> None:
    fake = Fake(step_s=0.02)
    async with served(fake) as target:
        [trace] = await drive(target, load(1, 1))
    assert trace.complaint is None
    assert (len(trace.text), trace.usage, trace.tokens, trace.finish) == (4, 4, 4, "length")
    assert trace.sent < trace.text[0] < trace.text[-1] <= trace.ended
    assert len(trace.gaps) == 3
    assert all(0.015 < gap < 1.0 for gap in trace.gaps)
    assert trace.text[0] - trace.sent > 0.018


async def test_every_engine_gets_the_same_greedy_request_in_token_ids() -> None:
    fake = Fake()
    async with served(fake) as target:
        await drive(target, load(1, 1))
    assert fake.bodies == [
        {
            "model": "good",
            "prompt": [300, 301],
            "max_tokens": 4,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


async def test_events_torn_across_network_reads_are_put_together() -> None:
    trace = await one("torn")
    assert (trace.complaint, len(trace.text)) == (None, 4)


async def test_several_tokens_in_one_chunk_count_by_usage() -> None:
    trace = await one("pairs")
    assert (trace.complaint, len(trace.text), trace.tokens) == (None, 2, 4)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("refuses", "status 400"),
        ("error", "engine died"),
        ("truncated", "before [DONE]"),
        ("endless", "no finish_reason"),
        ("silent", "no usage"),
        ("short", "usage 3 of 4"),
        ("boasts", "usage 9 of 4"),
    ],
)
async def test_a_faulty_answer_is_an_error(model: str, says: str) -> None:
    trace = await one(model)
    assert says in (trace.complaint or "")
    result = summarise([trace])
    assert (result["requests"], result["errors"]) == (1, 1)
    assert "output_tok_s" not in result


async def test_a_boasting_usage_does_not_raise_the_token_count() -> None:
    assert (await one("boasts")).tokens == 4


async def test_a_request_that_hangs_ends_at_its_time_limit() -> None:
    trace = await one("hangs", timeout_s=0.3)
    assert "no end within 0.3 s" in (trace.complaint or "")
    assert 0.25 < trace.ended - trace.sent < 5


async def test_a_server_that_is_gone_is_an_error_not_an_exception() -> None:
    async with served(Fake()) as target:
        pass
    [trace] = await drive(target, load(1, 1))
    assert "Connect" in (trace.complaint or "")


async def test_closed_loop_keeps_its_concurrency_and_opens_one_connection_per_request() -> None:
    fake = Fake(step_s=0.01)
    async with served(fake) as target:
        traces = await drive(target, load(12, 3))
    assert fake.most_running == 3
    assert len(fake.peers) == 12
    assert all(t.complaint is None for t in traces)


async def test_open_loop_sends_at_the_given_times() -> None:
    items = tuple(Item(prompt=(300,), max_tokens=2, at=at) for at in (0.0, 0.15, 0.3))
    async with served(Fake()) as target:
        traces = await drive(target, Workload(name="open", items=items, concurrency=0))
    first = traces[0].sent
    assert [round(t.sent - first, 1) for t in traces] == [0.0, 0.1, 0.3] or all(
        abs(t.sent - first - i.at) < 0.1 for t, i in zip(traces, items, strict=True)
    )


async def test_the_late_request_waits_for_the_others_and_its_harm_is_measured() -> None:
    others = tuple(Item(prompt=(300,), max_tokens=40) for _ in range(2))
    late = Item(prompt=tuple(range(300, 1400)), max_tokens=2, after_tokens=5)
    fake = Fake(step_s=0.01)
    async with served(fake) as target:
        load = Workload(name="S4", items=(*others, late), concurrency=0)
        traces = await drive(target, load)
    assert [t.late for t in traces] == [False, False, True]
    assert fake.sent_when_long_came is not None
    assert 10 <= fake.sent_when_long_came < 60
    harm = intrusion(traces)
    assert harm["finished_early"] == 0
    assert 0 < harm["longest_gap_ms"] < 1000
    assert harm["long_ttft_ms"] > 9


async def test_the_late_request_does_not_wait_for_others_that_failed() -> None:
    others = (Item(prompt=(300,), max_tokens=4),)
    late = Item(prompt=(300,), max_tokens=2, after_tokens=8)
    load = Workload(name="S4", items=(*others, late), concurrency=0)
    async with served(Fake(), "error") as target:
        traces = await asyncio.wait_for(drive(target, load), 10)
    assert all(t.complaint for t in traces)
