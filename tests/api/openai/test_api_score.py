"""/v1/score: sums of log-probabilities, and probabilities of labels."""

from __future__ import annotations

import math

import pytest

from tests.api.fake import FakeEngine, card, live
from tests.api.test_api_engine import host

PATH = "/v1/score"


async def test_items_are_scored_behind_the_query(srv):
    body = {"query": "ab", "items": ["c", "def"]}
    status, answer, _ = await srv.post(PATH, body)
    assert status == 200, answer
    prompts = [record.request.prompt_ids for record in srv.engine.records]
    assert prompts == [tuple(b"abc"), tuple(b"abdef")]
    assert answer["scores"] == [-1.5, -4.5]
    assert answer["items"][1]["token_ids"] == list(b"def")
    assert answer["items"][1]["token_logprobs"] == [-1.5] * 3
    assert not answer["items"][1]["greedy"], "the fake's likeliest token is another"
    assert answer["usage"]["prompt_tokens"] == 8
    assert answer["usage"]["completion_tokens"] == 0
    assert (answer["object"], answer["model"]) == ("scoring", "tiny")


async def test_item_first_scores_the_query_behind_it(srv):
    await srv.post(PATH, {"query": [1, 2, 3], "items": [[4], [5, 6]], "item_first": True})
    prompts = [record.request.prompt_ids for record in srv.engine.records]
    assert prompts == [(4, 1, 2, 3), (5, 6, 1, 2, 3)]
    _, answer, _ = await srv.post(PATH, {"query": [1, 2], "items": [[4]], "item_first": True})
    assert answer["items"][0]["token_ids"] == [1, 2]


async def test_labels_are_probabilities_by_item_and_label(srv):
    body = {"query": "q", "items": ["a", "b"], "label_token_ids": [65, 66, 67]}
    _, answer, _ = await srv.post(PATH, body)
    assert [[round(p, 6) for p in row] for row in answer["scores"]] == [
        [round(math.exp(-1.5), 6)] * 3
    ] * 2
    prompts = [record.request.prompt_ids for record in srv.engine.records]
    assert prompts[0] == (*b"qa", 65)
    assert prompts[5] == (*b"qb", 67)
    _, answer, _ = await srv.post(PATH, body | {"apply_softmax": True})
    assert answer["scores"] == [[pytest.approx(1 / 3)] * 3] * 2


async def test_scores_are_those_of_echo_through_the_engine():
    async with host() as found:
        query, items = "some words ", ["and more", "or less"]
        _, answer, _ = await found.srv.post(PATH, {"query": query, "items": items})
        for item, score in zip(items, answer["scores"], strict=True):
            echo = {"prompt": query + item, "echo": True, "logprobs": 1, "max_tokens": 0}
            _, whole, _ = await found.srv.post("/v1/completions", echo)
            logprobs = whole["choices"][0]["logprobs"]["token_logprobs"]
            assert score == pytest.approx(math.fsum(logprobs[len(query) :]))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": ["a"] * 129}, "items"),
        ({"items": ["a"] * 65, "label_token_ids": [1, 2]}, "items"),
        ({"items": ["a", ""]}, "items"),
        ({"items": ["x" * 600]}, "items"),
        ({"query": "x" * 600}, "items"),
        ({"stream": True}, "stream"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ],
)
async def test_what_cannot_be_scored_is_refused(srv, fields, param):
    status, answer, _ = await srv.post(PATH, {"query": "q", "items": ["a"]} | fields)
    assert (status, answer["error"]["param"]) == (400, param)
    assert not srv.engine.records


async def test_a_server_without_scores_says_so():
    async with live(FakeEngine(), model=card(scores_prompts=False)) as srv:
        status, answer, _ = await srv.post(PATH, {"query": "q", "items": ["a"]})
        assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
