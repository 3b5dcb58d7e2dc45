"""Keys, the table of routes, the small endpoints, metrics."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jserve.api.http.app import ACCESS
from jserve.api.http.auth import Access, Keys
from jserve.errors import Overloaded, Unauthorized
from jserve.serve_commands import fingerprint
from tests.api.fake import FakeEngine, card, chat_body, live

# Who may call what. A route that is added must be added here by hand, on purpose.
EXPECTED = {
    ("POST", "/v1/caches"): "user",
    ("GET", "/v1/caches"): "user",
    ("GET", "/v1/caches/{name}"): "user",
    ("POST", "/v1/caches/{name}"): "user",
    ("DELETE", "/v1/caches/{name}"): "user",
    ("POST", "/v1/chat/completions"): "user",
    ("POST", "/v1/responses"): "user",
    ("POST", "/v1/messages"): "user",
    ("POST", "/v1/messages/count_tokens"): "user",
    ("POST", "/v1/score"): "user",
    ("GET", "/v1/support"): "user",
    ("GET", "/openapi.json"): "user",
    ("POST", "/v1/completions"): "user",
    ("GET", "/v1/models"): "user",
    ("GET", "/v1/models/{model}"): "user",
    ("GET", "/v1/dashboard"): "user",
    ("POST", "/tokenize"): "user",
    ("POST", "/detokenize"): "user",
    ("GET", "/metrics"): "user",
    ("GET", "/version"): "user",
    ("GET", "/health"): "open",
    ("GET", "/ready"): "open",
    ("GET", "/"): "open",
    ("GET", "/dashboard"): "open",
    ("GET", "/web/{name}"): "open",
}
KEY = {"Authorization": "Bearer sk-1"}


async def test_every_route_is_in_the_table(srv):
    found = {
        (route.method, route.resource.canonical): str(srv.app[ACCESS][route.resource.canonical])
        for route in srv.app.router.routes()
        if route.method != "HEAD"
    }
    assert found == EXPECTED


async def test_every_route_asks_for_a_key():
    async with live(api_key=("sk-1", "sk-2")) as srv:
        for (method, path), level in EXPECTED.items():
            url = srv.url + path.replace("{model}", "tiny").replace("{name}", "base.css")
            async with srv.http.request(method, url, json={}) as r:
                assert (r.status == 401) is (level != "open"), path
                if level != "open":
                    body = await r.json()
                    assert body["error"]["code"] == "invalid_api_key"
                    assert (body.get("type") == "error") is ("messages" in path)
                    assert body["error"]["type"] == "authentication_error"
                    assert r.headers["WWW-Authenticate"] == "Bearer"
                    assert r.headers["x-request-id"]
            async with srv.http.request(method, url, json={}, headers=KEY) as r:
                assert r.status != 401, path
        async with srv.http.get(srv.url + "/nope") as r:
            assert r.status == 401
        async with srv.http.get(srv.url + "/nope", headers=KEY) as r:
            assert r.status == 404


@pytest.mark.parametrize(
    ("headers", "good"),
    [
        ({"Authorization": "Bearer sk-1"}, True),
        ({"Authorization": "bearer sk-2"}, True),
        ({"x-api-key": "sk-2"}, True),
        ({"Authorization": "Basic sk-1"}, False),
        ({"Authorization": "sk-1"}, False),
        ({"Authorization": "Bearer sk-11"}, False),
        ({"Authorization": "Bearer "}, False),
        ({"Authorization": "Bearer sk-3", "x-api-key": "sk-1"}, False),
        ({"x-api-key": ""}, False),
        ({"x-api-key": "sk-\udcff"}, False),
        ({}, False),
    ],
)
def test_keys(headers, good):
    keys = Keys(("sk-1", "sk-2"))
    if good:
        keys.check(headers)
    else:
        with pytest.raises(Unauthorized):
            keys.check(headers)


def test_keys_are_not_kept():
    keys = Keys(("sk-secret",))
    assert all(b"sk-secret" not in digest for digest, _ in keys._tenants)
    Keys(()).check({})
    assert Access("admin") is Access.ADMIN


async def test_keyed_chat_works():
    async with live(api_key=("sk-1",)) as srv:
        assert (await srv.post("/v1/chat/completions", chat_body(), headers=KEY))[0] == 200
        assert (await srv.post("/v1/chat/completions", chat_body()))[0] == 401
        assert len(srv.engine.records) == 1


async def test_models(srv):
    _, body, _ = await srv.get("/v1/models")
    assert body["object"] == "list"
    assert [m["id"] for m in body["data"]] == ["tiny", "tiny-alias"]
    assert body["data"][0]["max_model_len"] == 512
    _, one, _ = await srv.get("/v1/models/tiny-alias")
    assert one == body["data"][1]


async def test_every_served_name_is_taken_and_the_first_one_answers():
    user = [{"role": "user", "content": "hi"}]
    asked = {
        "/v1/chat/completions": {"messages": user},
        "/v1/completions": {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": user, "max_tokens": 5},
        "/v1/score": {"query": "hi", "items": ["a"]},
    }
    async with live(model=card(name="gpt-x", aliases=("claude-y", "z"))) as srv:
        _, body, _ = await srv.get("/v1/models")
        assert [m["id"] for m in body["data"]] == ["gpt-x", "claude-y", "z"]
        for path, fields in asked.items():
            for name in ("gpt-x", "claude-y", "z"):
                status, body, _ = await srv.post(path, {**fields, "model": name})
                assert (status, body["model"]) == (200, "gpt-x"), (path, name)
            status, body, _ = await srv.post(path, {**fields, "model": "tiny"})
            assert status == 404


async def test_a_models_name_may_hold_slashes():
    async with live(model=card(name="org/tiny", aliases=())) as srv:
        for path in ("/v1/models/org/tiny", "/v1/models/org%2Ftiny"):
            status, body, _ = await srv.get(path)
            assert (status, body["id"]) == (200, "org/tiny")
        for path in ("/v1/models/tiny", "/v1/models/org/tiny/x"):
            status, body, _ = await srv.get(path)
            assert (status, body["error"]["code"]) == (404, "model_not_found")
            assert body["error"]["param"] == "model"


async def test_every_answer_has_an_id_of_its_kind_and_says_what_made_it(srv):
    user = [{"role": "user", "content": "hi"}]
    asked = {
        "chatcmpl-": ("/v1/chat/completions", {"messages": user}),
        "cmpl-": ("/v1/completions", {"prompt": "hi"}),
        "resp_": ("/v1/responses", {"input": "hi"}),
        "msg_": ("/v1/messages", {"messages": user, "max_tokens": 5}),
        "score-": ("/v1/score", {"query": "a", "items": ["b"]}),
    }
    for prefix, (path, body) in asked.items():
        ids = set()
        for _ in range(2):
            _, answer, _ = await srv.post(path, body)
            assert answer["id"].startswith(prefix)
            ids.add(answer["id"])
            if path in ("/v1/chat/completions", "/v1/completions"):
                assert answer["system_fingerprint"] == "fp"
        assert len(ids) == 2


def test_the_fingerprint_is_of_model_version_and_config():
    f32, bf16 = {"dtype": "float32"}, {"dtype": "bfloat16"}
    one = fingerprint("tiny", "1", f32)
    assert one == fingerprint("tiny", "1", f32)
    assert one.startswith("fp_")
    others = (("big", "1", f32), ("tiny", "2", f32), ("tiny", "1", bf16))
    assert len({one, *(fingerprint(*other) for other in others)}) == 4


async def test_version(srv):
    assert (await srv.get("/version"))[1] == {"version": "0.0.test"}


async def test_health_and_ready_follow_the_engine(srv):
    assert (await srv.get("/health"))[0] == 200
    assert (await srv.get("/ready"))[0] == 200
    srv.engine.is_healthy = False
    status, body, headers = await srv.get("/health")
    assert (status, body["error"]["code"]) == (503, "engine_dead")
    assert headers["Retry-After"]
    srv.engine.is_ready = False
    assert (await srv.get("/ready"))[1]["error"]["code"] == "starting"
    srv.engine.draining = True
    assert (await srv.get("/ready"))[1]["error"]["code"] == "draining"


async def scrape(srv) -> dict[str, float]:
    async with srv.http.get(srv.url + "/metrics") as r:
        assert r.status == 200
        text = await r.text()
    return {
        s.name + str(dict(sorted((s.labels or {}).items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


async def test_metrics_count_what_happened():
    engine = FakeEngine(("abc", "defg"))
    engine.n_cached, engine.n_buffered_bytes = 2, 77
    async with live(engine) as srv:
        await srv.post("/v1/completions", {"prompt": "hello", "n": 2})
        await srv.events("/v1/completions", {"prompt": "hi", "max_tokens": 2})
        await srv.get("/nope")
        engine.refuse = Overloaded("full", retry_after=1)
        await srv.post("/v1/completions", {"prompt": "counts for nothing"})
        found = await scrape(srv)
    tiny = "{'model_name': 'tiny'}"
    assert found[f"jserve:prompt_tokens_total{tiny}"] == 7
    assert found[f"jserve:buffered_output_bytes{tiny}"] == 77
    assert found[f"jserve:generation_tokens_total{tiny}"] == 4 + 5 + 2
    assert found[f"jserve:prompt_tokens_cached_total{tiny}"] == 4
    assert found[f"jserve:time_to_first_token_seconds_count{tiny}"] == 3
    assert found[f"jserve:inter_token_latency_seconds_count{tiny}"] == 3 + 4 + 1
    assert found[f"jserve:e2e_request_latency_seconds_count{tiny}"] == 3
    reasons = "jserve:request_success_total{'finished_reason': '%s', 'model_name': 'tiny'}"
    assert found[reasons % "stop"] == 2
    assert found[reasons % "length"] == 1
    http = "jserve:http_requests_total{'route': '%s', 'status': '%s'}"
    assert found[http % ("/v1/completions", 200)] == 2
    assert found[http % ("unknown", 404)] == 1
    assert found[f"jserve:num_requests_waiting{tiny}"] == 1
    assert found[f"jserve:num_requests_running{tiny}"] == 0
    assert found[f"jserve:kv_cache_usage_perc{tiny}"] == 0.5
    assert found[f"jserve:num_preemptions_total{tiny}"] == 2
    assert found[f"jserve:prefix_cache_queries_total{tiny}"] == 40
    assert found[f"jserve:prefix_cache_hits_total{tiny}"] == 10
    assert found[f"jserve:compiles_after_ready_total{tiny}"] == 0
    assert found[f"jserve:engine_restarts_total{tiny}"] == 0


async def test_metrics_count_tokens_not_outputs():
    engine = FakeEngine(("abcdefgh",))
    engine.chunk = 5
    async with live(engine) as srv:
        await srv.post("/v1/completions", {"prompt": "x"})
        found = await scrape(srv)
    assert found["jserve:generation_tokens_total{'model_name': 'tiny'}"] == 9
    assert found["jserve:inter_token_latency_seconds_count{'model_name': 'tiny'}"] == 1


async def test_metric_labels_hold_no_client_text(srv):
    for i in range(20):
        await srv.get(f"/evil-{i}")
        await srv.post("/v1/chat/completions", chat_body(model=f"evil-{i}"))
    text = srv.app_metrics()
    assert "evil" not in text
    async with srv.http.get(
        srv.url + "/metrics", headers={"Accept": "application/openmetrics-text"}
    ) as r:
        assert "openmetrics" in r.headers["Content-Type"]
        assert (await r.text()).endswith("# EOF\n")


async def test_no_template_means_no_chat():
    async with live(template=None) as srv:
        status, body, _ = await srv.post("/v1/chat/completions", chat_body())
        assert (status, body["error"]["code"]) == (400, "no_chat_template")
        assert (await srv.post("/v1/completions", {"prompt": "x"}))[0] == 200


async def test_no_prompt_scores_means_refusal():
    from tests.api.fake import card

    async with live(model=card(scores_prompts=False)) as srv:
        for fields in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
            status, body, _ = await srv.post("/v1/completions", {"prompt": "x"} | fields)
            assert (status, body["error"]["code"]) == (400, "unsupported_parameter")
            assert body["error"]["param"] == next(iter(fields))


async def test_the_log_line(srv, caplog):
    with caplog.at_level("INFO", logger="jserve.api"):
        await srv.post("/v1/completions?key=sk-private", {"prompt": "private words"})
        await srv.get("/private-path")
        async with srv.http.request("SEARCH", srv.url + "/health") as r:
            assert r.status == 405
    lines = [r.getMessage() for r in caplog.records if r.name == "jserve.api"]
    assert any(line.startswith("POST /v1/completions 200 ") for line in lines)
    assert any(line.startswith("GET unknown 404 ") for line in lines)
    assert any(line.startswith("? unknown 405 ") for line in lines), "a method may be anything"
    assert "private" not in "".join(lines)
