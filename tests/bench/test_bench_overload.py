"""The flood: its arrivals, clients that wait or storm, and what a run is judged by."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from aiohttp import web

from bench import overload
from bench.client import Target, connections
from bench.overload import Client, Shape
from bench.stats import Trace

SHAPE = Shape(prompt=4, output=3, ttft_s=1.0, tpot_s=0.1, most_retries=5)


def served(at: float, ttft: float, *, lane: str = "interactive", gap: float = 0.01) -> Client:
    text = [at + ttft + gap * i for i in range(3)]
    trace = Trace(sent=at, ended=text[-1], text=text, wanted=3, usage=3, finish="length")
    return Client(at=at, lane=lane, stormy=False, trace=trace, first_sent=at)


def refused(at: float, after: float | None, *, lane: str = "interactive") -> Client:
    trace = Trace(sent=at, error="refused with 503", wanted=3)
    one = Client(at=at, lane=lane, stormy=False, trace=trace, first_sent=at)
    one.refusals.append((503, after, 0.002))
    return one


def test_arrivals_follow_the_phases_and_shares() -> None:
    clients = overload.arrivals(20.0, (10.0, 10.0, 20.0), 1)
    per_phase = [sum(a <= c.at < b for c in clients) for a, b in ((0, 10), (10, 20), (20, 40))]
    for n, want in zip(per_phase, (180, 2000, 360), strict=True):
        assert abs(n - want) < 4 * want**0.5
    lanes = Counter(c.lane for c in clients)
    assert abs(lanes["standard"] / len(clients) - 0.4) < 0.05
    assert abs(sum(c.stormy for c in clients) / len(clients) - 0.2) < 0.03


def test_good_counts_from_the_first_sending() -> None:
    assert served(0.0, 0.9).good(SHAPE)
    assert not served(0.0, 1.1).good(SHAPE)
    assert not served(0.0, 0.5, gap=0.2).good(SHAPE)
    late = served(5.0, 0.5)
    late.first_sent = 4.0
    assert not late.good(SHAPE)


def test_figures_judge_each_phase_and_the_answers() -> None:
    calm = [served(i, 0.1) for i in range(10)]
    flood = [served(10 + i, 0.1) for i in range(8)] + [refused(15.0, 2.0), refused(16.0, 1.0)]
    after = [served(20 + i, 0.1) for i in range(9)] + [served(23.5, 3.0), refused(24, 1.0)]
    bulk = [refused(12.0, 4.0, lane="bulk")]
    found = overload.figures([*calm, *flood, *after, *bulk], SHAPE, (10.0, 10.0, 10.0))
    assert found["phases"]["calm interactive"] == {"sent": 10, "good_per_s": 1.0}
    assert found["kept"] == 0.8
    assert found["recovery_s"] == 4.0
    assert found["refused"] == {"503": 4}
    assert (found["without_retry_after"], found["unanswered"]) == (0, 0)
    assert overload.holds(found)


@pytest.mark.parametrize("fault", ["no header", "no answer", "no refusal"])
def test_what_must_hold_can_fail(fault: str) -> None:
    clients = [served(1.0, 0.1), refused(11.0, None if fault == "no header" else 1.0)]
    if fault == "no answer":
        lost = Client(at=12.0, lane="bulk", stormy=True, trace=Trace(sent=12.0, error="reset"))
        clients.append(lost)
    if fault == "no refusal":
        clients.pop()
    assert not overload.holds(overload.figures(clients, SHAPE, (10.0, 10.0, 10.0)))


class Busy:
    """Refuses the first ``n`` sendings, then serves."""

    def __init__(self, n: int) -> None:
        self.left, self.sendings = n, 0

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.sendings += 1
        if self.left:
            self.left -= 1
            return web.json_response({"error": {}}, status=503, headers={"Retry-After": "1"})
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        for _ in range(body["max_tokens"]):
            await reply.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        end = b'data: {"choices": [{"text": "", "finish_reason": "length"}], "usage": {"completion_tokens": 3}}\n\n'
        await reply.write(end + b"data: [DONE]\n\n")
        return reply


async def live(busy: Busy, client: Client, shape: Shape) -> None:
    app = web.Application()
    app.add_routes([web.post("/v1/completions", busy.completions)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with connections() as http:
            target = Target(url=f"http://127.0.0.1:{port}", model="m")
            await overload.live(http, target, client, shape, 0.0, 0)
    finally:
        await runner.cleanup()


def test_a_stormy_client_sends_again_at_once_and_is_served() -> None:
    busy, client = Busy(3), Client(at=0.0, lane="bulk", stormy=True)
    asyncio.run(live(busy, client, SHAPE))
    assert (busy.sendings, len(client.refusals)) == (4, 3)
    assert client.trace.complaint is None
    assert client.answered
    assert all(r[:2] == (503, 1.0) for r in client.refusals)


def test_a_patient_client_gives_up_when_it_would_be_too_late() -> None:
    busy, client = Busy(3), Client(at=0.0, lane="bulk", stormy=False)
    asyncio.run(live(busy, client, SHAPE))
    assert busy.sendings == 1
    assert client.answered
    assert not client.good(SHAPE)


def test_usage_errors() -> None:
    for argv in ([], ["m", "--seconds", "0"], ["m", "--rate", "-1"]):
        with pytest.raises(SystemExit) as e:
            overload.main(argv)
        assert e.value.code == 2
