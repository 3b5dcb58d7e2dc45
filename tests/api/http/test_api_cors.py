"""Which pages a browser lets call the API."""

from __future__ import annotations

import pytest

from jserve.errors import ConfigError
from tests.api.fake import chat_body, live

CHAT = "/v1/chat/completions"
HOME = "https://app.example"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
}


def cross(headers) -> dict[str, str]:
    return {n: v for n, v in headers.items() if n.startswith("Access-Control")}


async def test_without_origins_no_page_is_told_anything(srv):
    for method, expected in (("OPTIONS", 405), ("POST", 200)):
        asked = PREFLIGHT | {"Origin": HOME}
        async with srv.http.request(method, srv.url + CHAT, json=chat_body(), headers=asked) as r:
            assert r.status == expected
            assert not cross(r.headers)
            assert "Vary" not in r.headers


@pytest.mark.parametrize(("allowed", "origin"), [(HOME, HOME), ("*", "http://any.example:3000")])
async def test_a_page_of_an_allowed_origin_may_call(allowed, origin):
    async with live(allowed_origins=("http://other.example", allowed), api_key=("k",)) as srv:
        asked = PREFLIGHT | {"Origin": origin}
        async with srv.http.options(srv.url + CHAT, headers=asked) as r:
            assert r.status == 204, "a browser asks without the key"
            assert r.headers["Access-Control-Allow-Origin"] == origin
            assert "POST" in r.headers["Access-Control-Allow-Methods"]
            parsed = r.headers["Access-Control-Allow-Headers"]
            assert parsed == PREFLIGHT["Access-Control-Request-Headers"]
            assert r.headers["Vary"] == "Origin"
        key = {"Authorization": "Bearer k"}
        for headers, status in ((key, 200), ({}, 401)):
            body = chat_body(stream=True)
            asked = headers | {"Origin": origin}
            async with srv.http.post(srv.url + CHAT, json=body, headers=asked) as r:
                assert r.status == status, "a page needs its key all the same"
                assert r.headers["Access-Control-Allow-Origin"] == origin
                assert r.headers["Access-Control-Expose-Headers"] == "*"
        assert len(srv.engine.records) == 1


async def test_other_pages_and_other_options_are_as_before():
    async with live(allowed_origins=(HOME,)) as srv:
        for origin in ("https://evil.example", HOME + ".evil.example", "null", ""):
            async with srv.http.options(
                srv.url + CHAT, headers=PREFLIGHT | {"Origin": origin}
            ) as r:
                assert (r.status, cross(r.headers)) == (405, {}), origin
                assert r.headers["Vary"] == "Origin"
        async with srv.http.options(srv.url + CHAT, headers={"Origin": HOME}) as r:
            assert r.status == 405, "no preflight"
        odd = PREFLIGHT | {"Origin": HOME, "Access-Control-Request-Headers": 'a"b' + "x" * 2000}
        async with srv.http.options(srv.url + CHAT, headers=odd) as r:
            assert r.status == 204
            assert "Access-Control-Allow-Headers" not in r.headers


@pytest.mark.parametrize(
    "origin", ["app.example", "https://app.example/", "https://", " ", "ftp://x"]
)
async def test_what_is_no_origin_is_a_config_error(origin):
    with pytest.raises(ConfigError) as caught:
        async with live(allowed_origins=(origin,)):
            pass
    assert caught.value.field == "allowed_origins"
