"""Speculation over HTTP: what usage and /metrics say, the switch, and what is refused."""

from __future__ import annotations

import dataclasses
from contextlib import asynccontextmanager

import pytest

from jserve.api.reply.generate import Generation
from jserve.config import EngineConfig, SpeculativeOptions
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.client import InprocClient
from jserve.engine.engine import Engine
from jserve.outputs import PartialOutput, RequestMetrics
from jserve.sampling import SamplingParams
from jserve.sched.scheduler import Scheduler
from jserve.speculation.host.methods import proposer_of
from jserve.testing import FakeRunner
from jserve.types import Output, Request
from tests.api.test_api_engine import COMP, LIMITS, Host, byte_tokenizer, live

DRAFTS = dataclasses.replace(LIMITS, max_drafts=3)
COPY = {
    "prompt": "abababababab",
    "max_tokens": 40,
    "temperature": 0,
    "allowed_token_ids": [97, 98],
    "ignore_eos": True,
}


@asynccontextmanager
async def host(method: str):
    """A live server over a fake device whose rows may have drafts."""
    found = Host()
    config = EngineConfig.of(max_num_seqs=4, max_num_batched_tokens=36, overlap=0)
    options = SpeculativeOptions(method=method, prompt_lookup_min=1)

    def build(config, progress):
        found.runner = FakeRunner(DRAFTS)
        proposer = proposer_of(options, DRAFTS.vocab_size)
        scheduler = Scheduler(DRAFTS, config, proposer=proposer)
        scheduler.speculation.fix(3)  # not by times: the machine may be busy
        found.engine = Engine(scheduler, found.runner)
        return found.engine, {}

    found.face = AsyncEngine(lambda: InprocClient(config, build))
    await found.face.start()
    try:
        async with live(found.face) as srv:
            found.srv = srv
            yield found
    finally:
        await found.face.close()


async def test_usage_and_metrics_count_the_same_drafts():
    async with host("ngram") as found:
        status, whole, _ = await found.srv.post(COMP, COPY)
        assert status == 200, whole
        usage = whole["usage"]
        assert usage["completion_tokens"] == 40
        details = usage["completion_tokens_details"]
        accepted = details["accepted_prediction_tokens"]
        rejected = details["rejected_prediction_tokens"]
        assert accepted > 0
        events = await found.srv.events(COMP, COPY | {"stream_options": {"include_usage": True}})
        assert events[-2]["usage"]["completion_tokens"] == 40
        text = await found.srv.http.get(found.srv.url + "/metrics")
        lines = dict(
            line.rsplit(" ", 1) for line in (await text.text()).splitlines() if line[0] != "#"
        )
        both = 'lane="standard",model_name="tiny",proposer="ngram"'
        drafted = float(lines[f"jserve:spec_decode_num_draft_tokens_total{{{both}}}"])
        stood = float(lines[f"jserve:spec_decode_num_accepted_tokens_total{{{both}}}"])
        assert drafted >= accepted + rejected
        assert accepted <= stood <= drafted
        places = [v for k, v in lines.items() if "accepted_tokens_per_pos" in k]
        assert sum(map(float, places)) == stood
        assert float(lines['jserve:decode_tokens_total{model_name="tiny"}']) > float(
            lines['jserve:decode_rows_total{model_name="tiny"}']
        )
        off, _, _ = await found.srv.post(COMP, COPY | {"speculative": False})
        assert off == 200


async def test_a_request_may_switch_it_off():
    async with host("ngram") as found:
        _, on, _ = await found.srv.post(COMP, COPY)
        _, off, headers = await found.srv.post(COMP, COPY | {"speculative": False})
        assert "completion_tokens_details" not in off["usage"]
        assert on["choices"][0]["text"] == off["choices"][0]["text"]
        assert "x-jserve-ignored" not in {name.lower() for name in headers}
        status, error, _ = await found.srv.post(COMP, COPY | {"speculative": "no"})
        assert (status, error["error"]["param"]) == (400, "speculative")


@pytest.mark.parametrize(
    ("field", "value"),
    [("allowed_token_ids", [97, 98]), ("logit_bias", {"97": 1.0}), ("bad_words", ["a"])],
)
async def test_synthetic_acceptance_refuses_what_it_would_break(field, value):
    async with host("synthetic") as found:
        plain = {"prompt": "ab", "max_tokens": 12, "ignore_eos": True}
        status, error, _ = await found.srv.post(COMP, plain | {field: value})
        assert status == 400
        assert error["error"]["param"] == field
        assert "synthetic" in error["error"]["message"]
        status, _, _ = await found.srv.post(COMP, plain | {field: value, "speculative": False})
        assert status == 200
        status, whole, _ = await found.srv.post(COMP, plain)
        assert status == 200
        assert whole["usage"]["completion_tokens"] == 12


def test_drafts_behind_a_stop_string_are_not_accepted():
    """Both doors: of three accepted drafts, two are part of a text that a stop string cuts."""
    params = SamplingParams(stop=("c",), max_tokens=9)
    asked = Request(id="a", prompt_ids=(97,), params=params)
    out = Output(request_id="a", index=0, token_ids=(97, 99, 100, 101), n_drafted=3, n_accepted=3)
    running = PartialOutput(asked, None, byte_tokenizer())
    assert running.take(out) == "c"
    assert running.output.metrics == RequestMetrics(num_draft_tokens=3, num_accepted_tokens=2)
    generation = Generation(Deaf(), byte_tokenizer(), [asked])
    generation._piece(out)
    assert (generation.usage.drafted, generation.usage.accepted) == (3, 2)


class Deaf:
    """An engine that is told to abort."""

    def abort(self, request_id: str, index: int | None = None) -> None: ...
