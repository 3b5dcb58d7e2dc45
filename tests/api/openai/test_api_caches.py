"""Named caches, sessions and hints over HTTP, on the real engine core with a fake device."""

from __future__ import annotations

import asyncio

import pytest

from jserve.api.openai.caches import NOTHING_DRAWN, HandleBook
from jserve.api.request.parsed import ParsedRequest
from jserve.request_options import RequestOptions
from tests.api.fake import chat_body
from tests.api.test_api_engine import CHAT, COMP, host

CACHES = "/v1/caches"
DOCUMENT = "A document that is long enough for several pages of sixteen tokens. "


async def create(srv, name="doc", **fields):
    return await srv.post(CACHES, {"name": name, "prompt": DOCUMENT, "ttl_s": 60} | fields)


def cached(answer) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_cache_from_creation_to_its_end():
    async with host() as found:
        srv = found.srv
        status, made, _ = await create(srv)
        assert status == 200, made
        assert (made["object"], made["name"], made["tokens"]) == ("cache", "doc", len(DOCUMENT))
        assert (made["pages"], made["pinned"], made["uses"]) == (len(DOCUMENT) // 16, True, 0)
        assert made["usage"] == {"prompt_tokens": len(DOCUMENT), "cached_tokens": 0}

        rest = {"prompt": "What does it say?", "max_tokens": 5, "seed": 1, "cache": "doc"}
        whole = rest | {"prompt": DOCUMENT + rest["prompt"]}
        plain = {k: v for k, v in whole.items() if k != "cache"} | {"skip_prefix_cache": True}
        _, by_rest, _ = await srv.post(COMP, rest)
        _, by_whole, _ = await srv.post(COMP, whole)
        _, by_none, _ = await srv.post(COMP, plain)
        texts = {a["choices"][0]["text"] for a in (by_rest, by_whole, by_none)}
        assert len(texts) == 1
        lengths = {a["usage"]["prompt_tokens"] for a in (by_rest, by_whole, by_none)}
        assert lengths == {len(DOCUMENT) + len(rest["prompt"])}
        assert [cached(a) for a in (by_rest, by_whole, by_none)] == [64, 80, 0]

        _, one, _ = await srv.get(f"{CACHES}/doc")
        assert one["uses"] == 2
        _, renewed, _ = await srv.post(f"{CACHES}/doc", {"ttl_s": 500})
        assert 499 < renewed["expires_in_s"] <= 500
        _, listed, _ = await srv.get(CACHES)
        assert [c["name"] for c in listed["data"]] == ["doc"]
        metrics = srv.app_metrics()
        assert 'jserve:cache_handle_uses_total{model_name="tiny"} 2.0' in metrics
        assert 'jserve:prefix_cache_hits_total{model_name="tiny"} 144.0' in metrics

        async with srv.http.delete(f"{srv.url}{CACHES}/doc") as r:
            assert (r.status, await r.json()) == (
                200,
                {"object": "cache.deleted", "name": "doc", "deleted": True},
            )
        for status, body, _ in (await srv.get(f"{CACHES}/doc"), await srv.post(COMP, rest)):
            assert (status, body["error"]["code"]) == (404, "cache_not_found")


async def test_a_cache_of_messages_is_the_head_of_a_chat():
    async with host() as found:
        head = [{"role": "system", "content": DOCUMENT}]
        status, made, _ = await found.srv.post(CACHES, {"name": "sys", "messages": head})
        assert status == 200, made
        question = {"role": "user", "content": "and?"}
        full = chat_body() | {"messages": [*head, question], "seed": 3, "max_tokens": 4}
        rest = full | {"messages": [question], "cache": "sys"}
        _, by_full, _ = await found.srv.post(CHAT, full | {"cache": "sys"})
        _, by_rest, _ = await found.srv.post(CHAT, rest)
        assert by_full["choices"] == by_rest["choices"]
        assert by_full["usage"]["prompt_tokens"] == by_rest["usage"]["prompt_tokens"]
        assert cached(by_full) >= made["pages"] * 16


@pytest.mark.parametrize(
    ("fields", "status", "field"),
    [
        ({"name": ""}, 400, "name"),
        ({"name": 7}, 400, "name"),
        ({"ttl_s": 0}, 400, "ttl_s"),
        ({"ttl_s": "long"}, 400, "ttl_s"),
        ({"prompt": "short"}, 400, "prompt"),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"messages": [{"role": "user", "content": "x"}]}, 400, "prompt"),
        ({"prompt": "x" * 400}, 429, "name"),
        ({"model": "other"}, 404, "model"),
    ],
)
async def test_what_cannot_be_cached_is_refused_by_name(fields, status, field):
    async with host(handle_pages=20) as found:
        got, body, _ = await create(found.srv, **fields)
        assert (got, body["error"]["param"]) == (status, field), body
        _, listed, _ = await found.srv.get(CACHES)
        assert listed["data"] == []


async def test_a_name_is_taken_once_and_free_again_when_its_maker_leaves():
    async with host(step_s=0.2) as found:
        task = asyncio.create_task(create(found.srv, prompt=DOCUMENT * 6))
        await asyncio.sleep(0.1)
        status, body, _ = await create(found.srv)
        assert (status, body["error"]["param"]) == (400, "name")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(50):
            _, listed, _ = await found.srv.get(CACHES)
            if not listed["data"]:
                break
            await asyncio.sleep(0.05)
        assert listed["data"] == []
        status, _, _ = await create(found.srv)
        assert status == 200


def test_the_book_of_names_forgets_what_expired_whoever_comes_next():
    """One tenant after another makes a handle and never comes back."""
    now = [100.0]
    book = HandleBook(clock=lambda: now[0])
    for i in range(50):
        book.made(f"t{i}", "doc", (i, i), ttl_s=10.0)
        assert book.head(ask(f"t{i}")) == (i, i)
        assert len(book) <= 5
        now[0] += 2.5
    assert book.head(ask("t49")) == (49, 49)
    assert book.head(ask("t45")) is None, "past its time, though nobody swept since"
    assert book.head(ask("t49", "other")) is None
    assert book.head(ask("t49", None)) is None


def test_a_name_that_is_renewed_stays_in_the_book():
    now = [0.0]
    book = HandleBook(clock=lambda: now[0])
    book.made("t", "doc", (1, 2), ttl_s=10.0)
    now[0] = 9.0
    book.renewed("t", "doc", ttl_s=10.0)
    book.renewed("t", "never made here", ttl_s=10.0)
    now[0] = 18.0
    book.made("u", "doc", (3,), ttl_s=10.0)
    assert book.head(ask("t")) == (1, 2)
    now[0] = 19.0
    assert book.head(ask("t")) is None
    book.made("u", "more", (3,), ttl_s=10.0)
    assert len(book) == 2
    book.forget("u", "doc")
    book.keep_only("u", [])
    assert len(book) == 0


async def test_the_book_follows_creation_and_renewal():
    async with host() as found:
        now, book = [0.0], found.srv.server.front.prepare.book
        book._clock = lambda: now[0]
        assert (await create(found.srv, ttl_s=60))[0] == 200
        now[0] = 59.0
        assert len(book.head(ask(""))) == len(DOCUMENT)
        assert (await found.srv.post(f"{CACHES}/doc", {"ttl_s": 500}))[0] == 200
        now[0] = 550.0
        assert len(book.head(ask(""))) == len(DOCUMENT)
        now[0] = 600.0
        assert book.head(ask("")) is None


def ask(tenant: str, name: str | None = "doc") -> ParsedRequest:
    options = RequestOptions(tenant=tenant, cache=name)
    return ParsedRequest(body=None, params=NOTHING_DRAWN, options=options)


async def test_keys_are_tenants_and_see_nothing_of_each_other():
    async with host(serve={"api_key": ("one", "two")}) as found:
        keys = [{"headers": {"Authorization": f"Bearer {key}"}} for key in ("one", "two")]
        status, _, _ = await found.srv.post(CACHES, {"name": "doc", "prompt": DOCUMENT}, **keys[0])
        assert status == 200
        _, listed, _ = await found.srv.get(CACHES, **keys[1])
        assert listed["data"] == []
        body = {"prompt": DOCUMENT + "?", "max_tokens": 2, "seed": 1}
        status, _, _ = await found.srv.post(COMP, body | {"cache": "doc"}, **keys[1])
        assert status == 404
        answers = [(await found.srv.post(COMP, body, **key))[1] for key in keys]
        assert [cached(a) for a in answers] == [64, 0]
        assert answers[0]["choices"] == answers[1]["choices"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"session": ""}, "session"),
        ({"cache": "x" * 200}, "cache"),
        ({"retain": {}}, "retain"),
        ({"retain": [{"first": 0}]}, "retain[0]"),
        ({"retain": [{"priority": 101}]}, "retain[0].priority"),
        ({"retain": [{}, {"start": 3, "end": 2}]}, "retain[1].end"),
        ({"retain": [{}] * 17}, "retain"),
        ({"skip_prefix_cache": "yes"}, "skip_prefix_cache"),
        ({"cache": "doc", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
)
async def test_wrong_fields_are_named(fields, field):
    async with host() as found:
        status, body, _ = await found.srv.post(COMP, {"prompt": "hi"} | fields)
        assert (status, body["error"]["param"]) == (400, field), body


async def test_sessions_and_hints_reach_the_scheduler():
    async with host() as found:
        body = {
            "prompt": "x" * 40,
            "max_tokens": 2,
            "session": "talk",
            "retain": [{"start": 0, "end": 16, "priority": 90, "seconds": 5}],
        }
        status, _, headers = await found.srv.post(COMP, body)
        assert status == 200
        assert "x-jserve-ignored-params" not in headers
        retention = found.engine.scheduler.resources.retention
        assert len(retention.sessions) == 1
        assert {node.priority for _, node in retention.cache.tree.nodes()} == {101}


async def test_an_engine_that_dies_answers_what_was_asked():
    async with host() as found:
        found.runner.fail_next = RuntimeError("boom")
        found.runner.reset = None
        status, body, _ = await create(found.srv)
        assert status == 503
        assert body["error"]["code"] in ("engine_dead", "starting")
