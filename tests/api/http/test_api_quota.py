"""Tenants from a file: whose key it is, what each may use, what a refusal says."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from datetime import UTC, datetime

import pytest
import yaml

from jserve.api.http.auth import Keys, Tenant, load_tenants
from jserve.api.http.error_format import duration, moment
from jserve.api.http.quota import Account, Quota, Standing, TokenBucket
from jserve.api.http.server import check_doors
from jserve.config import EngineConfig
from jserve.errors import ConfigError, Overloaded, RateLimited
from tests.api.fake import FakeEngine, chat_body, live, until

CHAT, COMP = "/v1/chat/completions", "/v1/completions"


def hashed(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def written(tmp_path, entries) -> str:
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump(entries))
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_fills_evenly_and_holds_one_minute():
    clock = Clock()
    bucket = TokenBucket(60, clock)
    assert bucket.wait_s(60) == 0
    bucket.take(61)
    assert bucket.wait_s(1) == pytest.approx(2)
    clock.now += 1.5
    assert bucket.wait_s(1) == pytest.approx(0.5)
    clock.now += 1e6
    assert bucket.wait_s(60) == 0
    assert bucket.wait_s(61) == pytest.approx(1)


def test_an_account_refuses_by_name_and_counts_only_what_it_let_in():
    clock = Clock()
    account = Account(Quota(requests_per_minute=2, tokens_per_minute=600, concurrent=1), clock)
    with account.request():
        with pytest.raises(RateLimited) as e, account.request():
            pass
        assert e.value.field == "concurrent"
        account.spend(700)
    with pytest.raises(RateLimited) as e, account.request():
        pass
    assert e.value.field == "tokens_per_minute"
    assert e.value.retry_after == pytest.approx(10.1)
    clock.now += 11
    with account.request():
        pass
    with pytest.raises(RateLimited) as e, account.request():
        pass
    assert e.value.field == "requests_per_minute"
    assert account.n_running == 0
    assert 0 < e.value.retry_after <= 30


async def test_requests_per_minute(tmp_path):
    entries = [
        {"tenant": "a", "keys": [hashed("ka"), hashed("ka2")], "requests_per_minute": 2},
        {"tenant": "b", "keys": [hashed("kb")]},
    ]
    async with live(api_keys_file=written(tmp_path, entries)) as srv:
        for key in ("ka", "ka2"):
            assert (await srv.post(CHAT, chat_body(), headers=bearer(key)))[0] == 200
        status, body, headers = await srv.post(CHAT, chat_body(), headers=bearer("ka"))
        assert status == 429
        assert body["error"]["type"] == "rate_limit_error"
        assert body["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(headers["Retry-After"]) <= 30
        assert headers.get("x-should-retry") is None
        assert (await srv.get("/v1/models", headers=bearer("ka")))[0] == 200
        for _ in range(4):
            assert (await srv.post(CHAT, chat_body(), headers=bearer("kb")))[0] == 200
        names = [record.request.tenant for record in srv.engine.records]
        assert names == ["a", "a", "b", "b", "b", "b"]
        assert (await srv.post(CHAT, chat_body(), headers=bearer("kc")))[0] == 401


async def test_answers_tell_how_the_limits_stand(tmp_path):
    entries = [
        {
            "tenant": "a",
            "keys": [hashed("ka")],
            "requests_per_minute": 3,
            "tokens_per_minute": 60000,
        },
        {"tenant": "b", "keys": [hashed("kb")], "requests_per_minute": 3},
        {"tenant": "c", "keys": [hashed("kc")]},
    ]
    body = chat_body(stream=True)

    def told(headers, what):
        names = (f"x-ratelimit-{part}-{what}" for part in ("limit", "remaining", "reset"))
        return [headers.get(name) for name in names]

    async with live(api_keys_file=written(tmp_path, entries)) as srv:
        left = []
        for _ in range(3):
            async with srv.http.post(srv.url + CHAT, json=body, headers=bearer("ka")) as r:
                await r.read()
            limit, remaining, reset = told(r.headers, "requests")
            assert (limit, reset[-1]) == ("3", "s")
            left.append(int(remaining))
            limit, remaining, _ = told(r.headers, "tokens")
            assert limit == "60000"
            assert 59000 < int(remaining) < 60000, "the prompt's tokens are spent"
        assert left == [2, 1, 0]
        status, _, headers = await srv.post(CHAT, chat_body(), headers=bearer("ka"))
        assert (status, told(headers, "requests")[:2]) == (429, ["3", "0"])
        _, _, headers = await srv.post(CHAT, chat_body(), headers=bearer("kb"))
        assert told(headers, "requests")[:2] == ["3", "2"]
        assert told(headers, "tokens") == [None] * 3
        for key, path in (("kc", CHAT), ("wrong", CHAT)):
            _, _, headers = await srv.post(path, chat_body(), headers=bearer(key))
            assert not [name for name in headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_anthropics_clients_are_told_in_their_names(tmp_path, path):
    entries = [
        {
            "tenant": "a",
            "keys": [hashed("ka")],
            "requests_per_minute": 60,
            "tokens_per_minute": 600,
        },
        {"tenant": "b", "keys": [hashed("kb")], "tokens_per_minute": 600},
    ]
    body = {"messages": chat_body()["messages"]}
    body |= {"max_tokens": 3} if path == "/v1/messages" else {}
    async with live(api_keys_file=written(tmp_path, entries)) as srv:
        before = time.time()
        status, answer, headers = await srv.post(path, body, headers=bearer("ka"))
        assert status == 200, answer
        told = {
            n.removeprefix("anthropic-ratelimit-"): v for n, v in headers.items() if "limit" in n
        }
        resets = [told.pop(f"{what}-reset") for what in ("requests", "tokens")]
        asked = [record.request for record in srv.engine.records]
        spent = sum(len(r.prompt_ids) + r.params.max_tokens for r in asked)
        assert told == {
            "requests-limit": "60",
            "requests-remaining": "59",
            "tokens-limit": "600",
            "tokens-remaining": str(600 - spent),
        }
        for reset, missing_s in zip(resets, (1.0, spent / 10), strict=True):
            at = datetime.strptime(reset, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
            assert -0.1 <= at - before - missing_s < 30
        status, answer, headers = await srv.post(path, body | {"top": 1}, headers=bearer("kb"))
        assert "anthropic-ratelimit-tokens-limit" in headers
        assert not [n for n in headers if "ratelimit-requests" in n or n.startswith("x-ratelimit")]
        status, answer, headers = await srv.post(path, {}, headers=bearer("ka"))
        assert (status, answer["type"]) == (400, "error")
        assert headers["anthropic-ratelimit-requests-limit"] == "60"


def test_a_moment_is_never_too_early():
    assert moment(0) == "1970-01-01T00:00:00Z"
    assert moment(1795342500.001) == "2026-11-22T10:15:01Z"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (1.5, "1.5s"), (60, "1m0s"), (361.25, "6m1.25s")],
)
def test_durations_are_written_as_openai_does(seconds, text):
    assert duration(seconds) == text


def test_a_bucket_below_zero_has_nothing_left():
    clock = Clock()
    bucket = TokenBucket(60, clock)
    assert bucket.standing == Standing(60, 60, 0)
    bucket.take(90)
    assert bucket.standing == Standing(60, 0, 90)
    clock.now += 31.5
    assert bucket.standing == Standing(60, 1, 58.5)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/score"])
async def test_tokens_of_prompt_and_answer_are_spent(tmp_path, path):
    entries = [{"tenant": "a", "keys": [hashed("ka")], "tokens_per_minute": 3}]
    bodies = {
        CHAT: chat_body(),
        "/v1/messages": chat_body() | {"max_tokens": 5},
        "/v1/responses": {"input": "hi"},
        "/v1/score": {"query": "abcdef", "items": ["b"]},
    }
    async with live(api_keys_file=written(tmp_path, entries)) as srv:
        assert (await srv.post(path, bodies[path], headers=bearer("ka")))[0] == 200
        status, body, headers = await srv.post(path, bodies[path], headers=bearer("ka"))
        assert status == 429
        assert (body.get("type") == "error") is (path == "/v1/messages")
        assert int(headers["Retry-After"]) > 60, "the bucket is far below zero"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_spent_as_far_as_it_was_drawn(tmp_path, stream):
    entries = [{"tenant": "a", "keys": [hashed("ka")], "tokens_per_minute": 6}]
    engine = FakeEngine(("x" * 40,))
    async with live(engine, api_keys_file=written(tmp_path, entries)) as srv:
        body = {"prompt": "x", "max_tokens": 2, "stream": stream}
        for _ in range(2):
            async with srv.http.post(srv.url + COMP, json=body, headers=bearer("ka")) as r:
                assert r.status == 200, "1 of prompt and 2 of answer, twice, are what it has"
                await r.read()
        status, _, headers = await srv.post(COMP, body, headers=bearer("ka"))
        assert status == 429
        assert int(headers["Retry-After"]) <= 10


@pytest.mark.parametrize("path", [COMP, "/v1/score"])
async def test_what_the_engine_refuses_costs_no_tokens(tmp_path, path):
    entries = [{"tenant": "a", "keys": [hashed("ka")], "tokens_per_minute": 60}]
    body = {COMP: {"prompt": "x" * 50}, "/v1/score": {"query": "x" * 49, "items": ["y"]}}[path]
    engine = FakeEngine()
    async with live(engine, api_keys_file=written(tmp_path, entries)) as srv:
        engine.refuse = Overloaded("full", retry_after=1)
        for _ in range(5):
            status, _, headers = await srv.post(path, body, headers=bearer("ka"))
            assert (status, headers["x-ratelimit-remaining-tokens"]) == (503, "60")
        engine.refuse = None
        assert (await srv.post(path, body, headers=bearer("ka")))[0] == 200


async def test_requests_at_once_also_after_a_client_left(tmp_path):
    engine = FakeEngine(("x" * 300,))
    engine.delay = 0.02
    entries = [{"tenant": "a", "keys": [hashed("ka")], "concurrent": 1}]
    async with live(engine, api_keys_file=written(tmp_path, entries)) as srv:
        first = asyncio.create_task(
            srv.post(COMP, {"prompt": "x", "max_tokens": 300}, headers=bearer("ka"))
        )
        await until(lambda: engine.records)
        status, body, _ = await srv.post(COMP, {"prompt": "x"}, headers=bearer("ka"))
        assert (status, body["error"]["param"]) == (429, "concurrent")
        first.cancel()
        await until(lambda: engine.n_active == 0)
        engine.delay = 0.0
        await until(lambda: srv.server.front.accounts.of("a", Quota()).n_running == 0)
        body = {"prompt": "x", "max_tokens": 1}
        assert (await srv.post(COMP, body, headers=bearer("ka")))[0] == 200


def test_every_digest_is_compared_in_constant_time_on_bytes(monkeypatch):
    seen = []

    def compare(a, b):
        assert type(a) is type(b) is bytes
        seen.append(b)
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    pairs = [(bytes.fromhex(hashed(k)[7:]), Tenant(name=k)) for k in ("t1", "t2", "t3")]
    keys = Keys(("k1", "k2"), pairs)
    assert keys.check(bearer("t1")).name == "t1"
    assert len(seen) == 5, "a hit does not end the comparison"
    assert keys.check(bearer("k1")).name == hashed("k1")[7:23]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "list of tenants"),
        ({"tenant": "a"}, "list of tenants"),
        (["x"], "entry 0 must be a mapping"),
        ([{"keys": [hashed("a")]}], "entry 0: tenant"),
        ([{"tenant": "a b", "keys": [hashed("a")]}], "entry 0: tenant"),
        ([{"tenant": "a"}], "entry 0: keys"),
        ([{"tenant": "a", "keys": ["sk-clear"]}], "entry 0: keys"),
        ([{"tenant": "a", "keys": [hashed("a")], "rpm": 3}], "unknown field 'rpm'"),
        ([{"tenant": "a", "keys": [hashed("a")], "concurrent": 0}], "concurrent must be"),
        ([{"tenant": "a", "keys": [hashed("a")], "concurrent": True}], "concurrent must be"),
        ([{"tenant": "a", "keys": [hashed("a")], "admin": "yes"}], "admin must be"),
        ([{"tenant": "a", "keys": [hashed("a"), hashed("a")]}], "listed twice"),
    ],
)
def test_a_bad_file_is_refused_with_the_entry(tmp_path, entries, words):
    with pytest.raises(ConfigError, match=words) as e:
        load_tenants(written(tmp_path, entries))
    assert e.value.field == "api_keys_file"
    assert "sk-clear" not in e.value.message


def test_a_missing_or_broken_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_tenants(str(tmp_path / "none.yaml"))
    (tmp_path / "bad.yaml").write_text("{[")
    with pytest.raises(ConfigError, match="not YAML"):
        load_tenants(str(tmp_path / "bad.yaml"))
    assert load_tenants("") == []


def test_a_public_port_without_a_key_warns(caplog):
    def warned(host: str, keys: Keys) -> bool:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="jserve.api"):
            check_doors(EngineConfig.of(host=host).server, keys)
        return "no API key" in caplog.text

    for host in ("0.0.0.0", "::", "192.168.1.4", "example.org"):
        assert warned(host, Keys(()))
        assert not warned(host, Keys(("sk-1",)))
    for host in ("127.0.0.1", "::1", "localhost", "127.3.2.1"):
        assert not warned(host, Keys(()))


def test_a_public_operators_port_needs_an_operators_key():
    options = EngineConfig.of(enable_admin=True, admin_host="0.0.0.0").server
    admin = (bytes(32), Tenant(name="ops", admin=True))
    for keys in (Keys(()), Keys(("sk-1",)), Keys((), [(bytes(32), Tenant(name="a"))])):
        with pytest.raises(ConfigError, match="admin_host"):
            check_doors(options, keys)
    check_doors(options, Keys((), [admin]))
