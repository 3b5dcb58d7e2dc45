"""/v1/support says what holds: every cell of it is asked of the server."""

from __future__ import annotations

import msgspec
import pytest

from jserve.api.http.routes import PUBLIC
from jserve.api.ops.features import FEATURES, GENERATING, Feature, pair
from jserve.api.ops.support import endpoints
from jserve.types import Lane, Request
from tests.api.talk import Script, talking

CHAT = {"messages": [{"role": "user", "content": "hi there, how are you"}], "max_tokens": 40}
BASE = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi there, how are you", "max_tokens": 40},
    "/v1/responses": {"input": "hi there, how are you", "max_output_tokens": 40},
    "/v1/messages": CHAT,
}
SAYS = '{"a": 1}'
CALLS = f'<tool_call>\n{{"name": "f", "arguments": {SAYS}}}\n</tool_call>'
"""What the model says, where it has tools."""
CALL_PARTS = ('"tool_calls":[{', '"type":"function_call"', '"type":"tool_use"')
ROW = {feature.name: feature for feature in FEATURES}

# How it shows in what the engine is asked that a feature was applied.
SHOWS = {
    "n": lambda r: r.params.n == 2,
    "seed": lambda r: r.params.seed == 7,
    "stop": lambda r: r.params.stop == ("x",),
    "logprobs": lambda r: r.params.logprobs is not None,
    "prompt logprobs": lambda r: r.params.prompt_logprobs is not None,
    "echo": lambda r: r.params.prompt_logprobs is not None,
    "JSON schema": lambda r: r.params.structured_outputs is not None,
    "forced tools": lambda r: r.params.structured_outputs is not None,
    "penalties": lambda r: r.params.penalised,
    "logit_bias": lambda r: r.params.logit_bias == {5: -100},
    "lanes and deadlines": lambda r: r.lane is Lane.BULK and r.deadline_ms == 60000,
    "truncation": lambda r: len(r.prompt_ids) == 8,
    "cache_salt": lambda r: r.cache_salt == "s",
    "named cache": lambda r: r.cache == "c",
    "one call": lambda r: r.params.structured_outputs is not None,
    "regex": lambda r: r.params.structured_outputs.regex == "a+",
    "thinking budget": lambda r: r.params.thinking_token_budget == 9,
}
# ... and in the answer, where the engine has no part in it.
ANSWERS = {
    "stream": lambda text: text.startswith(("data: ", "event: ")),
    "token ids": lambda text: '"token_ids":[' in text,
    "tools": lambda text: any(part in text for part in CALL_PARTS),
}


class Choices(Script):
    """Also plays several choices, and scores prompts."""

    async def generate(self, request: Request):
        for index in range(request.params.n):
            async for output in super().generate(request):
                scores = self._prompt(request) if output.seed else None
                yield msgspec.structs.replace(output, index=index, prompt_logprobs=scores)


def test_every_feature_has_its_sign():
    assert {*SHOWS, *ANSWERS} == set(ROW)


@pytest.mark.parametrize("path", GENERATING)
async def test_every_pair_of_features_holds_as_stated(path):
    script = Choices((SAYS,))
    async with talking(script) as srv:
        for i, one in enumerate(FEATURES):
            for other in FEATURES[i:]:
                await check(srv, script, path, one, other)


async def check(srv, script: Script, path: str, one: Feature, other: Feature) -> None:
    held = pair(path, one, other)
    if held is None:
        return
    body = BASE[path] | (one.on(path) or {}) | (other.on(path) or {})
    script.records.clear()
    script.texts = (CALLS if "tools" in body else SAYS,)
    async with srv.http.post(srv.url + path, json=body) as r:
        text = await r.text()
    where = (path, one.name, other.name, text[:300])
    if held != "applied":
        assert r.status == 400, where
        assert f'"param":"{held}"' in text, where
        assert not script.records, where
        return
    assert r.status == 200, where
    request = script.records[-1]
    for feature in (one, other):
        if feature.name in SHOWS:
            assert SHOWS[feature.name](request), (feature.name, where)
        else:
            assert ANSWERS[feature.name](text), (feature.name, where)


async def test_it_is_served(srv):
    _, found, _ = await srv.get("/v1/support")
    assert found["endpoints"] == endpoints(PUBLIC)
    assert found["endpoints"]["POST /v1/completions"]["suffix"] == {"holds": "refused", "but": [""]}
    assert found["together"]["/v1/responses"]["logprobs"]["tools"] == "top_logprobs"
    assert set(found["words"]) == {"applied", "label", "ignored", "refused"}
