"""POST /v1/completions: the four forms of a prompt, echo with scores, batches, streams."""

from __future__ import annotations

import pytest

from jserve.errors import ContextTooLong
from tests.api.fake import EOS, FakeEngine, live

PATH = "/v1/completions"
TEXT = "Hello, wörld! 🙂"


def texts_of(events: list) -> dict[int, str]:
    found: dict[int, str] = {}
    for e in events:
        for c in e["choices"] if isinstance(e, dict) else ():
            found[c["index"]] = found.get(c["index"], "") + c["text"]
    return found


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [b"hi"]),
        (["hi", "you"], [b"hi", b"you"]),
        ([104, 105], [b"hi"]),
        ([[104, 105], [106]], [b"hi", b"j"]),
    ],
)
async def test_prompt_forms(srv, prompt, expected):
    status, body, _ = await srv.post(PATH, {"prompt": prompt, "max_tokens": 100})
    assert status == 200, body
    got = [bytes(r.request.prompt_ids) for r in srv.engine.records]
    assert sorted(got) == sorted(expected)
    assert [c["index"] for c in body["choices"]] == list(range(len(expected)))
    assert [c["text"] for c in body["choices"]] == [TEXT] * len(expected)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    n_out = (len(TEXT.encode()) + 1) * len(expected)
    assert body["usage"]["completion_tokens"] == n_out
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_batch_choices_are_numbered_by_prompt():
    async with live(FakeEngine(("a", "b"))) as srv:
        _, body, _ = await srv.post(PATH, {"prompt": ["x", "yy"], "n": 2, "return_token_ids": True})
    assert [c["text"] for c in body["choices"]] == ["a", "b", "a", "b"]
    prompts = [bytes(c["prompt_token_ids"]) for c in body["choices"]]
    assert prompts == [b"x", b"x", b"yy", b"yy"]


async def test_batch_stream_equals_whole():
    async with live(FakeEngine(("añb", "🙂"))) as srv:
        fields = {"prompt": ["x", "yy", "zzz"], "n": 2}
        _, body, _ = await srv.post(PATH, fields)
        events = await srv.events(PATH, fields | {"stream_options": {"include_usage": True}})
    assert texts_of(events) == {c["index"]: c["text"] for c in body["choices"]}
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"] == body["usage"]
    finishes = [c["index"] for e in events[:-2] for c in e["choices"] if c["finish_reason"]]
    assert sorted(finishes) == list(range(6))


async def test_one_bad_prompt_fails_the_batch_and_cancels_the_rest():
    engine = FakeEngine(("x" * 100,))
    engine.delay, engine.fail_at = 0.01, 5
    async with live(engine) as srv:
        status, body, _ = await srv.post(PATH, {"prompt": ["a", "b", "c"], "max_tokens": 100})
    assert status == 500
    assert body["error"]["code"] == "engine_step_failed"
    assert all(r.finished or r.cancelled_at is not None for r in engine.records)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_batch_that_the_engine_refuses_gets_the_engines_words(stream):
    engine = FakeEngine()
    engine.refuse = ContextTooLong("too much", field="prompt")
    async with live(engine) as srv:
        status, body, _ = await srv.post(PATH, {"prompt": ["a", "b"], "stream": stream})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert body["error"]["param"] == "prompt"


async def test_lm_eval_loglikelihood(srv):
    """What lm-eval sends: token ids, echo, one token, logprobs 1."""
    prompts = [list(b"context and end"), list(b"other")]
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    status, body, _ = await srv.post(PATH, {"prompt": prompts, **fields})
    assert status == 200
    params = srv.engine.records[0].request.params
    assert (params.prompt_logprobs, params.logprobs) == (1, 1)
    for choice, ids in zip(body["choices"], prompts, strict=True):
        scores = choice["logprobs"]
        assert choice["text"] == bytes(ids).decode() + "H"
        assert scores["tokens"] == [chr(i) for i in ids] + ["H"]
        assert scores["token_logprobs"] == [None] + [-1.5] * len(ids)
        assert scores["top_logprobs"][0] is None
        # the likeliest and the token itself, so that "is it greedy" can be told
        assert scores["top_logprobs"][1] == {chr(ids[1] + 1): -0.25, chr(ids[1]): -1.5}
        assert scores["text_offset"] == list(range(len(ids) + 1))


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_without_output(srv, stream):
    fields = {"prompt": "score", "echo": True, "logprobs": 0, "max_tokens": 0}
    if stream:
        events = await srv.events(PATH, fields | {"stream_options": {"include_usage": True}})
        text = texts_of(events)[0]
        usage = events[-2]["usage"]
        (choice,) = [c for e in events[:-2] for c in e["choices"] if c["finish_reason"]]
    else:
        _, body, _ = await srv.post(PATH, fields)
        (choice,), usage = body["choices"], body["usage"]
        text = choice["text"]
        assert choice["logprobs"]["tokens"] == list("score")
        assert choice["logprobs"]["top_logprobs"][1] == {"c": -1.5}
    assert text == "score"
    assert choice["finish_reason"] == "length"
    assert usage["completion_tokens"] == 0


async def test_echo_text_and_ids(srv):
    _, body, _ = await srv.post(PATH, {"prompt": "grüß ", "echo": True, "max_tokens": 3})
    assert body["choices"][0]["text"] == "grüß Hel"
    ids = list("grüß ".encode())
    _, body, _ = await srv.post(PATH, {"prompt": ids, "echo": True, "max_tokens": 3})
    assert body["choices"][0]["text"] == "grüß Hel"
    events = await srv.events(PATH, {"prompt": "grüß ", "echo": True, "max_tokens": 3})
    assert texts_of(events)[0] == "grüß Hel"


async def test_echoed_scores_stream(srv):
    fields = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 2}
    _, body, _ = await srv.post(PATH, fields)
    events = await srv.events(PATH, fields)
    whole = body["choices"][0]["logprobs"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [e["choices"][0]["logprobs"][name] for e in events[:-1]]
        assert [x for part in parts for x in part] == whole[name]


async def test_logprobs_stop_at_the_stop_string():
    engine = FakeEngine(("abSTOPcd",))
    engine.chunk = 100
    async with live(engine) as srv:
        _, body, _ = await srv.post(
            PATH, {"prompt": "x", "stop": "STOP", "logprobs": 0, "return_token_ids": True}
        )
    choice = body["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == list("abSTOP")
    assert bytes(choice["token_ids"]) == b"abSTOP"
    assert body["usage"]["completion_tokens"] == 6


async def test_prompt_logprobs_per_choice(srv):
    _, body, _ = await srv.post(PATH, {"prompt": ["ab", "c"], "prompt_logprobs": 0})
    first, second = (c["prompt_logprobs"] for c in body["choices"])
    assert first[0] is None
    assert first[1] == {str(ord("b")): {"logprob": -1.5, "rank": 2, "decoded_token": "b"}}
    assert second == [None]


async def test_what_is_not_there_is_null(srv):
    _, body, _ = await srv.post(PATH, {"prompt": "a"})
    names = ("logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs", "stop_reason")
    assert {name: body["choices"][0][name] for name in names} == dict.fromkeys(names)


async def test_log_probabilities_of_named_ids(srv):
    fields = {"prompt": "a", "max_tokens": 1, "logprobs": 5, "logprob_token_ids": [66, 67]}
    _, body, _ = await srv.post(PATH, fields)
    found = body["choices"][0]["logprobs"]
    assert found["top_logprobs"] == [{"B": -66.0, "C": -67.0, TEXT[0]: -1.5}]


async def test_ignore_eos_and_special_tokens(srv):
    _, body, _ = await srv.post(
        PATH, {"prompt": "x", "ignore_eos": True, "max_tokens": len(TEXT.encode()) + 2}
    )
    assert body["choices"][0]["text"] == TEXT + "zz"
    assert body["choices"][0]["finish_reason"] == "length"
    assert srv.engine.records[0].request.params.ignore_eos


async def test_prompt_control_tokens_count_in_completions(srv):
    await srv.post(PATH, {"prompt": "a<|im_end|>"})
    assert srv.engine.records[0].request.prompt_ids == (97, EOS)


async def test_tokenize_and_detokenize(srv):
    status, body, _ = await srv.post("/tokenize", {"prompt": "hé<|im_end|>"})
    assert status == 200
    assert body == {"count": 4, "max_model_len": 512, "tokens": [104, 195, 169, EOS]}
    _, back, _ = await srv.post("/detokenize", {"tokens": body["tokens"]})
    assert back == {"prompt": "hé<|im_end|>"}
    messages = [{"role": "user", "content": "x"}]
    _, body, _ = await srv.post("/tokenize", {"messages": messages})
    _, back, _ = await srv.post("/detokenize", {"tokens": body["tokens"]})
    assert back["prompt"] == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert (await srv.post("/tokenize", {}))[0] == 400
    assert (await srv.post("/tokenize", {"prompt": "x", "messages": messages}))[0] == 400
    _, body, headers = await srv.post(
        "/tokenize", {"prompt": "aé", "return_token_strs": True, "temperature": 1}
    )
    assert body["token_strs"] == ["a", "\ufffd", "\ufffd"]
    assert headers["x-jserve-ignored-params"] == "temperature"
    assert (await srv.post("/detokenize", {"tokens": [999]}))[1]["error"]["param"] == "tokens"
