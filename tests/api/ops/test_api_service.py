"""Lanes, deadlines and tenants over HTTP: passed on, checked, answered with the field at fault."""

from __future__ import annotations

import pytest

from jserve.types import Lane
from tests.api.fake import FakeEngine, chat_body, live

CHAT, COMP = "/v1/chat/completions", "/v1/completions"


async def test_fields_reach_the_request(srv):
    wish = {
        "lane": "bulk",
        "priority": -3,
        "ttft_deadline_ms": 500,
        "tpot_deadline_ms": 20.5,
        "deadline_ms": 9000,
    }
    for path, body in ((CHAT, chat_body()), (COMP, {"prompt": "x"})):
        assert (await srv.post(path, body | wish))[0] == 200
        got = srv.engine.records[-1].request
        assert {name: getattr(got, name) for name in wish} == wish
    assert (await srv.post(CHAT, chat_body(lane=None, deadline_ms=None)))[0] == 200
    got = srv.engine.records[-1].request
    assert (got.lane, got.deadline_ms, got.tenant) == (Lane.STANDARD, None, "")


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("lane", "vip"),
        ("lane", 1),
        *(
            (name, bad)
            for name in ("ttft_deadline_ms", "tpot_deadline_ms", "deadline_ms")
            for bad in (0, -5, "fast", True, 1e10)
        ),
    ],
)
async def test_bad_values_are_refused_by_name(srv, field, bad):
    status, body, _ = await srv.post(CHAT, chat_body(**{field: bad}))
    assert (status, body["error"]["param"]) == (400, field)
    assert not srv.engine.records


async def test_the_key_is_the_tenant_and_is_not_shown():
    async with live(api_key=("sk-1", "sk-2")) as srv:
        for key in ("sk-1", "sk-2", "sk-1"):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await srv.post(CHAT, chat_body(), headers=headers))[0] == 200
            assert (await srv.post(CHAT, chat_body(tenant="me"), headers=headers))[0] == 200
        names = [record.request.tenant for record in srv.engine.records]
        assert names[0] == names[1] == names[4] == names[5], "a client does not choose its tenant"
        assert len({*names}) == 2
        assert all(len(name) == 16 and "sk" not in name for name in names)


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("queue_full_tenant", 429, "rate_limit_error"),
        ("overloaded", 503, "server_error"),
        ("deadline_unreachable", 503, "server_error"),
        ("deadline_infeasible", 400, "invalid_request_error"),
        ("deadline_exceeded", 504, "timeout_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_keep_field_words_and_retry_after(code, status, kind, stream):
    engine = FakeEngine()
    engine.fail_at = 0
    engine.failure = {
        "error": "it takes 70 ms",
        "error_code": code,
        "error_field": "deadline_ms",
        "retry_after": 7.0,
    }
    async with live(engine) as srv:
        got, body, headers = await srv.post(CHAT, chat_body(stream=stream))
    assert got == status
    assert body["error"] == {
        "message": "it takes 70 ms",
        "type": kind,
        "param": "deadline_ms",
        "code": code,
    }
    assert headers.get("Retry-After") == ("7" if status in (429, 503) else None)


async def test_metrics_by_lane():
    engine = FakeEngine()
    engine.values |= {
        "bulk_waiting": 3,
        "bulk_refused": 5,
        "interactive_waiting": 1,
        "interactive_cached_tokens": 64,
        "overload_level": 1,
    }
    async with live(engine) as srv:
        text = srv.app_metrics()
    lines = set(text.splitlines())
    for line in (
        'jserve:lane_requests_waiting{lane="bulk",model_name="tiny"} 3.0',
        'jserve:lane_requests_waiting{lane="interactive",model_name="tiny"} 1.0',
        'jserve:lane_refused_total{lane="bulk",model_name="tiny"} 5.0',
        'jserve:lane_prompt_tokens_cached_total{lane="interactive",model_name="tiny"} 64.0',
        'jserve:overload_level{model_name="tiny"} 1.0',
    ):
        assert line in lines, line
    assert "bulk_waiting" not in text, "told once, with its label"


async def test_ready_says_why_it_is_not(srv):
    """An engine that makes steps and should get no new requests: /health and requests go on."""
    assert (await srv.get("/ready"))[0] == 200
    srv.engine.reasons = ["5 steps failed in a row", "no step for 40 s while there is work"]
    status, body, headers = await srv.get("/ready")
    assert (status, body["error"]["code"]) == (503, "degraded")
    assert body["error"]["message"] == "; ".join(srv.engine.reasons)
    assert int(headers["Retry-After"]) > 0
    assert (await srv.get("/health"))[0] == 200
    assert (await srv.post(CHAT, chat_body()))[0] == 200
