"""GET /v1/dashboard: the figures of /metrics, percentiles of right now, steps told once."""

from __future__ import annotations

import math
import random
import time

import pytest

from jserve.api.ops.recent import Recent
from jserve.engine.face import ReplicaState
from jserve.engine.wire import StepRecord
from tests.api.fake import FakeEngine, chat_body, live


def step(at: float, **changes) -> StepRecord:
    values = {"n_rows": 3, "n_prefill_rows": 1, "n_prefill_tokens": 64, "n_drawn": 2}
    return StepRecord(**{"at": at, "device_us": 4500.0} | values | changes)


async def test_figures_are_those_of_the_metrics() -> None:
    engine = FakeEngine(("abcd",))
    engine.n_cached = 2
    engine.values |= {"bulk_waiting": 3, "bulk_refused": 5, "overload_level": 1}
    async with live(engine) as srv:
        await srv.post("/v1/completions", {"prompt": "hello"})
        status, body, headers = await srv.get("/v1/dashboard")
    assert status == 200
    assert headers["Cache-Control"] == "no-store"
    assert body["server"]["model"] == "tiny"
    assert body["server"]["healthy"] is True
    assert body["server"]["degraded_reasons"] == []
    assert body["requests"] == {"running": 0, "waiting": 1, "http": 1}
    assert body["totals"] == {
        "steps": 7,
        "prompt_tokens": 5,
        "cached_tokens": 2,
        "output_tokens": 5,
        "preemptions": 2,
    }
    assert body["lanes"]["bulk"] == {
        "waiting": 3,
        "running": 0,
        "refused": 5,
        "expired": 0,
        "finished": 0,
    }
    assert body["overload_level"] == 1
    assert body["kv"] == {"pages": 100, "pages_free": 30, "pages_cached": 20}
    assert body["prefix"] == {"looked_up": 40, "found": 10}
    assert body["speculation"] is None
    assert body["replicas"] == []
    assert body["latency_ms"]["ttft"]["n"] == 1
    assert body["latency_ms"]["itl"]["n"] == 4
    assert 0 < body["latency_ms"]["ttft"]["p50"] < 10_000


def replica(name: str, state: str) -> ReplicaState:
    figures = {"requests": 9, "running": 2, "waiting": 1, "pages": 100, "pages_used": 50}
    return ReplicaState(
        name=name, state=state, suspicion=1.0, role="decode", looked_up=8, found=4, **figures
    )


async def test_replicas_are_told_and_counted_by_state() -> None:
    engine = FakeEngine()
    engine.states = [replica("a", "ready"), replica("b", "ready"), replica("c", "out")]
    engine.values |= {"fleet_load": 1.3, "replicas_needed": 2.0}
    async with live(engine) as srv:
        _, body, _ = await srv.get("/v1/dashboard")
        async with srv.http.get(srv.url + "/metrics") as response:
            text = await response.text()
    assert [(one["name"], one["state"]) for one in body["replicas"]] == [
        ("a", "ready"),
        ("b", "ready"),
        ("c", "out"),
    ]
    assert (body["replicas"][0]["found"], body["replicas"][0]["odd"]) == (4, 0)
    assert body["fleet"] == {"load": 1.3, "needed": 2.0}
    assert 'jserve:replicas{model_name="tiny",state="ready"} 2.0' in text
    assert 'jserve:replicas{model_name="tiny",state="out"} 1.0' in text


async def test_speculation_is_told_where_there_is_some() -> None:
    engine = FakeEngine()
    engine.values |= {
        "spec_decode_num_draft_tokens_total{proposer=ngram,lane=standard}": 5,
        "spec_decode_num_draft_tokens_total{proposer=grammar,lane=bulk}": 3,
        "spec_decode_num_accepted_tokens_total{proposer=ngram,lane=standard}": 6,
    }
    async with live(engine) as srv:
        assert (await srv.get("/v1/dashboard"))[1]["speculation"] == {"drafted": 8, "accepted": 6}


async def test_steps_are_told_once() -> None:
    engine = FakeEngine()
    engine.steps.extend((i, step(100.0 + i)) for i in range(5))
    async with live(engine) as srv:
        first = (await srv.get("/v1/dashboard"))[1]["steps"]
        assert [row[0] for row in first["rows"]] == [0, 1, 2, 3, 4]
        told = dict(zip(first["columns"], first["rows"][1], strict=True))
        assert told == {
            "number": 1,
            "at": 101.0,
            "ms": 4.5,
            "rows": 3,
            "prefill_rows": 1,
            "prefill_tokens": 64,
            "drawn": 2,
        }
        assert [row[0] for row in (await srv.get("/v1/dashboard?after=2"))[1]["steps"]["rows"]] == [
            3,
            4,
        ]
        assert (await srv.get("/v1/dashboard?after=4"))[1]["steps"]["rows"] == []


@pytest.mark.parametrize("after", ["x", "1.5", ""])
async def test_a_bad_step_number_is_refused_by_name(srv, after: str) -> None:
    status, body, _ = await srv.get(f"/v1/dashboard?after={after}")
    assert (status, body["error"]["param"]) == (400, "after")


async def test_it_stands_behind_the_key() -> None:
    async with live(api_key=("sk-1",)) as srv:
        assert (await srv.get("/v1/dashboard"))[0] == 401
        key = {"Authorization": "Bearer sk-1"}
        assert (await srv.get("/v1/dashboard", headers=key))[0] == 200


async def test_it_tells_nothing_of_what_was_said() -> None:
    engine = FakeEngine(("secret answer",))
    async with live(engine) as srv:
        await srv.post("/v1/chat/completions", chat_body("secret question", user="secret me"))
        async with srv.http.get(srv.url + "/v1/dashboard") as r:
            assert "secret" not in await r.text()


class Sink:
    def __init__(self) -> None:
        self.seen: list[float] = []

    def observe(self, amount: float) -> None:
        self.seen.append(amount)


def test_percentiles_are_exact_over_what_is_kept() -> None:
    rng = random.Random(1)
    for n in (1, 2, 7, 100, 300):
        sink = Sink()
        recent = Recent(sink, kept=250)
        values = [rng.random() for _ in range(n)]
        for value in values:
            recent.observe(value)
        late = sorted(values[-250:])
        found = recent.percentiles(time.monotonic())
        assert sink.seen == values
        assert found.n == len(late)
        for p, told in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
            # The smallest value that at least a share p of all is not above.
            assert told == min(
                v for v in late if sum(x <= v for x in late) >= math.ceil(p * len(late))
            )


def test_what_is_old_is_not_counted() -> None:
    recent = Recent(Sink())
    recent.observe(1.0)
    later = time.monotonic() + 30
    assert recent.percentiles(later, window_s=60).n == 1
    assert recent.percentiles(later, window_s=20).n == 0
    assert recent.percentiles(later, window_s=20).p99 is None


async def test_it_says_why_the_engine_is_not_ready() -> None:
    engine = FakeEngine()
    engine.reasons = ["steps take 8.0 times as long as at the warm-up"]
    async with live(engine) as srv:
        _, body, _ = await srv.get("/v1/dashboard")
    assert body["server"]["degraded_reasons"] == engine.reasons
