"""What the Python door gives for the outputs of an engine: vLLM's shape of log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from jserve import Logprob, SamplingParams
from jserve.outputs import PartialOutput
from jserve.types import Finish, Output, Request, TokenLogprob
from tests.api.fake import byte_tokenizer


def entry(
    token: int, logprob: float, rank: int | None, *top: int, named: bool = False
) -> TokenLogprob:
    return TokenLogprob(
        token=token,
        logprob=logprob,
        rank=rank,
        top_ids=top,
        top_logprobs=tuple(-0.1 * i for i, _ in enumerate(top, 1)),
        named=named,
    )


def running(**fields: Any) -> PartialOutput:
    params = SamplingParams(max_tokens=4, **fields)
    return PartialOutput(
        Request(id="a", prompt_ids=(65, 66, 67), params=params), "ABC", byte_tokenizer()
    )


def test_a_prompts_log_probabilities_are_by_id_the_first_none() -> None:
    job = running(prompt_logprobs=2)
    scores = (None, entry(66, -0.2, 2, 70, 66), entry(67, -5.0, 40, 70, 71))
    job.take(Output(request_id="a", index=0, token_ids=(68,), prompt_logprobs=scores))
    assert job.output.prompt_logprobs == [
        None,
        {66: Logprob(-0.2, 2, "B"), 70: Logprob(-0.1, 1, "F")},
        {67: Logprob(-5.0, 40, "C"), 70: Logprob(-0.1, 1, "F"), 71: Logprob(-0.2, 2, "G")},
    ]
    assert list((job.output.prompt_logprobs or [])[1] or ()) == [66, 70]


def test_the_drawn_token_is_always_there_and_the_sum_grows() -> None:
    job = running(logprobs=1)
    for finish, tokens in ((None, (80, 81)), (Finish.LENGTH, (82,))):
        drawn = tuple(entry(t, -float(t), 7, 70) for t in tokens)
        job.take(Output(request_id="a", index=0, token_ids=tokens, logprobs=drawn, finish=finish))
    (choice,) = job.output.outputs
    found = choice.logprobs or []
    assert [list(by_id) for by_id in found] == [[80, 70], [81, 70], [82, 70]]
    assert found[0][80] == Logprob(-80.0, 7, "P")
    assert choice.cumulative_logprob == pytest.approx(-80.0 - 81.0 - 82.0)


def test_named_ids_have_no_rank_but_the_drawn_ones() -> None:
    job = running(logprob_token_ids=(90, 80, 91))
    drawn = (entry(80, -3.0, 9, 90, 80, 91, named=True),)
    job.take(Output(request_id="a", index=0, token_ids=(80,), logprobs=drawn))
    (found,) = job.output.outputs[0].logprobs or ()
    assert list(found) == [80, 90, 91]
    assert [at.rank for at in found.values()] == [9, None, None]


def test_nothing_was_asked_for() -> None:
    job = running()
    job.take(Output(request_id="a", index=0, token_ids=(80,)))
    assert job.output.prompt_logprobs is None
    assert (job.output.outputs[0].logprobs, job.output.outputs[0].cumulative_logprob) == (
        None,
        None,
    )
