"""The Python door's requests: refused for what HTTP refuses."""

from __future__ import annotations

import pytest

from jserve.errors import BadRequest
from jserve.prompts import Prompts
from jserve.request_options import RequestOptions
from jserve.sampling import SamplingParams
from jserve.text.chat.speech import PLAIN
from tests.api.fake import EOS, byte_tokenizer, live


@pytest.mark.parametrize("options", [None, RequestOptions(cache="c")])
async def test_no_tokens_at_all_are_refused_in_both_doors(options):
    prompts = Prompts(byte_tokenizer(), None, (EOS,), PLAIN)
    none, one = SamplingParams(max_tokens=0), SamplingParams(max_tokens=1)
    with pytest.raises(BadRequest, match="max_tokens must be at least 1") as caught:
        prompts.request("x", none, options=options)
    assert caught.value.field == "max_tokens"
    assert prompts.request("x", one, options=options).request.params.max_tokens == 1
    assert prompts.request("x", none, options=options, drawn=False).request.params is none
    async with live() as srv:
        status, said, _ = await srv.post("/v1/completions", {"prompt": "x", "max_tokens": 0})
        assert (status, said["error"]["param"]) == (400, "max_tokens")
        assert said["error"]["message"].startswith("max_tokens must be at least 1")
