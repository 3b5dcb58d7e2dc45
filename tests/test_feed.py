"""Offline work larger than the queue: all of it is served, in order, and bad requests are told at once."""

from __future__ import annotations

import pytest

from jserve.config import EngineConfig
from jserve.engine.engine import Engine
from jserve.errors import BadRequest
from jserve.feed import Feed
from jserve.ports import RunnerLimits
from jserve.sampling import SamplingParams
from jserve.sched.scheduler import Scheduler
from jserve.testing import FakeRunner
from jserve.types import Lane, Request

LIMITS = RunnerLimits(
    n_slots=4,
    max_rows=4,
    max_decode_rows=4,
    max_prefill_tokens=16,
    max_prefill_rows=4,
    max_drafts=0,
    n_pages=49,
    page_size=4,
    max_model_len=64,
    vocab_size=50,
)


def request(i: int, *, n: int = 1, lane: Lane = Lane.STANDARD, tenant: str = "", length: int = 5):
    params = SamplingParams(temperature=0.0, max_tokens=1 + i % 4, n=n)
    prompt = tuple((i * 7 + k) % 50 for k in range(1 + i % length))
    return Request(id=f"r{i}", prompt_ids=prompt, params=params, lane=lane, tenant=tenant)


def serve(requests, **options) -> tuple[dict[tuple[str, int], list[int]], list[str], int]:
    """(tokens of each choice, ids in the order of their first token, longest queue)."""
    runner = FakeRunner(LIMITS)
    config = EngineConfig.of(max_num_seqs=4, max_num_batched_tokens=20, **options)
    engine = Engine(Scheduler(LIMITS, config), runner)
    feed, left = Feed(engine, requests), {r.id: r.params.n for r in requests}
    tokens: dict[tuple[str, int], list[int]] = {}
    order, longest = [], 0
    while any(left.values()):
        feed.push()
        for out in feed.sift(engine.step()):
            assert out.error is None, out.error
            if (out.request_id, out.index) not in tokens:
                order.append(out.request_id)
            tokens.setdefault((out.request_id, out.index), []).extend(out.token_ids)
            left[out.request_id] -= out.finish is not None
        longest = max(longest, len(engine.scheduler.resources.waiting))
    for r in requests:
        for i in range(r.params.n):
            assert tokens[r.id, i] == runner.expected(r, i)
    return tokens, order, longest


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {"max_waiting": 8}),
        ({}, {"max_waiting": 1}),
        ({"lane": Lane.BULK}, {"max_waiting": 8}),
        ({"tenant": "t"}, {"max_waiting": 8, "tenant_share": 0.05}),
        ({"n": 5}, {"max_waiting": 3}),
        ({"length": 30}, {"max_waiting": 200, "max_waiting_tokens": 20}),
        ({}, {"max_waiting": 100, "max_queue_s": 1e-6}),
    ],
)
def test_more_than_the_queue_holds_is_all_served(fields, options):
    n = 60 if "n" in fields else 300
    _, order, longest = serve([request(i, **fields) for i in range(n)], **options)
    assert longest <= max(options["max_waiting"], fields.get("n", 1))
    if "n" not in fields:
        begun = [int(id[1:]) for id in order]
        assert all(abs(i - at) < 8 for at, i in enumerate(begun)), "first come, first served"


def test_a_bad_request_is_told_before_anything_is_handed_in():
    engine = Engine(Scheduler(LIMITS, EngineConfig.of(max_waiting=4)), FakeRunner(LIMITS))
    bad = Request(id="bad", prompt_ids=(77,), params=SamplingParams(max_tokens=1))
    with pytest.raises(BadRequest, match="77"):
        Feed(engine, [*(request(i) for i in range(50)), bad])
    assert not engine.busy
