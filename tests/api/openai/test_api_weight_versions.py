"""``weight_versions`` of a choice: which weights drew its tokens, where their ids are asked for."""

from __future__ import annotations

from typing import Any

import pytest

CHAT, COMP = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMP: {"prompt": "hi"},
}
ASKED = {"return_token_ids": True, "ignore_eos": True, "max_tokens": 9}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("chunk", [1, 2])
async def test_spans_are_those_of_the_tokens(srv, path: str, chunk: int) -> None:
    srv.engine.chunk, srv.engine.update_at = chunk, 2
    _, body, _ = await srv.post(path, BODIES[path] | ASKED)
    [choice] = body["choices"]
    first = 2 * chunk
    want = [
        {"version": "0", "start": 0, "end": first},
        {"version": "new", "start": first, "end": 9},
    ]
    assert choice["weight_versions"] == want
    assert len(choice["token_ids"]) == 9
    told = [c for e in (await srv.events(path, BODIES[path] | ASKED))[:-1] for c in e["choices"]]
    spans = [(c["token_ids"], s) for c in told for s in c.get("weight_versions", ())]
    assert all(len(ids) == s["end"] - s["start"] for ids, s in spans)
    assert [s["start"] for _, s in spans] == [0, *(s["end"] for _, s in spans)][:-1]
    assert [s["version"] for _, s in spans] == [
        "0" if s["start"] < first else "new" for _, s in spans
    ]
    assert spans[-1][1]["end"] == 9


@pytest.mark.parametrize("path", BODIES)
async def test_nobody_gets_them_who_does_not_ask_for_ids(srv, path: str) -> None:
    _, body, _ = await srv.post(path, BODIES[path] | {"max_tokens": 3})
    assert "weight_versions" not in body["choices"][0]
    _, body, _ = await srv.post(path, BODIES[path] | ASKED | {"n": 2, "max_tokens": 3})
    for choice in body["choices"]:
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
