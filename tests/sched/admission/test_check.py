"""What only the model can tell about a request: ids, context, pool, features."""

import dataclasses

import pytest

from jserve.errors import BadRequest, ContextTooLong, NotFound, NothingAllowed
from jserve.sampling import SamplingParams
from jserve.sched.admission.check import check, is_long
from jserve.types import Request
from tests.sched.sched_drive import Drive, limits, request

LIM = limits()  # 11 ids, context 64, 32 pages of 4


def test_a_good_request_gets_its_length():
    assert check(request("a", [1, 2, 3], max_tokens=8), LIM) == 11
    assert check(request("a", [1, 2, 3], max_tokens=None), LIM) == 64
    assert check(request("a", [1] * 64, max_tokens=0), LIM) == 64
    assert check(request("a", [1] * 60, max_tokens=4), LIM) == 64


@pytest.mark.parametrize(
    ("n_prompt", "fields", "long"),
    [
        (3, {"max_tokens": 7}, False),
        (3, {"max_tokens": 8}, True),
        (10, {"max_tokens": 0}, False),
        (3, {"max_tokens": None}, True),
        (3, {"max_tokens": 0, "cache": "mine"}, True),
        (3, {"max_tokens": 1, "is_long": True}, True),
        (9, {"max_tokens": 1, "said": ((1, 2, 3, 4, 5),)}, False),
    ],
)
def test_a_text_is_long_by_what_its_request_may_reach(n_prompt, fields, long):
    params = SamplingParams(max_tokens=fields.pop("max_tokens"))
    asked = Request(id="a", prompt_ids=(1,) * n_prompt, params=params, **fields)
    assert is_long(asked, 10) is long
    assert not is_long(asked, 0), "the model has no two kinds"


@pytest.mark.parametrize("bad", [-1, 11, 2**31, -(2**63), 10**30, True, 1.0, "1", None])
@pytest.mark.parametrize(
    ("field", "build"),
    [
        ("prompt", lambda i: {"prompt": [1, i]}),
        ("eos_ids", lambda i: {"eos": (i,)}),
        ("stop_token_ids", lambda i: {"stop_token_ids": (i,)}),
        ("logit_bias", lambda i: {"logit_bias": {i: 1.0}}),
        ("allowed_token_ids", lambda i: {"allowed_token_ids": (0, i)}),
        ("logprob_token_ids", lambda i: {"logprob_token_ids": (0, i)}),
        ("bad_words", lambda i: {"bad_token_ids": ((0, i),)}),
    ],
)
def test_every_id_is_range_checked(field, build, bad):
    args = {"prompt": [1]} | build(bad)
    with pytest.raises(BadRequest, match=r"integers in \[0, 10\]") as caught:
        check(request("a", args.pop("prompt"), **args), LIM)
    assert caught.value.field == field
    assert len(str(caught.value)) < 150, "a client's huge number stays out of the message"


def test_ids_in_the_padding_of_the_vocabulary_are_refused():
    check(request("a", [10]), LIM)
    with pytest.raises(BadRequest):
        check(request("a", [10]), LIM, vocab=10)


def test_an_empty_prompt_is_refused():
    with pytest.raises(BadRequest, match="at least one token") as caught:
        check(request("a", []), LIM)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "field", "numbers"),
    [
        (60, 5, "max_tokens", ("60", "5", "65", "64")),
        (65, 0, "prompt", ("65", "64")),
        (64, None, "prompt", ("64", "65")),
    ],
)
def test_too_long_for_the_context(n_prompt, max_tokens, field, numbers):
    with pytest.raises(ContextTooLong) as caught:
        check(request("a", [1] * n_prompt, max_tokens=max_tokens), LIM)
    assert caught.value.field == field
    assert all(number in str(caught.value) for number in numbers)


def test_what_can_never_fit_the_pool_is_refused_and_what_just_fits_runs():
    small = limits(n_pages=5)  # 16 tokens with KV, and one more that is never computed
    assert check(request("a", [1] * 10, max_tokens=7), small) == 17
    for n_prompt, wanted, field in ((10, 8, "max_tokens"), (17, 0, "prompt"), (17, None, "prompt")):
        with pytest.raises(ContextTooLong, match="4 pages") as caught:
            check(request("a", [1] * n_prompt, max_tokens=wanted), small)
        assert caught.value.field == field
    drive = Drive(small)
    drive.add(request("fits", [1] * 10, max_tokens=7))
    drive.add(request("prompt", [1] * 16, max_tokens=0))
    drive.add(request("open", [1] * 10, max_tokens=None))
    told = drive.run()
    assert [len(tokens) for tokens in told.values()] == [7, 0, 7]


def test_min_tokens_must_fit_when_max_tokens_is_open():
    with pytest.raises(ContextTooLong):
        check(request("a", [1] * 60, max_tokens=None, min_tokens=5), LIM)


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ("allowed_token_ids and bad_words", {"allowed_token_ids": (3, 4), "bad_token_ids": ((3,), (4,))}),
        ("allowed_token_ids and logit_bias", {"allowed_token_ids": (3,), "logit_bias": {3: -100.0}}),
        ("allowed_token_ids and min_tokens", {"allowed_token_ids": (0, 5), "stop_token_ids": (5,), "min_tokens": 1}),
        ("logit_bias leaves", {"logit_bias": dict.fromkeys(range(11), -100.0)}),
    ],
)  # fmt: skip
def test_constraints_that_leave_no_token_are_refused_by_name(fields, params):
    with pytest.raises(NothingAllowed, match=fields) as caught:
        check(request("a", [1], eos=(0,), max_tokens=4, **params), LIM)
    assert caught.value.field == fields.split()[0]
    assert (caught.value.status, caught.value.code) == (400, "nothing_allowed")


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": (3, 4), "bad_token_ids": ((3,), (3, 4))},
        {"allowed_token_ids": (3, 4), "logit_bias": {3: -100.0, 4: -99.0}},
        {"allowed_token_ids": (0, 3), "min_tokens": 1},
        {"logit_bias": dict.fromkeys(range(10), -100.0)},
    ],
)
def test_constraints_that_leave_one_token_pass(params):
    check(request("a", [1], eos=(0,), max_tokens=4, **params), LIM)


def test_features_that_are_not_there_are_refused():
    without = dataclasses.replace(LIM, scores_prompts=False)
    with pytest.raises(BadRequest, match="switched off") as caught:
        check(request("a", [1], prompt_logprobs=1), without)
    assert caught.value.field == "prompt_logprobs"


@pytest.mark.parametrize(
    ("picks", "ids", "word"),
    [(0, (1,), "switched off"), (2, (1, 2, 3), "holds 3 ids, at most 2"), (4, (1, 11), "11")],
)
def test_logprob_token_ids_are_held_to_what_programs_can(picks, ids, word):
    with pytest.raises(BadRequest, match=word) as caught:
        check(request("a", [1], logprob_token_ids=ids), limits(picks=picks))
    assert caught.value.field == "logprob_token_ids"
    with pytest.raises(BadRequest, match="tokenizer") as caught:
        check(request("a", [1], bad_words=("no",)), LIM)
    assert caught.value.field == "bad_words"
    with pytest.raises(NotFound, match="'lora'"):
        check(dataclasses.replace(request("a", [1]), adapter="lora"), LIM)


def test_stop_ids_and_eos_share_one_row_of_the_device():
    lim = limits(vocab_size=40)
    check(request("a", [1], eos=range(8), stop_token_ids=tuple(range(4, 16))), lim)
    with pytest.raises(BadRequest, match="17 ids together") as caught:
        check(request("a", [1], eos=(20,), stop_token_ids=tuple(range(16))), lim)
    assert caught.value.field == "stop_token_ids"


def test_a_refused_request_leaves_no_trace():
    drive = Drive()
    with pytest.raises(BadRequest):
        drive.scheduler.submit(request("a", [99]), 0.0)
    assert not drive.scheduler.has_work
    drive.add(request("a", [1]))
    drive.run()
